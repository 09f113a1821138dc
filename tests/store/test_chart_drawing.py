"""Charts as SVG: whatever the numbers are, the drawing is well formed, named, and within its bounds."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.reports.chart_svg import render_svg
from tether.reports.charts import (
    Chart,
    ChartGroup,
    Mark,
    Series,
    calibration_chart,
    group_charts,
    margin_histogram,
    nice_ticks,
    runs_of,
    short,
    thinned,
    tick_label,
    value_range,
)

SVG = "{http://www.w3.org/2000/svg}"
NAN, INF = math.nan, math.inf


def chart(*points: tuple[float, float], kind="line", **more) -> Chart:
    return Chart("A title", "Why?", (Series("one", points, kind),), **more)


def drawn(what: Chart) -> ET.Element:
    root = ET.fromstring(render_svg(what, name="x", standalone=True))
    ET.fromstring(render_svg(what, name="x"))
    return root


def numbers(root: ET.Element) -> list[float]:
    """Every number of the drawing's geometry."""
    names = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "points", "d", "viewBox")
    texts = [element.get(name, "") for element in root.iter() for name in names]
    return [float(number) for text in texts for number in re.findall(r"-?[\d.]+(?:e-?\d+)?|nan|inf", text)]


@pytest.mark.parametrize("kind", ["line", "dots", "bars"])
@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0, 1.0),),
        ((0, NAN),),
        ((NAN, 1.0),),
        ((0, 0.0), (1, 0.0)),
        ((0, 5.0), (1, 5.0), (2, 5.0)),
        ((0, 1.0), (1, NAN), (2, 3.0)),
        ((0, INF), (1, 1.0), (2, -INF)),
        ((0, 1e308), (1, -1e308)),
        ((0, 1e-320), (1, 2e-320)),
        ((0, 1e99), (1, -1e99)),
        ((5, 1.0), (5, 2.0)),
        ((3, 1.0), (1, 2.0), (2, 0.5)),
        ((0, 1 + 1e-16), (1, 1.0)),
    ],
)
def test_any_series_is_drawn_within_bounds(points, kind):
    root = drawn(chart(*points, kind=kind, marks=(Mark("y", NAN), Mark("x", 0.0, "here")), y_label="y"))
    assert all(math.isfinite(number) and -1000 < number < 1000 for number in numbers(root))


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=20),
    st.sampled_from(["line", "dots", "bars"]),
    st.booleans(),
)
def test_any_floats_are_drawn(points, kind, diagonal):
    root = drawn(chart(*points, kind=kind, diagonal=diagonal))
    assert all(math.isfinite(number) for number in numbers(root))


def test_a_chart_has_a_name_and_says_its_numbers_in_words():
    root = drawn(chart((0, 0.1), (10, 0.9), (20, 0.6), note="Up is good."))
    assert root.get("role") == "img"
    title, words = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and title.text == "A title"
    assert words is not None and words.text is not None
    assert "0.60 at 20" in words.text and "highest 0.90 at 10" in words.text and "Up is good." in words.text
    assert root.get("aria-labelledby") == f"{title.get('id')} {words.get('id')}"


def test_no_data_is_said():
    assert "no data was recorded" in render_svg(Chart("t", "q", ()))
    assert "no data was recorded" in render_svg(chart((1, NAN)))


def test_a_line_breaks_where_a_value_is_missing():
    root = drawn(chart((0, 1.0), (1, 2.0), (2, NAN), (3, 1.0), (4, 2.0)))
    assert len(root.findall(f"{SVG}polyline")) == 2


def test_a_legend_only_where_there_is_something_to_tell_apart():
    lines = tuple(Series(name, ((0, 0.0), (1, 1.0))) for name in ("first", "second"))
    texts = [text.text for text in drawn(Chart("t", "q", lines)).iter(f"{SVG}text")]
    assert "first" in texts and "second" in texts
    assert "one" not in [text.text for text in drawn(chart((0, 0.0), (1, 1.0))).iter(f"{SVG}text")]


def test_labels_at_the_ends_of_lines_do_not_overlap():
    lines = tuple(Series(str(place), ((0, 0.0), (1, 1.0 + place * 1e-3))) for place in range(4))
    ends = [text for text in drawn(Chart("t", "q", lines)).iter(f"{SVG}text") if "value" in text.get("class", "")]
    rows = sorted(float(text.get("y", "nan")) for text in ends)
    assert len(rows) == 4
    assert all(high - low >= 12 for low, high in pairwise(rows))


def test_hostile_names_stay_text():
    bad = "</svg><script>alert(1)</script>\"'&\x00\ud800"
    hostile = Chart(bad, bad, (Series(bad, ((0, 1.0),)), Series(bad, ())), bad, bad, bad, (Mark("y", 1.0, bad),))
    root = drawn(hostile)
    assert not root.findall(f".//{SVG}script")
    assert "<script" not in render_svg(hostile, name='"><script>')


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 40, [0, 10, 20, 30, 40]), (-3, 2.2, [-3, -2, -1, 0, 1, 2])],
)
def test_ticks_are_round(low, high, expected):
    assert nice_ticks(low, high, 5) == pytest.approx(expected)


def test_steps_have_whole_ticks():
    assert nice_ticks(0, 3, 6, whole=True) == [0, 1, 2, 3]
    assert nice_ticks(1, 1) == [] and nice_ticks(0, NAN) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.8134, "0.81"), (-12.44, "−12.4"), (1240, "1,240"), (3e-5, "3e−5"), (0.0123, "0.012"), (2e7, "2e7")],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_values_that_are_no_numbers_have_words():
    assert short(NAN) == "not a number" and short(-INF) == "−∞"
    assert tick_label(0.30000000000000004, 0.1) == "0.3" and tick_label(-1e-17, 0.1) == "0"


def test_ranges():
    assert value_range([]) == (0.0, 1.0)
    assert value_range([NAN, 2.0]) == pytest.approx((1.8, 2.2))
    low, high = value_range([0.1, 1.0])
    assert low == 0.0 and high > 1.0
    assert value_range([3.0, 5.0], from_zero=True)[0] == 0.0


def test_thinning_keeps_a_spike():
    points = [(float(step), 0.0) for step in range(10_000)]
    points[7321] = (7321.0, 9.0)
    kept = thinned(points)
    assert len(kept) < 700 and (7321.0, 9.0) in kept and kept[0] == points[0] and kept[-1] == points[-1]


def test_points_come_in_order():
    assert runs_of(((3, 1.0), (1, 2.0), (2, NAN))) == [[(1, 2.0)], [(3, 1.0)]]


def test_a_margin_histogram_splits_at_zero_and_counts_every_pair():
    made = margin_histogram([-2.0, -0.1, 0.0, 0.1, 1.0, 3.9, 4.0, NAN], question="q", bins=8)
    right, wrong = made.series
    assert sum(y for _, y in right.points) == 4 and sum(y for _, y in wrong.points) == 3
    assert all(x > 0 for x, _ in right.points) and all(x < 0 for x, _ in wrong.points)
    assert "57% of 7 pairs" in made.note
    drawn(made)


@pytest.mark.parametrize("margins", [[], [NAN], [0.0], [1.0], [-1.0]])
def test_small_margin_histograms(margins):
    drawn(margin_histogram(margins, question="q"))


def test_calibration_holds_predictions_against_outcomes():
    made = calibration_chart([0.6] * 10 + [0.9] * 10, [1.0] * 6 + [0.0] * 4 + [1.0] * 9 + [0.0], question="q", bins=2)
    assert [value for point in made.series[0].points for value in point] == pytest.approx([0.6, 0.6, 0.9, 0.9])
    assert "diagonal" in render_svg(made)
    drawn(calibration_chart([], [], question="q"))
    with pytest.raises(ValueError, match="1 predictions"):
        calibration_chart([0.5], [], question="q")


def test_charts_are_grouped_by_question_in_order():
    one, two, three = Chart("a", "Q1", ()), Chart("b", "Q2", ()), Chart("c", "Q1", ())
    assert group_charts([one, two, three], {"Q2": "Yes."}) == (
        ChartGroup("Q1", (one, three)),
        ChartGroup("Q2", (two,), "Yes."),
    )
