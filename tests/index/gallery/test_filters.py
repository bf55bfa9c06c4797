"""Filters: which items match, the errors of invalid filters, and which filters are equal."""

import json
from typing import Any

import pytest

from index.errors import LookalikeError
from index.gallery.filters import MAX_CONDITIONS, MAX_DEPTH, MAX_VALUES, Filter, FilterError
from index.items import MAX_INTEGER, MAX_NAME_LENGTH, MAX_TEXT_LENGTH, Attribute

MUG: dict[str, Attribute] = {
    "category": "mug",
    "colour": "red",
    "price": 7.5,
    "stock": 1,
    "sale": True,
    "since": "2024-05-01",
    "sizes": ("S", "M", 38, "1"),
    "launched": ("2026-11-19T10:00:00+02:00", "soon"),
}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"category": "mug"},
        {"category": "mug", "colour": ["blue", "red"]},
        {"colour": [1, True, "red"]},
        {"stock": 1},
        {"stock": 1.0},
        {"sale": True},
        {"price": {"gte": 7.5}},
        {"price": {"gt": 7, "lt": 8}},
        {"price": {"lte": 7.5}},
        {"since": {"gte": "2024-01-01", "lt": "2025-01-01"}},
        {"sale": {"exists": True}},
        {"brand": {"exists": False}},
        {"not": {"brand": "Acme"}},
        {"not": {"category": "mug", "colour": "blue"}},
        {"not": {"not": {"category": "mug"}}},
        {"not": [{"brand": "Acme"}, {"colour": "no such colour"}]},
        {"category": "mug", "not": {"price": {"gt": 7.5}}},
        {"sizes": "M"},
        {"sizes": ["XL", 38.0]},
        {"sizes": {"all": ["S", "M"]}},
        {"sizes": {"all": ["S", 38, "S"]}},
        {"colour": {"all": ["red"]}},
        {"sizes": {"gt": "L", "lt": "N"}},
        {"sizes": {"gte": 38}},
        {"sizes": {"exists": True}},
        {"not": {"sizes": {"all": ["S", "XL"]}}},
        {"any": [{"colour": "blue"}, {"price": {"lt": 8}}]},
        {"category": "mug", "any": [{"colour": "red", "price": 1}, {"not": {"brand": "Acme"}}]},
        {"any": [{"any": [{"colour": "blue"}, {"sizes": "S"}]}]},
        {"not": {"any": [{"colour": "blue"}, {"price": 1}]}},
        {"since": {"gte": "2024-05-01T02:00:00+02:00", "lte": "2024-05-01T00:00:00Z"}},
        {"since": {"lt": "2024-05-01 00:00:00.000001"}},
        {"launched": {"gte": "2026-11-19T08:00Z", "lt": "2026-11-20"}},
        {"launched": {"gte": "s"}},
    ],
)
def test_a_matching_filter(document: dict[str, object]) -> None:
    assert Filter.parse(document).matches(MUG)


@pytest.mark.parametrize(
    "document",
    [
        {"category": "plate"},
        {"category": "Mug"},
        {"category": "mug", "colour": "blue"},
        {"stock": True},
        {"stock": "1"},
        {"sale": 1},
        {"sale": {"gte": 0}},
        {"category": {"gte": 0}},
        {"price": {"gte": "0"}},
        {"price": {"gt": 7.5}},
        {"price": {"lt": 7.5}},
        {"price": {"gte": 9, "lte": 2}},
        {"brand": "Acme"},
        {"brand": {"lt": "z"}},
        {"brand": {"exists": True}},
        {"sale": {"exists": False}},
        {"not": {"category": "mug"}},
        {"not": [{"brand": "Acme"}, {"category": "mug"}]},
        {"category": "mug", "not": {"price": {"lt": 8}}},
        {"sizes": "38"},
        {"sizes": 1},
        {"sizes": {"all": ["S", "XL"]}},
        {"colour": {"all": ["red", "blue"]}},
        {"brand": {"all": ["Acme"]}},
        {"sizes": {"gt": "M", "lt": "S"}},
        {"sizes": {"lt": 38}},
        {"sizes": {"exists": False}},
        {"not": {"sizes": "S"}},
        {"any": [{"colour": "blue"}, {"price": {"gt": 8}}]},
        {"category": "plate", "any": [{"colour": "red"}]},
        {"any": [{"colour": "red"}], "not": {"any": [{"price": 1}, {"sizes": 38}]}},
        {"since": {"gt": "2024-05-01T00:00:00Z"}},
        {"since": {"lt": "2024-05-01T02:00+02:00"}},
        {"category": {"gte": "0001-01-01"}},
        {"launched": {"gt": "2026-11-19T08:00Z"}},
        {"since": "2024-05-01T00:00:00Z"},
    ],
)
def test_a_filter_that_does_not_match(document: dict[str, object]) -> None:
    assert not Filter.parse(document).matches(MUG)


def test_strings_are_ordered_by_code_point() -> None:
    above = Filter.parse({"name": {"gt": "Z\U0001f375"}})
    assert above.matches({"name": "a"}) and above.matches({"name": "é"}) and not above.matches({"name": "Zz"})


def nested(times: int) -> dict[str, Any]:
    return {"a": 1} if times == 0 else {"not": nested(times - 1)}


@pytest.mark.parametrize(
    ("document", "problem", "remedy"),
    [
        (None, "filter is null, not an object.", '{"colour": "red"}'),
        (["red"], "filter is a list, not an object.", '{"colour": "red"}'),
        ({"not": "mug"}, 'filter.not is "mug", not an object.', '{"colour": "red"}'),
        ({"not": {}}, "filter.not is {}, which excludes every item.", "Leave it out"),
        ({"not": [{"a": 1}, {}]}, "filter.not[1] is {}, which excludes every item.", "Leave it out"),
        ({"not": []}, "filter.not is an empty list, which excludes nothing.", "Leave it out"),
        ({"not": [{"a": None}]}, "filter.not[0].a is null.", "exists"),
        ({"not": [{}] * (MAX_CONDITIONS + 1)}, "filter.not has 65 filters", "Use fewer"),
        ({"a": {"\ud800": 1}}, r'filter.a has the unknown operator "\ud800"', "gte, gt, lte, lt, exists"),
        ({"price": None}, "filter.price is null.", '{"exists": false}'),
        ({"price": [5, None]}, "filter.price[1] is null.", '{"exists": false}'),
        ({"price": {"gte": None}}, "filter.price.gte is null.", '{"exists": false}'),
        ({"price": {"min": 5}}, 'filter.price has the unknown operator "min".', "gte, gt, lte, lt, exists"),
        ({"colour": []}, "filter.colour is an empty list", "leave the attribute out"),
        ({"colour": {}}, "filter.colour is an empty object.", "gte, gt, lte, lt, exists"),
        ({"price": {"gte": {"lt": 5}}}, "filter.price.gte is an object.", "Use a string, a number"),
        ({"price": {"gte": [5]}}, "filter.price.gte is a list.", "Use a string, a number"),
        ({"price": [{"gte": 5}]}, "filter.price[0] is an object.", "Use a string, a number"),
        ({"size": {"width": {"gte": 5}}}, 'filter.size has the unknown operator "width".', "not nested"),
        (
            {"price": {"gte": 5, "lt": "20"}},
            'mixes a number and a string: gte 5 and lt "20".',
            "two numbers or two strings",
        ),
        ({"price": {"gte": 5, "gt": 5}}, "filter.price has both `gte` and `gt`.", "Keep one"),
        ({"price": {"lte": 5, "lt": 5}}, "filter.price has both `lte` and `lt`.", "Keep one"),
        ({"sale": {"gte": True}}, "filter.sale.gte is true, which has no order.", "a number or a string"),
        ({"price": {"gte": "2026-11-19", "lt": "5"}}, 'mixes a date and another text: gte "2026-11-19"', "two dates"),
        ({"price": {"gte": "2026-11-19", "lt": "2026-02-30"}}, 'lt "2026-02-30".', "two dates"),
        ({"price": {"gte": "2026-11-19", "lt": 5}}, "mixes a number and a string", "two numbers or two strings"),
        ({"sizes": {"all": "S"}}, 'filter.sizes.all is "S", not a list.', '{"all": ["S", "M"]}'),
        ({"sizes": {"all": []}}, "filter.sizes.all is an empty list", "Add a value"),
        ({"sizes": {"all": ["S", None]}}, "filter.sizes.all[1] is null.", "exists"),
        ({"sizes": {"all": ["S"], "gte": 5}}, "filter.sizes combines `all`", "alone"),
        ({"any": {"a": 1}}, "filter.any is an object, not a list of filters.", "List filters"),
        ({"any": "red"}, 'filter.any is "red", not a list of filters.', "List filters"),
        ({"any": []}, "filter.any is an empty list, which no item matches.", "Add filters"),
        ({"any": [{"a": 1}, {}]}, "filter.any[1] is {}, which matches every item.", "a condition"),
        ({"any": [{"a": 1}, "b"]}, 'filter.any[1] is "b", not an object.', '{"colour": "red"}'),
        ({"any": [{"a": None}]}, "filter.any[0].a is null.", "exists"),
        ({"any": [{"a": 1}] * (MAX_CONDITIONS + 1)}, "filter.any has 65 filters", "Use fewer"),
        ({"any": [{"a": 1}, {str(n): n for n in range(MAX_CONDITIONS)}]}, "filter.any[1].63 exceeds", "Use fewer"),
        ({"any": [{"a": 1}, {"sku": {"all": list(range(MAX_VALUES))}}]}, "sku.all[999] exceeds", "Use fewer"),
        ({"sale": {"exists": 1}}, "filter.sale.exists is 1.", "true or false"),
        ({"sale": {"exists": True, "gte": 1}}, "filter.sale combines `exists`", "alone"),
        ({"price": float("nan")}, "filter.price is NaN.", "finite"),
        ({"price": {"lt": float("inf")}}, "filter.price.lt is Infinity.", "finite"),
        ({"sku": MAX_INTEGER + 1}, "filter.sku is 9007199254740993, too large", "as strings"),
        ({"name": "x" * (MAX_TEXT_LENGTH + 1)}, "filter.name is a string of 4,097 characters", "at most 4,096"),
        ({"": 1}, 'filter has the attribute name ""', "1 to 256"),
        ({"x" * (MAX_NAME_LENGTH + 1): 1}, 'filter has the attribute name "xxx', "1 to 256"),
        ({"not": {1: 1}}, "filter.not has the attribute name 1", "a string"),
        (nested(MAX_DEPTH + 1), "nested deeper than 8 times", "fewer"),
        ({"any": [nested(MAX_DEPTH)]}, "nested deeper than 8 times", "fewer"),
        ({str(n): n for n in range(MAX_CONDITIONS + 1)}, "filter.64 exceeds the limit of 64 conditions", "Use fewer"),
        ({"a": 1, "not": {str(n): n for n in range(MAX_CONDITIONS)}}, "filter.not.63 exceeds", "Use fewer"),
        ({"sku": list(range(MAX_VALUES + 1))}, "filter.sku[1000] exceeds the limit of 1,000 values", "Use fewer"),
        ({"a": 1, "sku": list(range(MAX_VALUES))}, "filter.sku[999] exceeds", "Use fewer"),
    ],
)
def test_an_invalid_filter_raises_an_error_with_path_and_remedy(document: object, problem: str, remedy: str) -> None:
    with pytest.raises(FilterError) as caught:
        Filter.parse(document)
    assert problem in caught.value.problem and remedy in caught.value.remedy
    assert isinstance(caught.value, LookalikeError) and caught.value.kind == "filter"
    assert len(str(caught.value).encode()) < 300


def test_filters_at_the_limits_are_valid() -> None:
    assert Filter.parse(nested(MAX_DEPTH)).matches({"a": 1})
    assert Filter.parse({str(n): {"exists": False} for n in range(MAX_CONDITIONS)}).matches({})
    assert Filter.parse({"sku": list(range(MAX_VALUES))}).matches({"sku": MAX_VALUES - 1})
    assert Filter.parse({"sku": MAX_INTEGER}).matches({"sku": MAX_INTEGER})
    assert Filter.parse({"x" * MAX_NAME_LENGTH: "y" * MAX_TEXT_LENGTH}) != Filter()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": "red"}, {"a": ["red"]}),
        ({"a": ["red", "blue"]}, {"a": ["blue", "red", "blue"]}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0}, {"a": -0.0}),
        ({"a": {"gte": 1, "lt": 5}}, {"a": {"lt": 5.0, "gte": 1.0}}),
        ({"not": {"a": [1, 2]}}, {"not": {"a": [2, 1]}}),
        ({"not": [{"a": 1}, {"b": 2}, {"a": 1}]}, {"not": [{"b": 2}, {"a": 1}]}),
        ({"not": [{"a": 1}]}, {"not": {"a": 1}}),
        ({"a": {"all": ["x", "y", "x"]}}, {"a": {"all": ["y", "x"]}}),
        ({"a": {"all": [1]}}, {"a": 1.0}),
        ({"any": [{"a": 1}, {"b": 2}, {"a": 1}]}, {"any": [{"b": 2}, {"a": 1}]}),
        ({"a": {"gte": "2026-11-19"}}, {"a": {"gte": "2026-11-19T01:00:00+01:00"}}),
    ],
)
def test_filters_that_mean_the_same_are_equal(one: dict[str, object], other: dict[str, object]) -> None:
    first, second = Filter.parse(one), Filter.parse(other)
    assert first == second and len({first, second}) == 1
    assert json.dumps(first.document) == json.dumps(second.document)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"not": {"a": 1}}),
        ({"a": {"gte": 1}}, {"a": {"gt": 1}}),
        ({"a": {"exists": True}}, {"a": {"exists": False}}),
        ({}, {"a": 1}),
        ({"a": {"all": ["x", "y"]}}, {"a": ["x", "y"]}),
        ({"any": [{"a": 1}, {"b": 2}]}, {"a": 1, "b": 2}),
        ({"any": [{"a": 1}, {"b": 2}]}, {"not": [{"a": 1}, {"b": 2}]}),
        ({"a": {"gte": "2026-11-19"}}, {"a": {"gte": "2026-11-19T01:00:00"}}),
        ({"a": "2026-11-19"}, {"a": "2026-11-19T00:00:00Z"}),
    ],
)
def test_filters_that_mean_different_things_are_not_equal(one: dict[str, object], other: dict[str, object]) -> None:
    assert Filter.parse(one) != Filter.parse(other)


def test_the_document_of_a_filter_is_canonical() -> None:
    given = {"b": [True, "x", 2.0, "x"], "a": {"lt": 5.5, "gte": 1.0}, "c": ["y"], "not": {"d": {"exists": True}}}
    document = Filter.parse(given).document
    assert document == {"a": {"gte": 1, "lt": 5.5}, "b": [True, 2, "x"], "c": "y", "not": {"d": {"exists": True}}}
    assert Filter.parse(json.loads(json.dumps(document))) == Filter.parse(given)


def test_the_document_of_lists_alternatives_and_dates_is_canonical() -> None:
    given = {
        "any": [{"b": 1}, {"a": {"all": ["y", 1, "x", 1.0]}}],
        "since": {"lt": "2026-11-19T12:30:00.5+02:00", "gte": "2026-11-18T00:00Z"},
    }
    document = Filter.parse(given).document
    assert document == {
        "any": [{"a": {"all": [1, "x", "y"]}}, {"b": 1}],
        "since": {"lt": "2026-11-19T10:30:00.500000Z", "gte": "2026-11-18T00:00:00Z"},
    }
    assert Filter.parse(json.loads(json.dumps(document))) == Filter.parse(given)
