"""A figure that is drawn without a script has what plotly would draw; texts in it are text."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from layout_tuner.api.plot_data.knobs import parallel, two_knobs
from layout_tuner.api.plot_data.plot_data import Bar, PlottedData, Spot, bars, line, marked, points
from layout_tuner.api.plots.bars import keys, stacked, step_parts
from layout_tuner.api.plots.static_plot import MAX_TOLD, static_plot
from layout_tuner.api.plots.svg import join, tag
from layout_tuner.protocol.measurement import Breakdown
from layout_tuner.results_db.leaderboard.leaderboard_records import KnobCell
from tests.api.plot_data.layout_points import make_facts, make_point
from tests.kit.page import Page

AXIS: dict[str, Any] = {"range": [0, 10]}


def drawn(*traces: Any, x: dict[str, Any] = AXIS, y: dict[str, Any] = AXIS) -> Page:
    figure = PlottedData(traces=traces, layout={"xaxis": x, "yaxis": y}, says=["A caption."])
    found = static_plot(figure, "a plot")
    assert found.notes == ("A caption.",)
    return Page(found.svg)


def circles(page: Page) -> list[tuple[float, float]]:
    """Centres of the points, without that of the legend."""
    found = [each for tag, each in page.elements if tag == "circle"]
    return [(float(each["cx"]), float(each["cy"])) for each in found][1:]


def test_points_stand_where_the_axes_put_them_and_many_are_one_path() -> None:
    spots = [Spot(at, at, f"<{at}>\nsecond line", at) for at in (0, 5, 10, 11)]
    page = drawn(*points("all", spots, color="--mark"))
    (left, low), (middle, half), (right, high) = circles(page)
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((low + high) / 2)
    assert high < low
    assert page.texts["title"] == [f"<{at}>\nsecond line" for at in (0, 5, 10)]
    assert "var(--mark)" in {each.get("fill") for _, each in page.elements}
    spots = [Spot(5, 5, "", 1)] * (MAX_TOLD + 1)
    page = drawn(*points("all", spots, color="--mark"))
    assert circles(page) == []
    assert page.kinds("path") == ["many"]


def test_points_have_their_places_on_logarithmic_axes_and_among_categories() -> None:
    powers = {"type": "log", "range": [0, 2], "tickvals": [1, 10, 100], "ticktext": list("abc")}
    names = {"categoryarray": ["one", "two"], "range": [-0.5, 1.5]}
    spots = [Spot(1, "one", "", 1), Spot(10, "two", "", 2), Spot(100, "two", "", 3)]
    page = drawn(*points("all", spots), x=powers, y=names)
    (first, below), (second, above), (third, _) = circles(page)
    assert second - first == pytest.approx(third - second, abs=0.02)
    assert above < below
    assert {"a", "b", "c", "one", "two"} <= set(page.texts["text"])


def test_an_axis_without_ticks_is_drawn() -> None:
    narrow = {"type": "log", "range": [0.31, 0.4], "tickvals": [], "ticktext": []}
    assert len(circles(drawn(*points("all", [Spot(2.2, 2.2, "", 1)]), x=narrow, y=narrow))) == 1


def test_lines_end_at_the_axes_and_the_winner_and_the_baseline_have_shapes_of_their_own() -> None:
    traces = line("a", (0, 5, None, 5, 20), (0, 5, None, 5, 5), color="--good", width=1)
    page = drawn(traces)
    *_, path = [each for tag, each in page.elements if tag == "path"]
    assert path["d"].count("M") == 2
    right = max(float(each["x2"]) for tag, each in page.elements if tag == "line")
    assert f"L{right:g} " in path["d"]
    page = drawn(*marked("winner", Spot(1, 1, "a", 1)), *marked("baseline", Spot(2, 2, "b", 2)))
    shapes = [each for tag, each in page.elements if tag == "path" and "vector-effect" in each]
    assert len({each["d"] for each in shapes}) == 2
    assert page.texts["title"] == ["winner: a", "baseline: b"]


def places(path: dict[str, str]) -> list[tuple[float, float]]:
    """The corners of a line."""
    found = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path["d"])
    return [(float(across), float(down)) for across, down in found]


@pytest.mark.parametrize("shape", [None, "hv"])
def test_a_line_leaves_the_plot_where_its_values_do_and_is_never_drawn_at_the_end_of_an_axis(
    shape: str | None,
) -> None:
    style = {"color": "--good", "width": 1, "shape": shape}
    page = drawn(line("a", (0, 4, 8, 10), (5, -5, -5, 5), **style))
    (path,) = [each for tag, each in page.elements if tag == "path" and "d" in each][-1:]
    grid = [each for tag, each in page.elements if tag == "line"]
    bottom = max(float(each["y2"]) for each in grid)
    left, right = (pick(float(each["x1"]) for each in grid) for pick in (min, max))
    across = {
        name: left + share * (right - left) for name, share in enumerate((0, 0.2, 0.4, 0.9, 1))
    }
    corners = places(path)
    at_the_end = [spot for spot in corners if spot[1] == pytest.approx(bottom, abs=0.1)]
    # It crosses the end of the axis twice, and nothing runs along it.
    expected = (across[2], across[4]) if shape else (across[1], across[3])
    assert [spot[0] for spot in at_the_end] == pytest.approx(expected, abs=0.1)
    assert path["d"].count("M") == 2
    assert all(spot[1] <= bottom + 0.1 for spot in corners)


def test_a_band_that_ends_at_the_axes_is_one_shape_although_its_values_are_rounded() -> None:
    corners = line("band", (0, 10, 10, -1e-5, 0), (-1e-5, 8, 10 + 1e-5, 2, -1e-5), width=0)
    page = drawn({**corners, "fillcolor": "--run-tint"})
    (*_, path) = [each for tag, each in page.elements if tag == "path" and "d" in each]
    assert (path["d"].count("M"), path["d"].count("L")) == (1, 4)


def test_bars_begin_at_their_base_and_may_go_back() -> None:
    found = [Bar("a", 0, 5, "first", 1, "inside"), Bar("b", 10, -5, "second", 2, "out" * 30)]
    traces = bars("part", found, color="--part1", pattern={"shape": "/"})
    page = drawn(*traces, y={"categoryarray": ["a", "b"], "range": [1.5, -0.5]})
    _key, first, second = [each for tag, each in page.elements if tag == "rect"]
    assert float(first["x"]) + float(first["width"]) == pytest.approx(float(second["x"]))
    assert first["width"] == second["width"]
    assert float(first["y"]) < float(second["y"])
    assert page.kinds("path") == ["hatching", "hatching"]
    assert page.texts["title"] == ["first", "second"]
    assert "inside" in page.texts["text"]
    assert "out" * 30 not in page.texts["text"]  # it does not fit


def test_maps_and_parallel_coordinates_have_their_texts() -> None:
    facts = make_facts([make_point(1, 10.0, tp=1, pp=2), make_point(2, 20.0, tp=2)])
    cells = [KnobCell((1, 2), 1, 10.0), KnobCell((2, 1), 3, 20.0)]
    page = Page(static_plot(two_knobs(facts, "tp", "pp", cells), "two knobs").svg)
    fills = [each["fill"] for tag, each in page.elements if tag == "rect"]
    assert sorted(fills) == ["var(--scale1)", "var(--scale8)"]
    assert {"10", "20", "★ winner"} <= set(page.texts["text"])
    lines = Page(static_plot(parallel(facts), "parallel").svg)
    assert {"tp", "pp", "tokens/s/device"} <= set(lines.texts["text"])


@given(st.text())
def test_whatever_is_written_is_read_as_text_and_nothing_else(written: str) -> None:
    page = Page(tag("p", written, title=written))
    assert page.elements == [("p", {"title": page.text})]
    shown = "".join(character for character in written if character.isprintable())
    assert all(character in page.text for character in shown)
    page.text.encode()  # half of a surrogate pair could not be sent


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("<script>alert('x')</script> & \"", "<script>alert('x')</script> & \""),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\0b\x07", "a\\u0000b\\u0007"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("two\r\nlines\tand a tab", "two\nlines\tand a tab"),
        ("größer 更快", "größer 更快"),
    ],
)
def test_what_cannot_be_shown_is_spelled_out(written: str, read: str) -> None:
    assert Page(tag("p", written)).text == read


def test_markup_stays_and_all_else_is_escaped() -> None:
    assert join("<", None, Markup("<b>x</b>"), 3) == "&lt;<b>x</b>3"


def test_an_attribute_without_a_value_is_left_out() -> None:
    assert tag("path", d="M0 0", class_=None, stroke_width=1.5) == (
        '<path d="M0 0" stroke-width="1.5"></path>'
    )


def test_the_parts_of_a_step_keep_their_colours_and_add_up() -> None:
    def breakdown(unexplained_s: float) -> Breakdown:
        times = {"compute_s": 0.5, "tp_s": 0.2, "pp_s": 0.0, "dp_s": 0.1, "optimizer_s": 0.1}
        return Breakdown(**times, unexplained_s=unexplained_s)

    def width(svg: str) -> float:
        found = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*class="(?:part )?part\d"', svg)
        return sum(map(float, found))

    parts = step_parts(breakdown(0.1), 1.0)
    assert [(part.name, part.says, part.kind) for part in parts] == [
        ("compute", "50.0%", "part1"),
        ("tensor parallel", "20.0%", "part2"),
        ("data parallel", "10.0%", "part4"),
        ("optimizer", "10.0%", "part5"),
        ("unexplained", "10.0%", "part6"),
    ]
    bar = stacked(parts)
    assert width(bar) == pytest.approx(860.0, abs=0.1)
    assert 'class="hatching"' in bar
    assert "unexplained 10.0%" in Page(keys(parts)).text
    parts = step_parts(breakdown(-0.05), 0.85)
    assert parts[-1].says == "-5.9%"
    assert width(stacked(parts, whole=1.8)) == pytest.approx(860.0 * 0.9 / 1.8, abs=0.1)
