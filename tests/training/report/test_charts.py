"""Charts: valid inline SVG in the page's colours, which says in words what it shows."""

from xml.etree import ElementTree

import numpy as np
import pytest

from training.report.charts import Chart, Line, as_percent, heat_map, line_chart, point_map


def parse(chart: Chart | None) -> ElementTree.Element:
    assert chart is not None
    return ElementTree.fromstring(str(chart.svg))


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("text")]


def test_a_line_chart_has_round_ticks_a_mark_and_a_description() -> None:
    lines = [Line("Recall@1", [(0, 0.5), (1, 0.75), (2, 0.9)], 1), Line("MAP@R", [(0, 0.31), (2, 0.6)], 2, dashed=True)]
    chart = line_chart("Recall", lines, show=as_percent, marks=[(1, "kept")])
    svg = parse(chart)
    assert chart and [line.name for line in chart.legend] == ["Recall@1", "MAP@R"]
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "Recall: Recall@1 from 50 % to 90 %; MAP@R from 31 % to 60 %."
    assert {"0", "1", "2", "epoch", "kept", "20 %", "100 %"} <= set(texts(svg))
    styles = [element.attrib.get("style", "") for element in svg.iter("path")]
    assert any("stroke: var(--accent)" in style for style in styles)
    assert any("stroke: var(--c2)" in style and "stroke-dasharray" in style for style in styles)


def test_values_that_are_not_finite_are_left_out() -> None:
    nothing = [Line("loss", [(0, float("nan"))], 1), Line("rate", [], 2)]
    assert line_chart("Loss", nothing) is None
    chart = line_chart("Loss", [*nothing, Line("good", [(0, 1.0), (1, float("inf")), (2, 3.0)], 3)])
    assert chart and chart.legend == () and parse(chart).attrib["aria-label"] == "Loss: good from 1 to 3."


def test_dots_are_grouped_by_class_under_an_escaped_name() -> None:
    plane = np.array([(0, 0), (0.5, 0.5), (1, 1)], np.float32)
    chart = point_map("Photos", plane, ["a & <b>", "c", "c"], stars=plane[:1], star_labels=["c"], note="")
    svg = parse(chart)
    names = [group.findtext("title") for group in svg.iter("g") if group.find("title") is not None]
    assert set(names) == {"a & <b>", "c"}
    assert svg.attrib["aria-label"] == "Photos: 3 photos of 2 classes and 1 proxies as dots in a plane."
    assert len(list(svg.iter("use"))) == 4, "three dots and a star"


@pytest.mark.parametrize("lowest", [-0.5, 0.2])
def test_a_heat_map_embeds_its_picture_and_a_scale(lowest: float) -> None:
    matrix = np.array([[1, lowest], [lowest, 1]], np.float32)
    svg = parse(heat_map("Similarity", matrix, note="Mean cosine."))
    pictures = [element.attrib["href"] for element in svg.iter("image")]
    assert len(pictures) == 2 and all(picture.startswith("data:image/png;base64,") for picture in pictures)
    assert ("\u22121.00" in texts(svg) or "-1.00" in texts(svg)) == (lowest < 0), "the scale is symmetric around zero"
    assert svg.attrib["aria-label"] == "Heat map of 2 rows. Mean cosine."


def test_charts_of_one_page_share_no_id() -> None:
    ids: list[str] = []
    for title in ("one", "two"):
        svg = parse(line_chart(title, [Line("loss", [(0, 1.0), (1, 2.0)], 1)]))
        ids += [element.attrib["id"] for element in svg.iter() if "id" in element.attrib]
        used = [value[1:] for element in svg.iter() if (value := element.attrib.get("href", "")).startswith("#")]
        assert set(used) <= set(ids)
    assert ids and len(ids) == len(set(ids))


def test_lines_beyond_the_palette_have_distinct_colours() -> None:
    colours = {Line("x", [], style).css_colour for style in range(1, 13)}
    assert len(colours) == 12 and sum(colour.startswith("var(--") for colour in colours) == 5
