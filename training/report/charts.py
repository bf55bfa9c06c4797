"""Charts as inline SVG, drawn by Matplotlib in the page's colours, so that they follow light, dark and print."""

import colorsys
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

_PALETTE = ("#0b7a5a", "#2f6db5", "#b7791f", "#8a4fa8", "#b0413e")
_INK, _SOFT_INK, _GRID = "#13201b", "#5a6a63", "#dbe4df"
_VARIABLES = dict(zip(_PALETTE, ("accent", "c2", "c3", "c4", "c5"), strict=True))
_VARIABLES |= {_INK: "ink", _SOFT_INK: "soft-ink", _GRID: "line"}
"""Colours of style.css in its light theme, with their variables: the SVG refers to the variables."""
_NEAR, _FAR = "#109870", "#cd5c3e"
"""Of a heat map: positive and negative cosines, visible on both backgrounds."""
_GOLDEN_ANGLE = 137.508 / 360
_MAX_DOTS = 24
_TOOLTIP = "tooltip "
"""Begins the group id of dots that show the rest of the id under the pointer."""
_STYLE: dict[Any, Any] = {
    "axes.autolimit_mode": "round_numbers",
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.size": 11,
    "svg.fonttype": "none",
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), _SOFT_INK),
}

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """A named curve; its style is a number from 1, of the palette as far as that goes."""

    name: str
    points: Points
    style: int
    dashed: bool = False

    @property
    def colour(self) -> str:
        return _PALETTE[self.style - 1] if self.style <= len(_PALETTE) else _distinct_colour(self.style)

    @property
    def css_colour(self) -> str:
        return f"var(--{_VARIABLES[self.colour]})" if self.colour in _VARIABLES else self.colour


class Chart(NamedTuple):
    """What the page's template needs for a figure; a legend names two lines or more."""

    title: str
    svg: Markup
    note: str = ""
    legend: Sequence[Line] = ()


def as_percent(value: float) -> str:
    return f"{100 * value:g} %"


def as_number(value: float) -> str:
    return f"{value:g}"


@rc_context(_STYLE)
def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "epoch",
    show: Callable[[float], str] = as_number,
    thin: Sequence[Line] = (),
    marks: Sequence[tuple[float, str]] = (),
    shares: Points = (),
    filled: bool = False,
    note: str = "",
) -> Chart | None:
    """Draws curves over a common x, and `thin` ones that have no name; None when no curve has a finite value.

    `marks` are vertical lines with a word; `shares` are bars from the x-axis, of a height from 0 to 1 of a third of
    the chart; `filled` tints the area between the first two curves.
    """
    lines = [line._replace(points=[point for point in line.points if math.isfinite(point[1])]) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    figure, axes = _new_axes(height=220)
    axes.grid(axis="y", color=_GRID)
    axes.tick_params(length=0, pad=8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: show(round(value, 12)))
    axes.set_xlabel(x_label)
    for line in thin:
        axes.plot(*zip(*line.points, strict=True), color=line.colour, linewidth=0.8, alpha=0.55)
    for line in lines:
        marker = "o" if len(line.points) <= _MAX_DOTS else ""
        (curve,) = axes.plot(*zip(*line.points, strict=True), color=line.colour, linewidth=2, marker=marker, ms=4)
        curve.set(linestyle=(0, (2.5, 2)) if line.dashed else "solid", clip_on=False)
    if filled:
        xs, upper = zip(*lines[0].points, strict=True)
        axes.fill_between(xs, upper, [y for _, y in lines[1].points], color=_PALETTE[0], alpha=0.14, linewidth=0)
    if shares:
        places, heights = np.array(shares).T
        floor = axes.get_xaxis_transform()
        axes.vlines(places, 0, heights / 3, colors=_SOFT_INK, alpha=0.55, linewidth=3, transform=floor)
    for x, word in marks:
        axes.axvline(x, color=_SOFT_INK, linestyle=":", linewidth=1)
        left, right = axes.get_xlim()
        align, shift = ("right", -4) if x > left + 0.6 * (right - left) else ("left", 4)
        axes.annotate(word, (x, 1), (shift, 3), axes.get_xaxis_transform(), "offset points", ha=align)
    ends = "; ".join(f"{line.name} from {_end(line, 0, show)} to {_end(line, -1, show)}" for line in lines)
    return Chart(title, _inline_svg(figure, title, f"{title}: {ends}."), note, lines if len(lines) > 1 else ())


def _end(line: Line, end: int, show: Callable[[float], str]) -> str:
    """Formats the first or last value of a curve with few digits."""
    return show(float(f"{line.points[end][1]:.3g}"))


@rc_context(_STYLE)
def point_map(
    title: str,
    plane: NDArray[np.float32],
    labels: Sequence[str],
    *,
    stars: NDArray[np.float32] | None = None,
    star_labels: Sequence[str] = (),
    note: str,
) -> Chart:
    """Draws dots in the unit square, one colour per class, with its name under the pointer; and stars, outlined."""
    figure, axes = _new_axes(height=360)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.set_axis_off()
    for number, label in enumerate(sorted({*labels, *star_labels})):
        colour, tooltip = _distinct_colour(number), _TOOLTIP + label
        xs, ys = plane[np.array(labels) == label].T
        axes.scatter(xs, ys, s=20, c=[colour], linewidths=0, gid=tooltip)
        if stars is not None:
            xs, ys = stars[np.array(star_labels) == label].T
            axes.scatter(xs, ys, s=70, marker="*", c=[colour], edgecolors=_INK, linewidths=0.6, gid=tooltip)
    proxies = f" and {len(star_labels):,} proxies" if stars is not None else ""
    description = f"{title}: {len(plane):,} photos of {len(set(labels)):,} classes{proxies} as dots in a plane."
    return Chart(title, _inline_svg(figure, title, description), note)


@rc_context(_STYLE)
def heat_map(title: str, matrix: NDArray[np.float32], *, note: str) -> Chart:
    """Draws a square of cosines; the colour fades into the background at zero, so that it suits light and dark."""
    lowest, strongest = float(matrix.min()), float(np.abs(matrix).max())
    # Where all are positive, the lowest value is the background: differences are what is looked for.
    colours = [*([_FAR + "ff", _FAR + "00"] if lowest < 0 else ()), _NEAR + "00", _NEAR + "ff"]
    places = [0.0, 0.5, 0.5, 1.0] if lowest < 0 else [0.0, 1.0]
    fade = LinearSegmentedColormap.from_list("cosines", list(zip(places, colours, strict=True)))
    figure, axes = _new_axes(height=390)
    axes.set_axis_off()
    floor = -strongest if lowest < 0 else min(lowest, strongest - 1e-6)
    image = axes.imshow(matrix, fade, vmin=floor, vmax=strongest, interpolation="none")
    bar = figure.colorbar(image, orientation="horizontal", aspect=45, pad=0.02, format="%.2f")
    bar.outline.set_visible(False)
    assert bar.solids
    bar.solids.set_rasterized(True)
    return Chart(title, _inline_svg(figure, title, f"Heat map of {len(matrix)} rows. {note}"), note)


def _new_axes(*, height: int) -> tuple[Figure, Axes]:
    """Returns axes in a figure of 360 points by `height`."""
    figure = Figure(figsize=(360 / 72, height / 72))
    return figure, figure.add_subplot(frame_on=False)


def _distinct_colour(number: int) -> str:
    return to_hex(colorsys.hls_to_rgb(number * _GOLDEN_ANGLE % 1, 0.5, 0.52))


def _inline_svg(figure: Figure, title: str, description: str) -> Markup:
    """Returns the figure as an SVG element that many can stand in one page: without namespaces and common ids."""
    file = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        group = element.attrib.pop("id", "") if element.tag == "g" else ""
        if group.startswith(_TOOLTIP):
            tooltip = ElementTree.Element("title")
            tooltip.text = group.removeprefix(_TOOLTIP)
            element.insert(0, tooltip)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": description}
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return Markup(text)
