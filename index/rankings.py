"""Rankings as data: how the items that a search finds are put into their final order.

Imports neither NumPy nor an engine, so that the HTTP client can use the same types as the gallery.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from index._util.models import Frozen, ReceivedObject
from index.items import MAX_ID_LENGTH, AttributeName

DEFAULT_WINDOW, MIN_WINDOW, MAX_WINDOW = 48, 10, 500
"""Candidates that rules act on. A cursor names those of a window that were returned, which bounds the largest one."""
MAX_BOOSTS = 16
MAX_PINS = 50
MAX_HIDDEN = 1000
MAX_TOTAL_WEIGHT = 1.0
"""How far all boosts together may change a score; a similarity is at most 1."""
MAX_HALF_LIFE_DAYS = 36_500
MAX_EXAMPLES = 16
"""Photos and items that one search combines."""
MAX_RANKINGS = 1000
"""Rankings that a gallery holds."""
MAX_LENGTH = 100_000
"""Characters of a stored ranking as JSON: all versions of one, or all rankings, are listed in one answer."""
MAX_VERSIONS = 100
"""Versions of a ranking that are kept, the newest ones."""
RANKING_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

Reason = TypeAliasType("Reason", Literal["pinned", "similarity", "score", "diversity", "sort"])
"""A named type has one schema, which generated clients name as well."""
Combination = TypeAliasType("Combination", Literal["mean", "best"])
"""How several examples become one query: their weighted mean, or each item by its nearest example."""
SortOrder = TypeAliasType("SortOrder", Literal["ascending", "descending"])
FilterDocument = TypeAliasType("FilterDocument", dict[str, Any])
_ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class _Rules(ReceivedObject, Frozen):
    """A part of a ranking."""


class Boost(_Rules):
    """Adds up to `weight` to the score of an item: by a filter, a number, or a date."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    weight: float = Field(ge=-1, le=1, allow_inf_nan=False, description="the most that it adds; negative to subtract")
    filter: FilterDocument | None = Field(default=None, description="adds the weight to items that match it")
    attribute: AttributeName | None = Field(default=None, description="adds a share of the weight by its value")
    from_: _Number | None = Field(default=None, alias="from", description="number from which on it adds something")
    to: _Number | None = Field(default=None, description="number from which on it adds the weight; may be the smaller")
    half_life_days: float | None = Field(
        default=None, gt=0, le=MAX_HALF_LIFE_DAYS, description="age of a date at which it adds half of the weight"
    )
    missing: _Share = Field(default=0.0, description="share of the weight for items without such a value")

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        by_number, by_date = self.from_ is not None or self.to is not None, self.half_life_days is not None
        if (self.filter is not None) + (self.attribute is not None) != 1:
            raise ValueError("give either filter or attribute")
        if self.filter is not None and (by_number or by_date or self.missing):
            raise ValueError("from, to, half_life_days and missing belong to an attribute, not to a filter")
        if self.attribute is not None and by_number == by_date:
            raise ValueError("give an attribute either from and to, or half_life_days")
        if by_number and (self.from_ is None or self.to is None or self.from_ == self.to):
            raise ValueError("from and to must be two different numbers")
        return self


class Hidden(_Rules):
    """Items that are never returned."""

    ids: Annotated[list[_ItemId], FailFast()] = Field(
        default=[], max_length=MAX_HIDDEN, description="ids of items to hide"
    )
    filter: FilterDocument = Field(default={}, description="hides the items that match it, if it has conditions")


class SortBy(_Rules):
    """Puts items into the order of an attribute: numbers, then texts, then booleans; those without it come last."""

    attribute: AttributeName
    order: SortOrder = Field(default="ascending", description="which values come first")


class Ranking(_Rules):
    """Rules for the order of the items that a search finds.

    They are applied in this order: hide, pin, group_by, boosts, then sort_by or diversity.
    """

    hide: Hidden = Field(default_factory=Hidden, description="items that are never returned")
    pin: Annotated[list[_ItemId], FailFast()] = Field(
        default=[], max_length=MAX_PINS, description="ids of items to return first, in this order, if they match"
    )
    group_by: AttributeName | None = Field(
        default=None, description="returns one item for each value of this attribute: the most similar one"
    )
    boosts: list[Boost] = Field(default=[], max_length=MAX_BOOSTS, description="each adds to the score of some items")
    sort_by: SortBy | None = Field(default=None, description="orders the candidates by an attribute, not by score")
    diversity: _Share = Field(
        default=0.0, description="how much an item's score is reduced by its similarity to the items before it"
    )
    window: int = Field(
        default=DEFAULT_WINDOW,
        ge=MIN_WINDOW,
        le=MAX_WINDOW,
        description="number of the most similar items on which boosts, sort_by and diversity act at a time",
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.sort_by and self.diversity:
            raise ValueError("sort_by and diversity cannot be combined")
        total = sum(abs(boost.weight) for boost in self.boosts)
        if total > MAX_TOTAL_WEIGHT + 1e-9:
            raise ValueError(f"the weights of all boosts add up to {total:g}; the limit is {MAX_TOTAL_WEIGHT:g}")
        for name, ids in (("pin", self.pin), ("hide.ids", self.hide.ids)):
            if len(set(ids)) < len(ids):
                raise ValueError(f"{name} has an id twice")
        return self


RankingName = Annotated[str, Field(pattern=RANKING_NAME)]
NAME_TAG, RULES_TAG = "ranking name", "ranking rules"
RankingChoice = Annotated[
    Annotated[RankingName, Tag(NAME_TAG)] | Annotated[Ranking, Tag(RULES_TAG)],
    Discriminator(
        lambda value: NAME_TAG if isinstance(value, str) else RULES_TAG if isinstance(value, dict | Ranking) else None,
        custom_error_type="ranking_type",
        custom_error_message="must be the name of a stored ranking, or an object with rules",
    ),
]
"""Rules, or the name under which the gallery holds them."""


class StoredRanking(Frozen):
    """A ranking that the gallery holds under a name."""

    name: str
    version: int = Field(description="the gallery's revision that stored it")
    stored: float = Field(description="when it was stored, in seconds since 1970")
    ranking: Ranking


class Share(Frozen):
    """What a rule adds to the score of an item."""

    rule: str = Field(description="such as `boosts[0]`, `diversity` or `negative examples`")
    share: float


class Explanation(Frozen):
    """Why an item is where it is: its score is its similarity and all shares together."""

    similarity: float
    shares: list[Share]
    score: float
    similarity_place: int | None = Field(description="its place in the window by similarity alone; null if pinned")
    reason: Reason = Field(description="what decided its place")
    detail: str = Field(description="the reason as a sentence")


class Window(Frozen):
    """The candidates on which rules acted: those that are most similar, of the ones not returned by earlier windows."""

    size: int = Field(description="how many the ranking asks for")
    candidates: int = Field(description="how many there were")
    exhausted: bool = Field(description="whether no items are left after them")
