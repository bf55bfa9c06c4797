"""The classes that training used, and what happens when a model is measured on some of them.

A class counts as seen if it was learned or chose the epoch. A bundle carries hashes of the labels instead of the
labels: a few bytes per class, and no product names.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from index.embedding.bundle import Bundle
from training.data import DataSet
from training.data.dataset import count_noun, list_names
from training.errors import TrainingError

SeenPolicy = Literal["refuse", "exclude", "include"]
"""What is done about test classes that a model has seen."""

_BYTES = 5
"""Per class: of 10,000 test classes and 10,000 seen ones, fewer than one in 10,000 evaluations has a false match."""


@dataclass(frozen=True)
class SeenClasses:
    """A set of labels, kept as hashes."""

    digests: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, labels: Iterable[str]) -> "SeenClasses":
        return cls(frozenset(map(_digest, labels)))

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> "SeenClasses | None":
        """Returns the classes in a bundle's card, or None if it has no record of them."""
        if bundle.card.seen_classes is None:
            return None
        try:
            joined = base64.b64decode(bundle.card.seen_classes, validate=True)
        except binascii.Error as error:
            raise TrainingError(
                f"seen_classes in the card of {bundle.directory} is not base64: {error}.", "Export the bundle again."
            ) from None
        return cls(frozenset(joined[start : start + _BYTES] for start in range(0, len(joined), _BYTES)))

    def encode(self) -> str:
        """Returns the text for a bundle's card; its order says nothing about the labels."""
        return base64.b64encode(b"".join(sorted(self.digests))).decode()

    def __contains__(self, label: str) -> bool:
        return _digest(label) in self.digests


def _digest(label: str) -> bytes:
    return hashlib.sha256(label.encode(errors="surrogateescape")).digest()[:_BYTES]


@dataclass(frozen=True)
class UnseenCheck:
    """The data to measure on, and what the models have seen of it."""

    data: DataSet
    classes: int
    """Number of classes with queries, before any were excluded."""
    seen: int
    """Number of these that a model has seen."""
    policy: SeenPolicy
    remarks: tuple[str, ...]
    """On seen classes and on models without a record; also among those of the data."""

    def record(self) -> dict[str, object]:
        """Returns the entry of a JSON file."""
        return {"classes": self.classes, "seen": self.seen, "policy": self.policy}


def check_unseen(data: DataSet, models: Mapping[str, SeenClasses | None], policy: SeenPolicy) -> UnseenCheck:
    """Refuses test classes that one of the models has seen, or excludes their queries, or includes them with a remark.

    Excluded classes stay in the gallery: they are wrong results for other queries. None stands for a model without a
    record, which cannot be checked.
    """
    labels = {photo.label for photo in data.test if photo.is_query}
    seen_by = {name: {label for label in labels if label in seen} for name, seen in models.items() if seen is not None}
    seen: set[str] = set().union(*seen_by.values())
    remarks = [
        f"{name} does not record the classes it was trained on: whether these are new to it was not checked."
        for name, known in models.items()
        if known is None
    ]
    photos = data.test
    if seen:
        name, most = max(seen_by.items(), key=lambda pair: len(pair[1]))
        used = f"{len(most):,} of the {len(labels):,} classes to measure were used to train {name}"
        if policy == "refuse" or (policy == "exclude" and seen == labels):
            raise TrainingError(
                f"{used}, such as {min(most)}.",
                "Measure on other products, or see --seen-classes in docs/evaluate.md.",
            )
        if policy == "include":
            remarks.append(f"{used}: the figures are too high for new products.")
        else:
            left_out = count_noun(len(seen), "class is not queried", "classes are not queried")
            remarks.append(f"{used}; {left_out}: {list_names(sorted(seen))}.")
            photos = tuple(photo._replace(is_query=False) if photo.label in seen else photo for photo in photos)
            photos = tuple(photo for photo in photos if photo.is_query or photo.is_gallery)
    checked = replace(data, test=photos, remarks=(*data.remarks, *remarks))
    return UnseenCheck(checked, len(labels), len(seen), policy, tuple(remarks))
