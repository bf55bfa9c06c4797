"""Groups of lines: they are found across a feed of any size, and held one product at a time."""

import tracemalloc

from index.ingest.feeds.groups import GroupLine, group_lines
from index.ingest.tables import Row


def lines(count: int, products: int) -> list[GroupLine]:
    return [
        GroupLine(f"line {number}", {"n": str(number)}, [f"p{number % products}"], f"p{number % products}")
        for number in range(count)
    ]


def test_groups_are_in_the_order_of_their_first_lines() -> None:
    assert list(group_lines(lines(5, products=2))) == [
        [("line 0", {"n": "0"}), ("line 2", {"n": "2"}), ("line 4", {"n": "4"})],
        [("line 1", {"n": "1"}), ("line 3", {"n": "3"})],
    ]


def test_the_line_that_others_belong_to_is_first_and_those_without_it_are_alone() -> None:
    found = group_lines(
        [
            GroupLine("line 1", {"n": "child"}, parent="a"),
            GroupLine("line 2", {"n": "orphan"}, parent="none"),
            GroupLine("line 3", {"n": "bad"}, problem="cut off"),
            GroupLine("line 4", {"n": "parent", "empty": ""}, names=["a", "id:1"]),
            GroupLine("line 5", {"n": "another of that name"}, names=["a"]),
            GroupLine("line 6", {"n": "second child"}, parent="id:1"),
        ]
    )
    assert list(found) == [
        [("line 2", {"n": "orphan"})],
        Row("line 3", {"n": "bad"}, "cut off"),
        [("line 4", {"n": "parent"}), ("line 1", {"n": "child"}), ("line 6", {"n": "second child"})],
        [("line 5", {"n": "another of that name"})],
    ]


def test_lines_that_are_too_many_for_a_product_are_bad_rows() -> None:
    *bad, group = group_lines(lines(10_002, products=1))
    assert len(group) == 10_000
    assert bad == [Row(f"line {number}", {}, "more than 10,000 lines of one product") for number in (10_000, 10_001)]


def test_many_lines_are_grouped_in_constant_memory() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        products = count // 10
        apart = ((number, f"p{number % products}") for number in range(count))
        stream = (GroupLine(f"line {number}", {"text": "x" * 500}, [name], name) for number, name in apart)
        assert sum(len(group) for group in group_lines(stream)) == count
        _, used = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used

    peak(1000)  # what is allocated once
    assert peak(20_000) < 2 * peak(1000)
