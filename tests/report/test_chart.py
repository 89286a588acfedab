import re
import xml.etree.ElementTree as ET

import pytest

from packhorse.errors import UserError
from packhorse.report.chart import line_chart

pytestmark = pytest.mark.pure
SVG = "{http://www.w3.org/2000/svg}"


def points(svg):
    """Series name -> pixel positions of its points."""
    found = {}
    for circle in ET.fromstring(svg).iter(SVG + "circle"):
        if len(circle):
            found.setdefault(circle[0].text.rpartition(":")[0], []).append((float(circle.get("cx")), float(circle.get("cy"))))
    return found


def test_linear_axes_keep_distances():
    line = points(line_chart({"a": [(0, 1), (1, 2), (3, 4)]}, x_label="x", y_label="y"))["a"]
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x2 - x1 == pytest.approx(2 * (x1 - x0), abs=0.2) and y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.2)
    assert x0 < x1 < x2 and y0 > y1 > y2  # larger figures stand higher


def test_logarithmic_axes_keep_ratios_and_a_power_law_is_straight():
    line = points(line_chart({"a": [(d, 3 * d**0.5) for d in (128, 256, 1024)]}, x_label="x", y_label="y", log_x=True, log_y=True))["a"]
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x2 - x1 == pytest.approx(2 * (x1 - x0), abs=0.2)
    assert (y1 - y2) / (x2 - x1) == pytest.approx((y0 - y1) / (x1 - x0), rel=0.01)


def test_ticks_stand_where_their_figures_say():
    svg = line_chart({"a": [(128, 1), (1024, 900)]}, x_label="layers", y_label="MiB", log_x=True, log_y=True)
    ticks = {int(text): float(x) for x, text in re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="middle">(\d+)</text>', svg)}
    assert set(ticks) == {128, 1024}
    (x0, _), (x1, _) = points(svg)["a"]
    assert (ticks[128], ticks[1024]) == (pytest.approx(x0, abs=0.1), pytest.approx(x1, abs=0.1))


def test_names_labels_and_title_are_text():
    name = "</svg><script>alert(1)</script>"
    root = ET.fromstring(line_chart({name: [(1, 1)], "b": [(2, 2)]}, x_label=name, y_label=name, title=name))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "style", "text", "path", "circle", "title", "g"}
    assert [element.text for element in root.iter(SVG + "text")].count(name) == 4  # title, two labels, legend
    assert root.get("aria-label") == name


def test_both_schemes_of_colour_and_one_style_a_series():
    svg = line_chart({str(i): [(1, i + 1), (2, i + 2)] for i in range(9)}, x_label="x", y_label="y")
    assert "prefers-color-scheme:dark" in svg
    lines = [g.get("class") for g in ET.fromstring(svg).iter(SVG + "g")]
    assert lines == [f"s{i % 8}" for i in range(9)]


@pytest.mark.parametrize(
    ("series", "log", "message"),
    [
        ({}, False, "has no point"),
        ({"a": []}, False, "has no point"),
        ({"a": [(0.0, 1.0)]}, True, "above zero on a logarithmic axis"),
        ({"a": [(1.0, float("nan"))]}, False, "expected finite numbers"),
        ({"a": [(float("inf"), 1.0)]}, False, "expected finite numbers"),
    ],
)
def test_what_cannot_be_drawn_is_said(series, log, message):
    with pytest.raises(UserError, match=message):
        line_chart(series, x_label="x", y_label="y", log_x=log, title="t")


@pytest.mark.parametrize("log", [False, True])
def test_one_point_and_a_flat_line_can_be_drawn(log):
    for line in ([(5, 5)], [(1, 7), (2, 7)]):
        assert len(points(line_chart({"a": line}, x_label="x", y_label="y", log_x=log, log_y=log))["a"]) == len(line)
