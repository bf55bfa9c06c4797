"""What the gallery must hold: every acknowledged write, and what an interrupted one may have left."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal, NamedTuple

Json = dict[str, Any]
Outcome = Literal["pending", "acknowledged", "refused", "unknown"]
COLOURS = ("red", "green", "blue", "yellow")
_COMPARISONS = {"gte": operator.ge, "gt": operator.gt, "lte": operator.le, "lt": operator.lt}


def content(item_id: str, stamp: int) -> tuple[str, Json]:
    """Returns title and attributes of an item as write `stamp` makes them; a mixture of two writes is never equal."""
    attributes: Json = {
        "kind": item_id.partition("-")[0],
        "stamp": stamp,
        "even": stamp % 2 == 0,
        "price": stamp / 4,
        "colour": COLOURS[stamp % len(COLOURS)],
        "seal": f"{item_id}:{stamp}",
    }
    if stamp % 3 == 0:
        attributes["sale"] = str(stamp)
    return f"{item_id} as of {stamp}", attributes


class ItemState(NamedTuple):
    """The content of an item, by the stamp of the write that made it, and its images with their digests."""

    stamp: int
    images: frozenset[tuple[str, str]]


@dataclass
class Attempt:
    """A write and what is known about it; `state` is None for a deletion."""

    state: ItemState | None
    outcome: Outcome = "pending"
    ended: float = 0.0
    reason: str = ""
    """Why it was refused."""

    def end(self, outcome: Outcome, reason: str = "") -> None:
        self.outcome, self.ended, self.reason = outcome, monotonic(), reason


class ItemHistory:
    """The writes of one item. Those of a single writer are in order; those of several may be applied in any order."""

    def __init__(self, *, ordered: bool = True) -> None:
        self.attempts = [Attempt(None, "acknowledged")]
        self._ordered = ordered

    def begin(self, state: ItemState | None) -> Attempt:
        """Records a write before it is sent."""
        self.attempts.append(Attempt(state))
        return self.attempts[-1]

    def candidates(self, started: float) -> Iterator[ItemState | None]:
        """Yields the states that a read may return which began at `started`, newest first."""
        for attempt in reversed(self.attempts):
            if attempt.outcome != "refused":
                yield attempt.state
            if self._ordered and attempt.outcome == "acknowledged" and attempt.ended <= started:
                return

    @property
    def is_certain(self) -> bool:
        """Whether the last write has a known outcome."""
        return next(one for one in reversed(self.attempts) if one.outcome != "refused").outcome == "acknowledged"

    @property
    def current(self) -> ItemState | None:
        """The state that the last acknowledged write made."""
        return next(one.state for one in reversed(self.attempts) if one.outcome == "acknowledged")

    def settle(self, state: ItemState | None) -> None:
        """Records which state was read after an interrupted write, when nothing else writes the item."""
        for attempt in self.attempts:
            if attempt.outcome == "unknown":
                attempt.end("acknowledged" if attempt.state == state else "refused", "it was interrupted and not found")


@dataclass
class Counter:
    """An item that several clients increment by compare-and-set."""

    acknowledged: int = 0
    unknown: int = 0


@dataclass
class Expectations:
    """Everything that clients wrote, and rows of the catalogue that nobody changes."""

    shop: dict[str, tuple[str, Json]] = field(default_factory=dict)
    histories: dict[str, ItemHistory] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    vectors: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """Item and image to digest and bundle, of images that were surely embedded with that bundle."""
    stored: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    """Item and image to digest and the time at which the acknowledged request that sent the photo began."""
    newest_version: int = 0
    """The newest version that was acknowledged: every later answer of a search must include it."""
    acknowledged: int = 0
    unknown: int = 0

    def acknowledge(self, attempt: Attempt | None, version: int) -> None:
        if attempt:
            attempt.end("acknowledged")
        self.newest_version = max(self.newest_version, version)
        self.acknowledged += 1

    def check_match(self, match: Json, started: float, wanted: Json) -> str | None:
        """Returns what is wrong with an item in the answer of a search that began at `started`."""
        image = (match["image"]["id"], match["image"]["url"].rpartition("/")[2].removesuffix(".jpg"))
        return self._check(match, started, wanted, image)

    def check_listed(self, item: Json, started: float, wanted: Json) -> str | None:
        """Returns what is wrong with an item in a list, or one that was read alone."""
        return self._check(item, started, wanted, frozenset((image["id"], image["digest"]) for image in item["images"]))

    def _check(
        self, item: Json, started: float, wanted: Json, images: tuple[str, str] | frozenset[tuple[str, str]]
    ) -> str | None:
        item_id, attributes = item["id"], item["attributes"]
        if not matches(wanted, attributes):
            return f"{item_id} with {attributes} does not match the filter {wanted}"
        if item_id in self.shop:
            expected = self.shop[item_id]
            same = (item["title"], attributes) == expected
            return None if same else f"{item_id} is {item['title']!r} with {attributes}, not {expected}"
        if item_id in self.counters:
            return None
        history, stamp = self.histories.get(item_id), attributes.get("stamp")
        if history is None:
            return f"{item_id} was never written"
        if not isinstance(stamp, int) or (item["title"], attributes) != content(item_id, stamp):
            return f"{item_id} is torn: {item['title']!r} with {attributes}"
        possible = list(history.candidates(started))
        if any(state and state.stamp == stamp and _has_images(state, images) for state in possible):
            return None
        for attempt in history.attempts:
            if attempt.outcome == "refused" and attempt.state and attempt.state.stamp == stamp:
                return f"{item_id} is returned as of {stamp}, but that write was refused: {attempt.reason}"
        if possible == [None]:
            return f"{item_id} was deleted, but is returned as of {stamp}"
        return f"{item_id} is returned as of {stamp} with {images}; possible are {possible[:4]}"


def _has_images(state: ItemState, images: tuple[str, str] | frozenset[tuple[str, str]]) -> bool:
    return images == state.images if isinstance(images, frozenset) else images in state.images


def matches(wanted: Json, attributes: Mapping[str, Any]) -> bool:
    """Returns whether attributes match a filter; a second implementation, to compare the service with."""
    return all(_matches_one(name, condition, attributes) for name, condition in wanted.items())


def _matches_one(name: str, condition: Any, attributes: Mapping[str, Any]) -> bool:
    if name == "not":
        return not any(matches(one, attributes) for one in (condition if isinstance(condition, list) else [condition]))
    value = attributes.get(name)
    if isinstance(condition, list):
        return any(_is_equal(value, one) for one in condition)
    if not isinstance(condition, dict):
        return _is_equal(value, condition)
    if "exists" in condition:
        return (name in attributes) is condition["exists"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return all(_COMPARISONS[name](value, bound) for name, bound in condition.items())


def _is_equal(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other
