"""What an operator may set, from `LOOKALIKE_...` variables, checked before anything is opened."""

from pathlib import Path

from pydantic import DirectoryPath, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from index.images import DEFAULT_LIMITS, ImageLimits


class Settings(BaseSettings):
    """The service's settings; a value given by name wins over the environment."""

    model_config = SettingsConfigDict(env_prefix="LOOKALIKE_", frozen=True)

    gallery: str | Path = Field(description="the address of the gallery to search")
    bundle: Path = Field(description="the bundle that embedded the gallery's images")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: int = Field(default=DEFAULT_LIMITS.max_bytes, gt=0, description="of a request")
    max_pixels: int = Field(default=DEFAULT_LIMITS.max_pixels, gt=0, description="of a photo")
    threads: int | None = Field(default=None, gt=0, description="of the embedder; all cores unless told")
    examples: DirectoryPath | None = Field(default=None, description="photos that the page offers to try")

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(max_bytes=self.max_body_bytes, max_pixels=self.max_pixels)
