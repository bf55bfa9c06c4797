"""The bundles of a gallery: where each comes from, how many vectors it has, and what it is used for."""

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from index._util.models import Frozen
from index.embedding.bundle import CARD_FILE
from index.errors import LookalikeError
from index.gallery.store.base import ItemStore
from index.gallery.types import NeededBundles


class BundleStats(Frozen):
    """A bundle with vectors in the gallery."""

    id: str
    state: Literal["active", "previous", "prepared", "unused"] = Field(
        description="active: searches use it; previous: a rollback activates it; prepared: its last job has not "
        "activated it; unused: nothing needs it"
    )
    vectors: int
    dimension: int
    added: datetime | None = Field(default=None, description="when the gallery got its copy of the bundle")
    backbone: str = Field(default="", description="backbone, loss and data are of the copy's card")
    loss: str = ""
    data: str = ""


def list_bundles(store: ItemStore, needed: NeededBundles) -> list[BundleStats]:
    """Returns the bundles with vectors, the active one first; one without a readable copy has no origin."""
    with store.open_reader() as reader:
        head = reader.head()
        counts = [(row, reader.image_count(row.key)) for row in reader.bundles()]
    found = []
    for row, vectors in counts:
        if head.bundle and row.id == head.bundle.id:
            state = "active"
        elif head.previous and row.id == head.previous.id:
            state = "previous"
        else:
            state = "prepared" if row.id in needed.prepared else "unused"
        values = {"id": row.id, "state": state, "vectors": vectors, "dimension": row.dimension}
        found.append(BundleStats.model_validate(values | _origin(store, row.id)))
    order = ("active", "previous", "prepared", "unused")
    return sorted(found, key=lambda bundle: order.index(bundle.state))


def _origin(store: ItemStore, bundle_id: str) -> dict[str, object]:
    try:
        copy = store.load_bundle(bundle_id) if store.has_bundle(bundle_id) else None
    except LookalikeError:  # `gallery verify` reports a damaged copy
        copy = None
    if copy is None:
        return {}
    added = datetime.fromtimestamp((copy.directory / CARD_FILE).stat().st_mtime, UTC)
    return {"added": added, "backbone": copy.card.backbone, "loss": copy.card.loss, "data": copy.card.data}
