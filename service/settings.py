"""The settings of the service: `LOOKALIKE_...` variables and one file, validated before anything is opened."""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, DirectoryPath, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from index._util.validation import explain_errors, suggest
from index.embedding.images import DEFAULT_LIMITS, ImageLimits
from index.errors import LookalikeError
from index.ingest.options import AddressList
from service.url_fetcher import HostPattern

PREFIX = "LOOKALIKE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


def _parse_json(value: Any) -> Any:
    """Parses a variable that holds JSON; a syntax error is reported together with the other mistakes."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        example = 'write JSON, such as ["one", "two"] for a list or {"name": "address"} for names'
        raise ValueError(f"{value[:80]!r} is not JSON: {example}") from None


def _check_host(pattern: str) -> str:
    try:
        HostPattern.parse(pattern)
    except LookalikeError as error:
        raise ValueError(str(error)) from None
    return pattern


def _check_origin(text: str) -> str:
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is not an origin: write one such as https://shop.example.com, without a path")
    return text


Value = TypeVar("Value")
_Json = Annotated[Value, NoDecode, BeforeValidator(_parse_json)]


class SettingsError(LookalikeError):
    """Invalid settings; the message lists all mistakes."""

    kind = "settings"


class Settings(BaseSettings):
    """The service's settings. A value passed by name wins over the environment, and the environment over the file."""

    # An empty variable counts as unset: a compose file can reset a setting, but not remove it.
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    gallery: str | Path = Field(description="address of the gallery to search")
    bundle: Path | None = Field(
        default=None, description="bundle to embed with; default: the gallery's copy of its active bundle"
    )
    cache: Path | None = Field(
        default=None,
        description="folder of this machine for the indexes and bundles of a gallery in PostgreSQL; "
        "default: ~/.cache/lookalike",
    )
    max_stale_seconds: float = Field(
        default=60, ge=0, description="how long searches continue without new writes while PostgreSQL is gone"
    )
    create: bool = Field(default=False, description="create an empty gallery if none exists")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=64, description="server processes; each loads the model")
    threads: int | None = Field(default=None, gt=0, description="threads of the embedder; default: all cores")
    tensorrt: bool = Field(default=False, description="embed with TensorRT if it is installed, instead of CUDA")
    gpu_share: float = Field(
        default=0.25,
        ge=0,
        le=0.5,
        description="share of each GPU's memory for the vectors of one index, all processes together; 0: CPU",
    )
    drain_seconds: float = Field(
        default=1, ge=0, le=300, description="how long to keep serving after SIGTERM while /readyz reports 503"
    )
    examples: DirectoryPath | None = Field(default=None, description="folder of sample photos for the web page")
    sources: _Json[dict[str, str]] = Field(
        default={}, description="name to address of the sources that may be re-indexed over the API"
    )
    source_folders: _Json[list[str]] = Field(
        default=[], description="folders and s3:// prefixes that rows of these sources may name besides their own"
    )
    source_addresses: _Json[AddressList] = Field(
        default=[], description="hosts and networks, other than public ones, that rows of these sources may name"
    )
    bundles: _Json[dict[str, DirectoryPath]] = Field(
        default={}, description="name to folder of the bundles that a re-index over the API may use"
    )

    max_body_bytes: int = Field(default=DEFAULT_LIMITS.max_bytes, gt=0, description="size of a request body")
    max_pixels: int = Field(default=DEFAULT_LIMITS.max_pixels, gt=0, description="pixels of a photo")
    max_side: int = Field(default=DEFAULT_LIMITS.max_side, gt=0, description="pixels of a photo's longer side")
    max_decode_bytes: int | None = Field(
        default=None,
        gt=0,
        description="memory for decoding photos, all processes together; default: by the memory limit",
    )
    max_batch: int = Field(default=16, ge=1, le=256, description="photos per request")
    max_requests: int = Field(default=64, ge=1, description="searches that run at once, per process")
    max_writes: int = Field(default=32, ge=1, description="writes of items that run at once, per process")
    max_reads: int = Field(default=256, ge=1, description="reads of items and pictures that wait, per process")
    max_fetches: int = Field(default=16, ge=1, description="photos fetched from addresses at once, per process")
    max_waiting: int = Field(
        default=64, ge=1, description="length of every other queue (photos, listings, requests about jobs), per process"
    )
    max_held_bytes: int | None = Field(
        default=None,
        gt=0,
        description="memory for bodies and fetched photos, all processes together; default: by the memory limit",
    )
    max_unsent_bytes: int | None = Field(
        default=None,
        gt=0,
        description="memory for responses until they are read, all processes together; default: by the memory limit",
    )
    max_connections: int | None = Field(
        default=None, ge=1, description="open connections per process; default: what the limit of open files allows"
    )
    max_client_connections: int | None = Field(
        default=None,
        ge=1,
        description="open connections per process from one address, such as a proxy's; default: half of all",
    )
    wait_seconds: float = Field(
        default=30, gt=0, description="how long a write, or a request about jobs, waits for others and for their locks"
    )
    max_write_attempts: int = Field(
        default=32, ge=1, description="attempts of a write to an item that others change at the same time"
    )
    head_seconds: float = Field(default=15, gt=0, description="time for the head of a request to arrive")
    chunk_seconds: float = Field(default=15, gt=0, description="time between two pieces of a request body")
    body_seconds: float = Field(default=60, gt=0, description="time for a request body to arrive")
    write_seconds: float = Field(
        default=15,
        gt=0,
        description="a client that reads less than 10 kB per second of a response for so long is cut off",
    )
    max_answer_bytes: int = Field(default=8 << 20, gt=0, description="size of the largest response")
    bundle_poll_seconds: float = Field(default=2, gt=0, description="interval of looking for a newly activated bundle")
    bundle_retry_seconds: float = Field(
        default=10, gt=0, description="delay before a bundle that failed to load is tried again"
    )

    keys: Path | None = Field(default=None, description="file of API keys; see `lookalike keys`")
    open: bool = Field(default=False, description="allow serving without keys on addresses other than loopback")
    rate: float = Field(default=50, gt=0, description="sustained requests per second of each key")
    burst: int = Field(default=100, ge=1, description="requests that a key may send at once")
    url_hosts: _Json[list[Annotated[str, AfterValidator(_check_host)]]] = Field(
        default=[], description="hosts that `image_url` may name; empty: `image_url` is disabled"
    )
    url_seconds: float = Field(default=5, gt=0, description="timeout for fetching a photo")
    media_max_age: int = Field(
        default=86_400, ge=0, description="seconds that caches may keep a thumbnail, also after its deletion"
    )
    cors_origins: _Json[list[Annotated[str, AfterValidator(_check_origin)]]] = Field(
        default=[], description="origins of web pages that may call the API"
    )

    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(max_bytes=self.max_body_bytes, max_pixels=self.max_pixels, max_side=self.max_side)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = os.environ.get(FILE_VARIABLE)
        if not file:
            return init_settings, env_settings
        if not Path(file).is_file():
            raise SettingsError(f"{FILE_VARIABLE}: the file {file} does not exist.", "Write it, or unset the variable.")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, Path(file))


def load_settings(**values: Any) -> Settings:
    """Loads the settings; raises one SettingsError that lists every mistake with its place."""
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and not _is_known(name))
    known = [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]
    mistakes = [f"{name} is unknown{suggest(name, known)}" for name in unknown]
    try:
        settings = Settings(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        mistakes += explain_errors(error.errors(), Settings)
    except ValueError as error:  # the file is not valid TOML
        mistakes.append(f"the file of {FILE_VARIABLE}: {error}")
    if mistakes:
        raise SettingsError(
            "Invalid settings: " + "; ".join(mistakes) + ".",
            f"Each is set by an option, by {PREFIX}NAME in capitals, or by name in the file of {FILE_VARIABLE}.",
        )
    return settings


def _is_known(variable: str) -> bool:
    return variable == FILE_VARIABLE or variable.removeprefix(PREFIX).lower() in Settings.model_fields
