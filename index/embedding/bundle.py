"""The bundle: an exported model with its preprocessing rule and its measured metrics."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from index._util.files import atomic_write, atomic_write_text, file_digest, fsync_directory, temporary_directory
from index._util.models import Frozen
from index._util.validation import explain_errors
from index.embedding.images import Preprocessing
from index.errors import LookalikeError

MODEL_FILE = "model.onnx"
CARD_FILE = "bundle.json"
README_FILE = "README.md"


class BundleError(LookalikeError):
    """A bundle that is missing, damaged or of another schema version."""

    kind = "bundle"


class BundleCard(Frozen):
    """The contents of `bundle.json`: what users of a model must know and the ONNX graph does not contain."""

    schema_version: Literal[1] = 1
    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    model_digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    dimension: int = Field(gt=0)
    preprocessing: Preprocessing
    backbone: str
    loss: str = Field(description="empty if the backbone is used as it was pretrained")
    loss_settings: dict[str, Any] = {}
    data: str = ""
    metrics: dict[str, float] = Field(default={}, description="measured on products that training never saw, as shares")
    untrained_metrics: dict[str, float] = Field(default={}, description="the same metrics before training")
    refit: bool = Field(
        default=False,
        description="trained on all products; the metrics are of the same training without the test products",
    )
    remark: str = Field(default="", description="what users must know about the metrics, such as a failed training")
    seen_classes: str | None = Field(
        default=None, description="base64 of hashes of the labels that training used; null: not recorded"
    )
    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    fp32_metrics: dict[str, float] = Field(default={}, description="at full precision, if this model is reduced")
    versions: dict[str, str] = {}


class Bundle:
    """A verified bundle on disk."""

    def __init__(self, directory: Path, card: BundleCard) -> None:
        self.directory = directory
        self.card = card

    @property
    def id(self) -> str:
        """Identifies the vector space: vectors of bundles with different ids are never compared."""
        return self.card.id

    @property
    def dimension(self) -> int:
        return self.card.dimension

    @property
    def preprocessing(self) -> Preprocessing:
        return self.card.preprocessing

    @property
    def model_path(self) -> Path:
        return self.directory / MODEL_FILE

    @classmethod
    def load(cls, directory: str | Path) -> "Bundle":
        """Opens a bundle; raises BundleError if its bytes or its schema differ from its card."""
        directory = Path(directory)
        card_path = directory / CARD_FILE
        if not card_path.is_file():
            raise BundleError(f"No bundle at {directory}: {CARD_FILE} is missing.", "Run `lookalike export`.")
        try:
            card = _read_card(card_path)
            bundle = cls(directory, card)
            if not bundle.model_path.is_file():
                raise BundleError(f"The bundle {directory} has no {MODEL_FILE}.", "Export it again.")
            found = file_digest(bundle.model_path)
        except OSError as error:
            raise BundleError(
                f"The bundle {directory} cannot be read: {error.strerror}.",
                "Check the permissions of its files, its disk, and the limit of open files (ulimit -n).",
            ) from error
        if found != card.model_digest or bundle_id(found, card.preprocessing) != card.id:
            raise BundleError(
                f"The bundle {directory} is damaged: {MODEL_FILE} or its preprocessing does not match {CARD_FILE}.",
                "Export it again or restore it from a copy.",
            )
        return bundle

    def copy_to(self, directory: Path) -> None:
        """Copies the bundle to a directory atomically; a valid copy that exists already is kept."""
        damaged = directory.is_dir()
        if damaged:
            with suppress(BundleError):
                Bundle.load(directory)
                return
        with temporary_directory(directory) as temporary:
            for name in (MODEL_FILE, CARD_FILE, README_FILE):
                if (self.directory / name).is_file():
                    with atomic_write(temporary / name) as copy:
                        shutil.copyfile(self.directory / name, copy)
            if damaged:
                shutil.rmtree(directory, ignore_errors=True)
            try:
                temporary.rename(directory)
            except OSError:
                if not directory.is_dir():  # otherwise another process was faster
                    raise
            fsync_directory(directory.parent)


def bundle_id(model_digest: str, preprocessing: Preprocessing) -> str:
    """Returns the id of a bundle, of the model and its preprocessing: another crop gives other vectors."""
    # The fit came later than the first bundles, whose ids must stay valid.
    fields = preprocessing.model_dump(exclude={"fit"} if preprocessing.fit == "crop" else None)
    rule = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(f"{model_digest}\n{rule}".encode()).hexdigest()[:16]


def write_card(directory: Path, *, preprocessing: Preprocessing, dimension: int, **details: Any) -> BundleCard:
    """Writes the card and the README of the model in `directory`, with the id computed from its bytes."""
    digest = file_digest(directory / MODEL_FILE)
    card = BundleCard(
        id=bundle_id(digest, preprocessing),
        model_digest=digest,
        dimension=dimension,
        preprocessing=preprocessing,
        **details,
    )
    atomic_write_text(directory / CARD_FILE, card.model_dump_json(indent=2) + "\n")
    atomic_write_text(directory / README_FILE, _readme(card))
    return card


_REFIT = "This model was trained on all products. Its metrics are of the same training without the test products:"


def _describe_fit(rule: Preprocessing) -> str:
    if rule.fit == "crop":
        return f"short side {rule.resize}, centre crop of {rule.input_size}"
    return f"long side {rule.input_size}, padded with white to a square"


def _readme(card: BundleCard) -> str:
    """Formats the card as Markdown."""
    columns = {"before training": card.untrained_metrics, "this model": card.metrics, "at fp32": card.fp32_metrics}
    columns = {title: metrics for title, metrics in columns.items() if metrics}
    rule = card.preprocessing
    settings = ", ".join(f"{name} = {value}" for name, value in card.loss_settings.items())
    training = (
        f"trained with {card.loss}{f' ({settings})' if settings else ''}{f' on {card.data}' if card.data else ''}"
    )
    training = training if card.loss else "as it was pretrained"
    lines = [
        f"# Bundle {card.id}",
        "",
        f"An image embedder: {card.backbone}, {training}, at {card.precision}.",
        "",
        f"- Input: upright RGB, {_describe_fit(rule)} ({rule.interpolation}), "
        "as `uint8` of shape (n, height, width, 3); scaling is inside the model.",
        f"- Output: one L2-normalised vector of {card.dimension} numbers per image; compare two by their dot product.",
        "- Vectors of bundles with different ids must not be compared.",
    ]
    if columns:
        names = list(dict.fromkeys(name for metrics in columns.values() for name in metrics))
        lines += [
            "",
            _metrics_title(card),
            "",
            f"| | {' | '.join(columns)} |",
            "| --- |" + " --- |" * len(columns),
            *(f"| {name} | {' | '.join(_percent(m.get(name)) for m in columns.values())} |" for name in names),
        ]
    if card.remark:
        lines += ["", card.remark]
    if card.versions:
        lines += ["", "Made with " + ", ".join(f"{name} {number}" for name, number in card.versions.items()) + "."]
    return "\n".join(lines) + "\n"


def _metrics_title(card: BundleCard) -> str:
    if card.fp32_metrics:
        return "Measured on the test photos of its export:"
    return _REFIT if card.refit else "Measured on products that training never saw:"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _read_card(path: Path) -> BundleCard:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not JSON: {error}.", "Export the bundle again.") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != 1:
        raise BundleError(
            f"{path} has schema version {version!r}; this release reads version 1.",
            "Export the bundle again, or install the release that wrote it.",
        )
    try:
        return BundleCard.model_validate(raw)
    except ValidationError as error:
        problem = explain_errors(error.errors(), BundleCard)[0]
        raise BundleError(f"{path}: {problem}.", "Export the bundle again.") from None
