"""Images to vectors: the bundle, the image path and the embedder."""

from index.embedding.bundle import Bundle, BundleCard, BundleError
from index.embedding.embedder import Embedder, Pixels, Vectors
from index.embedding.images import (
    DEFAULT_LIMITS,
    Box,
    EncodedImage,
    ImageError,
    ImageLimits,
    Preprocessing,
    decode,
    decode_for_model,
    digest,
    load_pixels,
    read_file,
    thumbnail,
)

__all__ = [
    "DEFAULT_LIMITS",
    "Box",
    "Bundle",
    "BundleCard",
    "BundleError",
    "Embedder",
    "EncodedImage",
    "ImageError",
    "ImageLimits",
    "Pixels",
    "Preprocessing",
    "Vectors",
    "decode",
    "decode_for_model",
    "digest",
    "load_pixels",
    "read_file",
    "thumbnail",
]
