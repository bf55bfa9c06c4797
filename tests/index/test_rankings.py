"""Rankings as data: what is refused, and that they survive JSON."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from index.rankings import Ranking

COMPLETE: dict[str, Any] = {
    "hide": {"ids": ["a"], "filter": {"stock": 0}},
    "pin": ["b", "c"],
    "group_by": "parent",
    "boosts": [
        {"filter": {"sale": True}, "weight": 0.1},
        {"attribute": "margin", "from": 0, "to": 0.5, "weight": -0.2, "missing": 0.5},
        {"attribute": "added", "half_life_days": 30, "weight": 0.1},
    ],
    "diversity": 0.3,
    "window": 100,
}


def test_a_ranking_survives_json() -> None:
    ranking = Ranking.model_validate(COMPLETE)
    text = ranking.model_dump_json(exclude_defaults=True)
    assert Ranking.model_validate_json(text) == ranking
    assert json.loads(text) == COMPLETE


def test_an_empty_ranking_has_no_rules() -> None:
    assert Ranking.model_validate({}).model_dump(exclude_defaults=True) == {}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"boosts": [{"weight": 0.1}]}, "either filter or attribute"),
        ({"boosts": [{"weight": 0.1, "filter": {}, "attribute": "a"}]}, "either filter or attribute"),
        ({"boosts": [{"weight": 0.1, "attribute": "a"}]}, "either from and to, or half_life_days"),
        ({"boosts": [{"weight": 0.1, "attribute": "a", "from": 1, "to": 2, "half_life_days": 3}]}, "half_life_days"),
        ({"boosts": [{"weight": 0.1, "attribute": "a", "from": 1}]}, "two different numbers"),
        ({"boosts": [{"weight": 0.1, "attribute": "a", "from": 1, "to": 1}]}, "two different numbers"),
        ({"boosts": [{"weight": 0.1, "filter": {}, "to": 1}]}, "belong to an attribute"),
        ({"boosts": [{"weight": 1.1, "filter": {}}]}, "less than or equal to 1"),
        ({"boosts": [{"weight": 0.6, "filter": {}}, {"weight": -0.5, "filter": {}}]}, "add up to 1.1"),
        ({"boosts": [{"weight": 0.01, "filter": {}}] * 17}, "at most 16"),
        ({"boosts": [{"weight": 0.1, "attribute": "a", "half_life_days": 0}]}, "greater than 0"),
        ({"diversity": 1.1}, "less than or equal to 1"),
        ({"diversity": 0.5, "sort_by": {"attribute": "price"}}, "cannot be combined"),
        ({"window": 5}, "greater than or equal to 10"),
        ({"window": 501}, "less than or equal to 500"),
        ({"pin": ["a", "a"]}, "pin has an id twice"),
        ({"hide": {"ids": ["a", "a"]}}, "hide.ids has an id twice"),
        ({"pin": [str(number) for number in range(51)]}, "at most 50"),
        ({"grouped_by": "a"}, "not permitted"),
    ],
)
def test_an_invalid_ranking_is_refused(document: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Ranking.model_validate(document)
