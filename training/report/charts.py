"""Charts as inline SVG in the page's own colours, so that they follow light, dark and print."""

import base64
import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 20, 36
_STAR = "M0-5 1.2-1.6 4.8-1.5 1.9.6 2.9 4 0 2-2.9 4-1.9.6-4.8-1.5-1.2-1.6Z"
_NEAR, _FAR = (16, 152, 112), (205, 92, 62)
"""Of a heat map: positive and negative cosines, visible on both grounds."""
_GOLDEN_ANGLE = 137.508

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """A named curve; its style is a number of the page's palette."""

    name: str
    points: Points
    style: int
    dashed: bool = False


class Axes:
    """The frame of a chart: ranges, ticks, and where a value lies."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], label: str, show: Callable[[float], str]) -> None:
        lone = 0.5 if min(xs) == max(xs) else 0.0
        self._left, self._right = min(xs) - lone, max(xs) + lone
        # Epochs, samples and classes are counted: there is none in between.
        self._x_ticks = [tick for tick in _ticks((self._left, self._right)) if tick.is_integer()]
        self._y_ticks = _ticks(ys, cover=True)
        self._low, self._high = self._y_ticks[0], self._y_ticks[-1]
        self._label, self._show = label, show

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - self._left) / (self._right - self._left)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - self._low) / (self._high - self._low)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def drawn(self) -> str:
        floor = _HEIGHT - _BOTTOM
        parts = [
            f'<path class="grid" d="M{_LEFT} {self.y(tick):.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 6}" y="{self.y(tick) + 3.5:.1f}" text-anchor="end">{self._show(tick)}</text>'
            for tick in self._y_ticks
        ]
        parts += [
            f'<text x="{self.x(tick):.1f}" y="{floor + 15}" text-anchor="middle">{tick:g}</text>'
            for tick in self._x_ticks
        ]
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        return (
            "".join(parts) + f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(self._label)}</text>'
        )


def _ticks(values: Sequence[float], *, cover: bool = False) -> list[float]:
    """Round numbers over a range: within it, or with `cover` from below its lowest to above its highest."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(0.0, 2 * low), max(0.0, 2 * high) if low or high else 1.0
    size: float = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (size * factor) <= 5)
    if cover:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    else:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def as_percent(value: float) -> str:
    return f"{100 * value:g} %"


def as_number(value: float) -> str:
    return f"{value:g}"


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    show: Callable[[float], str] = as_number,
    marks: Sequence[tuple[float, str]] = (),
    shares: Points = (),
    filled: bool = False,
    note: str = "",
) -> str:
    """Curves over a common x.

    `marks` are upright lines with a word; `shares` are bars from the floor, of a height from 0 to 1 of a third of
    the chart; `filled` tints what lies between the first two curves.
    """
    lines = [line._replace(points=[p for p in line.points if math.isfinite(p[1])]) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    values = [y for line in lines for _, y in line.points]
    places = [x for line in lines for x, _ in line.points] + [x for x, _ in marks]
    axes = Axes(places, values, x_label, show)
    parts = [axes.drawn()]
    if filled:
        around = [*lines[0].points, *reversed(lines[1].points)]
        parts.append(f'<path class="band" d="{axes.path(around)}Z"/>')
    floor, room = _HEIGHT - _BOTTOM, (_HEIGHT - _TOP - _BOTTOM) / 3
    parts += [f'<path class="share" d="M{axes.x(x):.1f} {floor}V{floor - room * y:.1f}"/>' for x, y in shares]
    for x, word in marks:
        end = axes.x(x) > _WIDTH * 0.6
        place, anchor = axes.x(x) + (-4 if end else 4), "end" if end else "start"
        parts.append(f'<path class="mark-line" d="M{axes.x(x):.1f} {_TOP - 14}V{floor}"/>')
        parts.append(f'<text x="{place:.1f}" y="{_TOP - 7}" text-anchor="{anchor}">{escape(word)}</text>')
    parts += [draw_curve(axes, line) for line in lines]
    told = "; ".join(f"{line.name} from {show_end(line, 0, show)} to {show_end(line, -1, show)}" for line in lines)
    return draw_figure(title, f"{title}: {told}.", "".join(parts), draw_legend(lines), note=note)


def show_end(line: Line, end: int, show: Callable[[float], str]) -> str:
    """The first or last value of a curve, in few digits."""
    return show(float(f"{line.points[end][1]:.3g}"))


def draw_curve(axes: Axes, line: Line) -> str:
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    drawn = f'<path class="line c{line.style}"{dashes} d="{axes.path(line.points)}"/>' if len(line.points) > 1 else ""
    if len(line.points) <= 24:
        drawn += "".join(
            f'<circle class="dot c{line.style}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.4"/>'
            for x, y in line.points
        )
    return drawn


def draw_legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    dashes = ' stroke-dasharray="5 4"'
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true"><path class="line c{line.style}"'
        f'{dashes if line.dashed else ""} d="M1 4H21"/></svg>{escape(line.name)}</li>'
        for line in lines
    )
    return f'<ul class="legend">{items}</ul>'


def point_map(
    title: str,
    plane: NDArray[np.float32],
    labels: Sequence[str],
    *,
    stars: NDArray[np.float32] | None = None,
    star_labels: Sequence[str] = (),
    note: str,
) -> str:
    """Dots in the unit square, a colour a class, its name under the pointer; and stars, with an outline."""
    groups: dict[str, list[str]] = defaultdict(list)
    for (x, y), label in zip(plane, labels, strict=True):
        groups[label].append(f'<circle cx="{_inside(x)}" cy="{_inside(y)}" r="2.5"/>')
    if stars is not None:
        for (x, y), label in zip(stars, star_labels, strict=True):
            groups[label].append(f'<path class="star" transform="translate({_inside(x)} {_inside(y)})" d="{_STAR}"/>')
    drawn = "".join(
        f'<g fill="hsl({number * _GOLDEN_ANGLE % 360:.0f} 52% 50%)"><title>{escape(label)}</title>{"".join(points)}</g>'
        for number, (label, points) in enumerate(sorted(groups.items()))
    )
    proxies = f" and {len(star_labels):,} proxies" if stars is not None else ""
    told = f"{title}: {len(plane):,} photos of {len(set(labels)):,} classes{proxies} as dots in a plane."
    return draw_figure(title, told, drawn, "", size=(_WIDTH, _WIDTH), note=note)


def _inside(share: float) -> str:
    return f"{8 + (_WIDTH - 16) * share:.1f}"


def heat_map(title: str, matrix: NDArray[np.float32], *, note: str, told: str) -> str:
    """A square of cosines; colour fades into the ground at zero, so that it suits light and dark."""
    # Zero is the ground, or the lowest value where all are positive: differences are what is looked for.
    ground, lowest = max(0.0, float(matrix.min())), min(0.0, float(matrix.min()))
    strongest = max(float(np.abs(matrix).max()), ground + 1e-6)
    pixels = np.empty((*matrix.shape, 4), np.uint8)
    pixels[..., :3] = np.where(matrix[..., None] >= 0, _NEAR, _FAR)
    pixels[..., 3] = np.rint(255 * (np.abs(matrix) - ground) / (strongest - ground))
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(out, "PNG", optimize=True)
    zero = -lowest / (strongest - lowest)
    scale = (
        f'<div class="scale" aria-hidden="true"><span>{lowest or ground:.2f}</span><i style="--zero:{100 * zero:.0f}%;'
        f'--far:{-lowest / strongest:.2f}"></i><span>{strongest:.2f}</span></div>'
    )
    image = f'<img class="heat" alt="{escape(told)}" src="{data_uri(out.getvalue(), "png")}">'
    return _framed(title, image + scale, note)


def data_uri(image: bytes, kind: str) -> str:
    """An image inside the page."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def draw_figure(
    title: str, told: str, drawn: str, legend: str, *, size: tuple[int, int] = (_WIDTH, _HEIGHT), note: str = ""
) -> str:
    svg = f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(told)}">{drawn}</svg>'
    return _framed(title, svg + legend, note)


def _framed(title: str, inside: str, note: str) -> str:
    remark = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{inside}{remark}</figure>'
