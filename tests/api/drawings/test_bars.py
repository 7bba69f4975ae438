from __future__ import annotations

import re

import pytest

from api.plots.bars import keys, stacked, step_parts
from search_spaces.protocol.measurement import Breakdown
from tests.kit.page import Page


def breakdown(unexplained_s: float) -> Breakdown:
    times = {"compute_s": 0.5, "tp_s": 0.2, "pp_s": 0.0, "dp_s": 0.1, "optimizer_s": 0.1}
    return Breakdown(**times, unexplained_s=unexplained_s)


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
    parts = step_parts(breakdown(-0.05), 0.85)
    assert parts[-1].says == "-5.9%"
    bar = stacked(parts, whole=1.8)
    assert sum(widths(bar, r"part\d")) == pytest.approx(860.0 * 0.9 / 1.8, abs=0.1)
