from __future__ import annotations

import re

import pytest

from api.dashboard.drawings.bars import keys, memory_by_stage, stacked, step_parts
from search_spaces.protocol.outcome import Breakdown
from tests.api.report.page import Page

GIB = 1 << 30


def breakdown(unexplained_s: float) -> Breakdown:
    return Breakdown(
        compute_s=0.5,
        tp_s=0.2,
        pp_s=0.0,
        dp_s=0.1,
        optimizer_s=0.1,
        unexplained_s=unexplained_s,
    )


def widths(svg: str, kind: str) -> list[float]:
    found = re.findall(rf'<rect [^>]*width="([\d.]+)"[^>]*class="(?:part )?{kind}"', svg)
    return [float(width) for width in found]


def test_the_parts_of_a_step_keep_their_colours_and_add_up() -> None:
    parts = step_parts(breakdown(0.1), 1.0)
    assert [(part.name, part.says, part.kind) for part in parts] == [
        ("compute", "50.0%", "part1"),
        ("tensor parallel", "20.0%", "part2"),
        ("data parallel", "10.0%", "part4"),
        ("optimizer", "10.0%", "part5"),
        ("unexplained", "10.0%", "part6"),
    ]
    bar = stacked(parts)
    assert sum(widths(bar, r"part\d")) == pytest.approx(860.0, abs=0.1)
    assert 'class="hatching"' in bar
    assert "unexplained 10.0%" in Page(keys(parts)).text


def test_parts_that_exceed_the_step_leave_a_negative_rest_in_words_alone() -> None:
    parts = step_parts(breakdown(-0.05), 0.85)
    assert parts[-1].says == "-5.9%"
    bar = stacked(parts, whole=1.8)
    assert sum(widths(bar, r"part\d")) == pytest.approx(860.0 * 0.9 / 1.8, abs=0.1)


def test_memory_stands_beside_the_estimate_below_the_capacity() -> None:
    drawn = memory_by_stage([6 * GIB, 4 * GIB], [5 * GIB, 4 * GIB], capacity_bytes=8 * GIB)
    measured, estimated = widths(drawn.svg, "part1"), widths(drawn.svg, "estimate")
    assert measured[0] / measured[1] == pytest.approx(1.5, rel=1e-3)
    assert estimated[0] / measured[0] == pytest.approx(5 / 6, rel=1e-3)
    assert "6 GiB measured, 5 GiB estimated" in drawn.svg
    assert "capacity 8 GiB" in drawn.svg


def test_the_scale_reaches_what_exceeds_the_capacity() -> None:
    drawn = memory_by_stage([], [12.0 * GIB], capacity_bytes=8 * GIB)
    (line,) = re.findall(r'<line x1="([\d.]+)"[^>]*class="capacity"', drawn.svg)
    (width,) = widths(drawn.svg, "estimate")
    assert (float(line) - 74.0) / width == pytest.approx(8 / 12, rel=1e-3)
    assert "Nothing was measured" in drawn.notes[0]


def test_many_stages_are_folded() -> None:
    drawn = memory_by_stage([GIB] * 100, [], capacity_bytes=None)
    assert len(widths(drawn.svg, "part1")) == 32
    assert "Drawn are the first and the last 16 of 100 stages." in drawn.notes
