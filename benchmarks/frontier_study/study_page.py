"""The page of the study: its sections, tables and figures.

What is published is a hollow diamond in the colour of the text; what is simulated is a coloured
line or dot, and what the closed forms estimate is dashed. Figures have no ground of their own, and
their text takes the colour of the reader's light or dark scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.frontier_study.study_runs import ROOT
from benchmarks.results_file import record, table

PAGE: Final = ROOT / "docs" / "frontier-study.md"
PLOTS: Final = ROOT / "docs" / "plots"
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c7ae6")
INK: Final = "#010203"
"""Stands for the colour of the text until the file is written."""
_STYLE: Final = (
    "<style>svg{color:#1f2328}@media (prefers-color-scheme: dark){svg{color:#e6edf3}}</style>"
)
PREAMBLE: Final = """\
# The Frontier study

What layout-tuner says of the runs that Dash et al. published of GPT models of 22, 175 and 1,000
billion parameters on Frontier ([arXiv:2312.12705](https://arxiv.org/abs/2312.12705)), and of those
of AxoNN ([arXiv:2502.08145](https://arxiv.org/abs/2502.08145)). `make frontier-study` writes every
section.

**Nothing here was measured by us.** *Published* numbers were measured by the papers' authors; in
figures they are hollow diamonds. *Simulated* numbers come from a simulated machine, of which one
published number, the speed of 175B, is a constant; in figures they are coloured lines and dots.
[The simulator](simulator.md) says how right it is, and what it misses.
*Estimated* numbers come from the closed forms that the search starts from; in figures they are
dashed. A simulated number says what would be worth measuring, not what would be measured.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPart:
    """A section of the page."""

    title: str
    blocks: tuple[str, ...]
    """Paragraphs, tables and figures."""

    def write(self, note: str) -> None:
        """Replaces the section; the page is begun where there is none."""
        if not PAGE.exists():
            PAGE.write_text(PREAMBLE)
        record(self.title, "\n\n".join([*map(wrapped, self.blocks), f"<sub>{note}</sub>"]), PAGE)


def wrapped(block: str) -> str:
    """A paragraph in lines of at most 100 characters; tables and figures as they are."""
    if block.startswith(("|", "![", "```")):
        return block
    lines, line = [], ""
    for word in block.split():
        if line and len(line) + 1 + len(word) > 100:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def rows_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return table(tuple(header), [tuple(row) for row in rows])


@contextmanager
def figure(name: str, columns: int = 1, *, height: float = 3.0) -> Iterator[Any]:
    """Axes side by side, written to `docs/plots/frontier_<name>.svg` at the end."""
    import matplotlib as mpl

    mpl.use("svg")
    colours = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(colours, INK)
    # Equal numbers give equal files: no dates, no random names.
    style |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "legend.frameon": False}
    with mpl.rc_context(style):
        from matplotlib import pyplot as plt

        width = 9.0 if columns > 1 else 6.0
        drawn, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
        yield axes
        for each in drawn.axes:
            each.grid(alpha=0.3)
            each.set_axisbelow(True)
        PLOTS.mkdir(parents=True, exist_ok=True)
        path = PLOTS / f"frontier_{name}.svg"
        drawn.savefig(path, metadata={"Date": None}, transparent=True)
        plt.close(drawn)
    _take_scheme(path)


def _take_scheme(path: Path) -> None:
    text = path.read_text().replace(INK, "currentColor")
    path.write_text(re.sub(r"(<svg [^>]*>)", rf"\1{_STYLE}", text, count=1))


def shown(name: str, sentence: str) -> str:
    """A figure with the sentence that says what it shows."""
    about = sentence[:48].rpartition(" ")[0].replace("`", "").rstrip(",:")
    return f"![{about}](plots/frontier_{name}.svg)\n\n{wrapped(sentence)}"


def draw_published(
    axes: Any, x: Any, y: Any, label: str | None = "published", marker: str = "D"
) -> None:
    """Hollow diamonds in the colour of the text."""
    style = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.4}
    axes.plot(x, y, linestyle="", marker=marker, markersize=7, label=label, zorder=5, **style)


def draw_simulated(axes: Any, x: Any, y: Any, label: str, colour: int = 0) -> None:
    """A coloured line with dots."""
    axes.plot(x, y, color=COLOURS[colour], marker="o", markersize=3.5, label=label)


def draw_estimated(axes: Any, x: Any, y: Any, label: str, colour: int = 0) -> None:
    """A dashed line of the same colour."""
    axes.plot(x, y, color=COLOURS[colour], linestyle="--", linewidth=1.2, label=label)


def from_zero(axes: Any) -> None:
    """Lets the vertical axis begin at 0, with room above what was drawn."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1)


def counted(axes: Any, values: Sequence[int]) -> None:
    """A logarithmic axis with these numbers on it."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()
