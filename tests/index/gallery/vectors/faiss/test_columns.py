"""Columns: the mask of a filter equals its result for each row, and facets count the values."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from index.gallery.filters import Filter
from index.gallery.vectors.faiss.arrays import open_arrays, write_arrays
from index.gallery.vectors.faiss.columns import Columns, encode_columns
from index.items import MAX_FACETS, MAX_INTEGER, Attribute, Facet, Item, Value, values_of

Row = dict[str, Attribute]

# Values that are easily confused, and rows with every pair of them; few rows have the attribute `rare`.
NUMBERS: list[Value] = [0, -0.0, 1, 1.0, 0.1, 1e300, MAX_INTEGER, MAX_INTEGER - 1, -MAX_INTEGER]
TEXTS: list[Value] = ["", "1", "true", "é", "e\u0301", "\uffff", "\U0001f375"]
DATES: list[Value] = [
    "2026-11-19", "2026-11-19T00:00:00Z", "2026-11-19T02:00+03:00", "2026-11-18T23:59:59.999999", "2026-02-30"
]  # fmt: skip
SINGLE: list[Value] = [*NUMBERS, *TEXTS, *DATES, False, True]
VALUES: list[Attribute] = [*SINGLE]
ABSENT: list[Value] = [0.5, -1e300, 1e301, "0", "zz", "\U0001f376", "2026-11-19T00:00:00.000001Z", "0001-01-01"]
LISTS: list[Attribute] = [(1, True, "1"), ("2026-11-18", "2026-11-20", "é"), (0.1, 1e300), ("", "true"), ("zz",)]
PAIRS: list[Row] = [
    *({"price": price, "größe": size} for price in VALUES for size in VALUES),
    *({"price": value} for value in VALUES),
    *({"rare": value} for value in VALUES),
    *({"price": several, "sizes": several} for several in LISTS),
    *({"sizes": value} for value in VALUES),
    {},
]
numbers, texts, values = st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(VALUES)
dates = st.sampled_from([*DATES[:-1], ABSENT[-1]])
# Validated as those of an item: equal values are kept once.
lists = st.lists(st.sampled_from(SINGLE), min_size=1, max_size=4).map(
    lambda found: Item(id="i", attributes={"a": tuple(found)}).attributes["a"]
)
names = st.sampled_from(["price", "größe", "rare"])
rows = st.lists(st.dictionaries(names, values | lists), max_size=12)


def ranges(bounds: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lower = st.dictionaries(st.sampled_from(["gte", "gt"]), bounds, max_size=1)
    upper = st.dictionaries(st.sampled_from(["lte", "lt"]), bounds, max_size=1)
    return st.builds(lambda low, high: {**low, **high}, lower, upper).filter(bool)


conditions = (
    values
    | st.lists(values, min_size=1, max_size=5)
    | ranges(numbers)
    | ranges(texts)
    | ranges(dates)
    | st.lists(values, min_size=1, max_size=3).map(lambda wanted: {"all": wanted})
    | st.builds(lambda wanted: {"exists": wanted}, st.booleans())
)
plain = st.dictionaries(names | st.just("unknown"), conditions, max_size=3)
filters = st.recursive(
    plain,
    lambda inner: st.builds(
        lambda outer, key, inner: {**outer, key: [inner] if key == "any" and isinstance(inner, dict) else inner},
        plain,
        st.sampled_from(["not", "any"]),
        inner.filter(bool) | st.lists(inner.filter(bool), min_size=1, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(rows, filters)
@example([{}, {"price": 1}, {"price": True}, {"price": "1"}, {"price": 1.0}], {"price": 1})
@example([{}, {"price": 5}, {"price": 6}], {"not": {"price": {"gt": 5}}})
@example([{}, {"price": -0.0}], {"price": {"gte": 0}})
@example([{}, {"price": 5}, {"price": 6}], {"price": {"gte": 5, "lte": 6}})
@example([{}, {}, {}, {}, {"price": 5}], {"price": {"exists": False}})
@example([{}, {"price": (1, 9)}, {"price": (5,)}], {"price": {"gt": 1, "lt": 9}})
@example([{}, {"price": (1, 9)}, {"price": 1}], {"not": {"price": {"exists": True}}})
@example([{}, {"price": ("1", 1, True)}, {"price": ("1", 1)}], {"price": {"all": ["1", True]}})
@example([{"price": "2026-11-19"}, {"price": ("red", "2026-12-01")}], {"price": {"gt": "2026-11-19T01:00+01:00"}})
@example([], {"price": {"exists": False}})
def test_the_mask_of_a_filter_equals_its_result_for_each_row(rows: list[Row], document: dict[str, Any]) -> None:
    columns, wanted = Columns(encode_columns(rows)), Filter.parse(document)
    mask = columns.mask(wanted)
    assert mask.dtype == np.bool_ and len(columns) == len(rows)
    assert mask.tolist() == [wanted.matches(row) for row in rows]


def test_every_condition_and_its_negation_is_correct_for_every_pair_of_values() -> None:
    columns = Columns(encode_columns(PAIRS))
    bounds = [value for value in [*VALUES, *ABSENT] if not isinstance(value, bool)]
    conditions: list[object] = [*VALUES, *ABSENT, [True, "1", 0.5], {"exists": True}, {"exists": False}]
    conditions += [{comparison: bound} for comparison in ("gte", "gt", "lte", "lt") for bound in bounds]
    conditions += [{"all": list(values_of(found))} for found in LISTS] + [
        {"all": [1, True]},
        {"all": ["", "true", "zz"]},
    ]
    for name, condition in product(["price", "größe", "rare", "sizes", "unknown"], conditions):
        for document in ({name: condition}, {"not": {name: condition}}):
            wanted = Filter.parse(document)
            assert columns.mask(wanted).tolist() == [wanted.matches(row) for row in PAIRS], document
            assert Filter.parse(wanted.document) == wanted


@settings(deadline=None)
@given(rows, st.integers(0, 4))
def test_facets_count_the_values(rows: list[Row], limit: int) -> None:
    expected: dict[str, dict[tuple[bool, Value], int]] = {}
    for row in rows:
        for name, attribute in row.items():
            counts = expected.setdefault(name, {})
            for value in values_of(attribute):
                counts[isinstance(value, bool), value] = counts.get((isinstance(value, bool), value), 0) + 1
    columns = Columns(encode_columns(rows))
    facets = list(columns.facets(limit))
    holders = {name: sum(name in row for row in rows) for name in expected}
    assert [facet.name for facet in facets] == sorted(expected, key=lambda name: (-holders[name], name))
    for facet in facets:
        assert list(columns.facets(limit, [facet.name])) == [facet]
        counts = expected[facet.name]
        assert facet.distinct == len(counts)
        assert [count for _, count in facet.values] == sorted(counts.values(), reverse=True)[:limit]
        assert all(counts[isinstance(value, bool), value] == count for value, count in facet.values)
        numbers = [value for truth, value in counts if not truth and not isinstance(value, str)]
        assert (facet.minimum, facet.maximum) == (min(numbers, default=None), max(numbers, default=None))


def test_a_facet_lists_frequent_values_first_and_the_range_of_numbers() -> None:
    rows: list[Row] = [{"size": 4.5}, {"size": "large"}, {"size": 3}, {"size": "large"}, {"size": True}, {}]
    columns = Columns(encode_columns(rows))
    values: list[tuple[Value, int]] = [("large", 2), (3, 1), (4.5, 1), (True, 1)]
    assert list(columns.facets(10)) == [Facet(name="size", values=values, minimum=3, maximum=4.5, distinct=4)]
    assert next(columns.facets(2)).values == values[:2]


def test_facets_are_the_attributes_of_most_rows_or_those_that_are_named() -> None:
    rows: list[Row] = [{"brand": "Acme", f"rare-{n:03}": n} for n in range(2 * MAX_FACETS)]
    columns = Columns(encode_columns([*rows, {"size": 1}, {"size": 1}, {"size": 1}]))
    assert [facet.name for facet in columns.facets(1)] == ["brand", "size", *(f"rare-{n:03}" for n in range(98))]
    named = columns.facets(1, ["rare-199", "unknown", "size"])
    assert [(facet.name, facet.values) for facet in named] == [("rare-199", [(199, 1)]), ("size", [(1, 3)])]


def test_a_facet_counts_an_item_once_for_each_of_its_values() -> None:
    rows: list[Row] = [{"sizes": ("S", "M"), "sale": True}, {"sizes": ("M", "L")}, {"sizes": "M"}, {}]
    columns = Columns(encode_columns(rows))
    (facet,) = columns.facets(10, ["sizes"])
    assert (facet.values, facet.distinct) == ([("M", 3), ("L", 1), ("S", 1)], 3)
    (facet,) = columns.facets(10, ["sizes"], filter=Filter.parse({"sale": {"exists": False}}))
    assert (facet.values, facet.distinct) == ([("M", 2), ("L", 1)], 2)
    (facet,) = columns.facets(10, ["sizes"], contains="l")
    assert facet.values == [("L", 1)]


@settings(deadline=None)
@given(rows, st.sampled_from([{"price": {"gte": 0}}, {"price": {"exists": True}}, {"not": {"price": 1}}, {}]))
def test_facets_under_a_filter_equal_those_of_the_matching_rows(rows: list[Row], document: dict[str, Any]) -> None:
    wanted = Filter.parse(document)
    matching = Columns(encode_columns(row for row in rows if wanted.matches(row)))
    found = Columns(encode_columns(rows)).facets(10, filter=wanted)
    assert {facet.name: facet for facet in found if facet.distinct} == {
        facet.name: facet for facet in matching.facets(10)
    }


def test_values_of_dense_and_sparse_columns_are_searched_in_any_case() -> None:
    rows: list[Row] = [{"name": value} for value in ("Straße", "STRASSE 5", "Weg", 5, 5.25, True)]
    cases: dict[str, list[Value]] = {
        "strasse": ["STRASSE 5", "Straße"],
        "5": [5, 5.25, "STRASSE 5"],
        "TRUE": [True],
        "x": [],
    }
    for padding in (0, 100):
        columns = Columns(encode_columns([*rows, *[{}] * padding]))
        for text, expected in cases.items():
            (facet,) = columns.facets(10, ["name"], contains=text)
            assert ([value for value, _ in facet.values], facet.distinct) == (expected, len(expected))


def test_rows_without_attributes_have_no_columns() -> None:
    cases: list[list[Row]] = [[], [{}, {}]]
    for rows in cases:
        columns = Columns(encode_columns(rows))
        assert (len(columns), list(columns.names), list(columns.facets(5))) == (len(rows), [], [])
        assert columns.mask(Filter()).tolist() == [True] * len(rows)
        assert columns.mask(Filter.parse({"price": 5})).tolist() == [False] * len(rows)


def test_columns_can_be_read_from_a_file(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"brand": "Acme", "price": n, "rare": "yes"} if n % 10 == 0 else {"price": n} for n in range(100)
    ]
    rows = [{**row, "sizes": ("S", n % 7), "since": f"2026-01-{n % 28 + 1:02}"} for n, row in enumerate(rows)]
    write_arrays(tmp_path / "columns", encode_columns(rows))
    columns = Columns(open_arrays(tmp_path / "columns"))
    assert list(columns.names) == ["brand", "price", "rare", "since", "sizes"]
    wanted = Filter.parse({"price": {"gte": 20, "lt": 60}, "rare": "yes", "not": {"price": [30, 50]}})
    assert np.flatnonzero(columns.mask(wanted)).tolist() == [20, 40]
    assert columns.mask(Filter.parse({"rare": {"exists": False}})).sum() == 90
    assert columns.mask(Filter.parse({"sizes": {"all": ["S", 3]}})).sum() == 14
    assert columns.mask(Filter.parse({"since": {"lt": "2026-01-03"}})).sum() == 8


def test_lists_take_four_bytes_for_each_value() -> None:
    arrays = encode_columns({"sizes": ("S", "M", n % 3)} for n in range(1_000))
    assert sum(values.nbytes for values in arrays.values()) < 3_000 * 4 + 200


@pytest.mark.parametrize(("distinct", "size"), [(100, 1), (127, 2), (5_000, 2), (33_000, 4)])
def test_codes_use_the_smallest_integer_type(distinct: int, size: int) -> None:
    arrays = encode_columns({"sku": f"{n:05}"} for n in range(distinct))
    assert sum(values.nbytes for values in arrays.values()) // distinct == size + len("00000") + 8, "and an offset"
    last = Filter.parse({"sku": f"{distinct - 1:05}"})
    assert np.flatnonzero(Columns(arrays).mask(last)).tolist() == [distinct - 1]


def test_the_size_of_rare_attributes_is_proportional_to_their_values() -> None:
    arrays = encode_columns({f"attribute-{n}": n} for n in range(3_000))
    assert sum(values.nbytes for values in arrays.values()) < 3_000 * 100 and len(arrays) < 10
    columns = Columns(arrays)
    assert np.flatnonzero(columns.mask(Filter.parse({"attribute-2000": 2_000}))).tolist() == [2_000]


def test_the_order_of_attributes_does_not_change_the_arrays() -> None:
    one = encode_columns([{"a": 1, "b": "x"}, {"b": "y", "a": -0.0}])
    other = encode_columns([{"b": "x", "a": 1.0}, {"a": 0, "b": "y"}])
    assert {name: values.tobytes() for name, values in one.items()} == {
        name: values.tobytes() for name, values in other.items()
    }


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_no_exact_integers_stay_as_they_are() -> None:
    for numbers in ([-(2.0**63), 5], [1e300, 5], [-1e300, 0.5], [MAX_INTEGER, 5]):
        columns = Columns(encode_columns([{"x": number} for number in numbers]))
        assert repr(columns.values("x", np.arange(2))) == repr(numbers)


def test_the_lists_of_many_rows_are_those_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in PAIRS if "sizes" in row or not row] * 3
    columns = Columns(encode_columns(rows))
    asked = np.random.default_rng(1).permutation(len(rows))
    assert columns.values("sizes", asked) is None
    monkeypatch.setattr("index.gallery.vectors.faiss.columns._MANY_ROWS", 1)
    found = columns.values("sizes", asked)
    assert found is not None
    for row, value in zip(asked.tolist(), found, strict=True):
        assert {*map(typed, values_of(value))} == {*map(typed, values_of(rows[row].get("sizes")))}


def typed(value: Value) -> tuple[bool, Value]:
    return isinstance(value, bool), value
