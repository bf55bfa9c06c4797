"""What an operator may set: `LOOKALIKE_...` variables and one file, checked before anything is opened."""

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

from index.embedding.images import DEFAULT_LIMITS, ImageLimits
from index.errors import LookalikeError
from service.url_fetcher import Pattern

PREFIX = "LOOKALIKE_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
_ORIGIN = re.compile(r"\*|https?://[^/\s]+")


def _from_variable(given: Any) -> Any:
    """A variable holds JSON. One that does not is a mistake like any other, told beside them."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except json.JSONDecodeError:
        told = 'write JSON, such as ["one", "two"] for a list or {"name": "address"} for names'
        raise ValueError(f"{given[:80]!r} is not JSON: {told}") from None


def _host(pattern: str) -> str:
    try:
        Pattern.parse(pattern)
    except LookalikeError as error:
        raise ValueError(str(error)) from None
    return pattern


def _origin(text: str) -> str:
    if not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is not an origin: write one such as https://shop.example.com, without a path")
    return text


Value = TypeVar("Value")
_Json = Annotated[Value, NoDecode, BeforeValidator(_from_variable)]


class SettingsError(LookalikeError):
    """Settings that cannot be served with; all mistakes are told at once."""

    kind = "settings"


class Settings(BaseSettings):
    """The service's settings. A value given by name wins over the environment, and that over the file."""

    # An empty variable is none: a compose file can take a setting back, but not remove it.
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    gallery: str | Path = Field(description="the address of the gallery to search")
    bundle: Path | None = Field(
        default=None, description="the bundle to embed with; the gallery's own copy of its live one unless told"
    )
    create: bool = Field(default=False, description="make an empty gallery where there is none")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=64, description="processes that answer; each loads the model")
    threads: int | None = Field(default=None, gt=0, description="of the embedder; all cores unless told")
    drain_seconds: float = Field(
        default=1, ge=0, le=300, description="to answer on after SIGTERM while /readyz sends clients elsewhere"
    )
    examples: DirectoryPath | None = Field(default=None, description="photos that the page offers to try")
    sources: _Json[dict[str, str]] = Field(
        default={}, description="name to address of what may be re-indexed over the API"
    )
    bundles: _Json[dict[str, DirectoryPath]] = Field(
        default={}, description="name to folder of what it may be embedded with"
    )

    max_body_bytes: int = Field(default=DEFAULT_LIMITS.max_bytes, gt=0, description="of a request")
    max_pixels: int = Field(default=DEFAULT_LIMITS.max_pixels, gt=0, description="of a photo")
    max_batch: int = Field(default=16, ge=1, le=256, description="photos of one request")
    max_requests: int = Field(default=64, ge=1, description="requests with a photo in work at once, in a process")
    max_waiting: int = Field(default=64, ge=1, description="photos that wait for the model, in a process")

    keys: Path | None = Field(default=None, description="the file of API keys; see `lookalike keys`")
    open: bool = Field(default=False, description="serve without keys beyond this machine")
    rate: float = Field(default=50, gt=0, description="requests a second that a key may send in the long run")
    burst: int = Field(default=100, ge=1, description="requests that it may send at once")
    url_hosts: _Json[list[Annotated[str, AfterValidator(_host)]]] = Field(
        default=[], description="hosts that `image_url` may name; none: it is off"
    )
    url_seconds: float = Field(default=5, gt=0, description="to fetch such a photo")
    cors_origins: _Json[list[Annotated[str, AfterValidator(_origin)]]] = Field(
        default=[], description="web pages of these origins may call the API"
    )

    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(max_bytes=self.max_body_bytes, max_pixels=self.max_pixels)

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
            raise SettingsError(f"{FILE_VARIABLE} names {file}, which is no file.", "Write it, or unset the variable.")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, Path(file))


def load_settings(**given: Any) -> Settings:
    """The settings, or one error that lists every mistake with its place."""
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and not _is_known(name))
    faults = [f"{name}: no setting has this name" for name in unknown]
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        faults += [f"{_place(fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}" for fault in error.errors()]
    except ValueError as error:  # a file that is no TOML
        faults.append(f"the file of {FILE_VARIABLE}: {error}")
    if faults:
        raise SettingsError(
            "The settings cannot be used: " + "; ".join(faults) + ".",
            f"Each is set by an option, by {PREFIX}NAME in capitals, or by name in the file of {FILE_VARIABLE}.",
        )
    return settings


def _is_known(variable: str) -> bool:
    return variable == FILE_VARIABLE or variable.removeprefix(PREFIX).lower() in Settings.model_fields


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location)) or "settings"
