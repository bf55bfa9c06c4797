"""Random augmentations of a training photo, in this order:

1. a random part, resized to a square, by the rule of torchvision's RandomResizedCrop; 2. mirroring; 3. rotation, with
the corners filled by reflection, so that no black triangles appear; 4. brightness, contrast and
saturation; 5. hue; 6. blur; 7. JPEG compression; 8. an erased rectangle.

All of them draw from one generator. The crop and the mirroring draw first and always, so that they are the same for a
photo whichever of the others are on.
"""

import io
import math

import numpy as np
from PIL import Image, ImageFilter, ImageStat

from index.embedding.images import EncodedImage, Fit, decode
from training.config import AugmentationSettings
from training.data.dataset import Box

_CROP_RATIOS = (3 / 4, 4 / 3)
_ERASED_AREA, _ERASED_RATIOS = (0.02, 0.33), (0.3, 3.3)
_BLUR = (0.1 / 224, 2.0 / 224)
"""Smallest and largest standard deviation of the blur, as shares of the picture's side."""
_QUALITY = (30, 95)
_LUMA = np.array((0.299, 0.587, 0.114))
"""The weights of red, green and blue in a grey value."""
_TRIES = 10


def augment(
    image: EncodedImage,
    part: Box,
    side: int,
    settings: AugmentationSettings,
    rng: np.random.Generator,
    fit: Fit = "crop",
) -> Image.Image:
    """Returns `side` x `side` pixels of a random crop of `part`, a box in pixels of the upright image.

    With the fit `pad` it is a crop of the square that the part is padded to, as it is when the model is used.
    """
    left, top, right, bottom = part
    if fit == "pad":
        length = max(right - left, bottom - top)
        left, top = left - (length - (right - left)) // 2, top - (length - (bottom - top)) // 2
        right, bottom = left + length, top + length
    west, north, east, south = random_part((right - left, bottom - top), settings.crop_scale, _CROP_RATIOS, rng)
    mirrored = rng.random() < 0.5
    filter_ = Image.Resampling.BICUBIC if settings.interpolation == "bicubic" else Image.Resampling.BILINEAR
    picture = _read_padded(image, part, (left + west, top + north, left + east, top + south), side, filter_)
    if settings.flip and mirrored:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if settings.rotation:
        picture = _rotate(picture, rng.uniform(-settings.rotation, settings.rotation))
    if settings.colour_jitter:
        picture = _change_colours(picture, *rng.uniform(1 - settings.colour_jitter, 1 + settings.colour_jitter, 3))
    if settings.hue_jitter:
        picture = _shift_hue(picture, rng.uniform(-settings.hue_jitter, settings.hue_jitter))
    if rng.random() < settings.blur:
        picture = picture.filter(ImageFilter.GaussianBlur(side * rng.uniform(*_BLUR)))
    if rng.random() < settings.jpeg:
        picture = _compress(picture, int(rng.integers(*_QUALITY, endpoint=True)))
    if rng.random() < settings.erasing:
        # The mean colour, which normalisation turns into about zero.
        picture.paste(_mean_colour(picture), random_part(picture.size, _ERASED_AREA, _ERASED_RATIOS, rng))
    return picture


def _read_padded(image: EncodedImage, part: Box, crop: Box, side: int, filter_: Image.Resampling) -> Image.Image:
    """Returns a crop as a square; where it exceeds the part, it is white."""
    seen = max(part[0], crop[0]), max(part[1], crop[1]), min(part[2], crop[2]), min(part[3], crop[3])
    if seen == crop:
        pixels, place = image.read(crop, side)
        return pixels.resize((side, side), filter_, box=place)
    square = Image.new("RGB", (side, side), "white")
    across, down = side / (crop[2] - crop[0]), side / (crop[3] - crop[1])
    width, height = max(1, round((seen[2] - seen[0]) * across)), max(1, round((seen[3] - seen[1]) * down))
    if seen[0] < seen[2] and seen[1] < seen[3]:
        pixels, place = image.read(seen, max(width, height))
        corner = round((seen[0] - crop[0]) * across), round((seen[1] - crop[1]) * down)
        square.paste(pixels.resize((width, height), filter_, box=place), corner)
    return square


def random_part(
    size: tuple[int, int], area: tuple[float, float], ratios: tuple[float, float], rng: np.random.Generator
) -> Box:
    """Draws a rectangle: uniform in its share of the area, log-uniform in its aspect ratio, uniform in its place.

    A rectangle that does not fit is drawn again. When none fits, the largest central one of an allowed ratio is taken.
    """
    width, height = size
    narrowest, widest = ratios
    for _ in range(_TRIES):
        pixels = width * height * rng.uniform(*area)
        ratio = math.exp(rng.uniform(math.log(narrowest), math.log(widest)))
        across, down = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            return left, top, left + across, top + down
    across, down = min(width, round(height * widest)), min(height, round(width / narrowest))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _rotate(picture: Image.Image, degrees: float) -> Image.Image:
    side = picture.width
    # Half of what the diagonal is longer than the side: no angle reaches further.
    margin = math.ceil((math.sqrt(2) - 1) / 2 * side)
    wide = np.pad(np.asarray(picture), ((margin, margin), (margin, margin), (0, 0)), mode="symmetric")
    turned = Image.fromarray(wide).rotate(degrees, Image.Resampling.BICUBIC)
    return turned.crop((margin, margin, margin + side, margin + side))


def _change_colours(picture: Image.Image, brightness: float, contrast: float, saturation: float) -> Image.Image:
    """Scales brightness, then the distance from the mean grey, then that from the pixel's own grey.

    All three are linear, so one pass over the pixels does them, with one rounding.
    """
    grey = float(_LUMA @ ImageStat.Stat(picture).mean)
    colours = brightness * contrast * (saturation * np.eye(3) + (1 - saturation) * _LUMA)
    shift = np.full((3, 1), brightness * (1 - contrast) * grey)
    return picture.convert("RGB", tuple(np.hstack((colours, shift)).ravel()))


def _shift_hue(picture: Image.Image, share: float) -> Image.Image:
    hue, saturation, value = picture.convert("HSV").split()
    hue = hue.point([(level + round(share * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (hue, saturation, value)).convert("RGB")


def _compress(picture: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return decode(file.getvalue())


def _mean_colour(picture: Image.Image) -> tuple[int, ...]:
    return tuple(round(level) for level in ImageStat.Stat(picture).mean)
