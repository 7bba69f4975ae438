"""The estimates alone, calibrated on some cells and judged on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.results_file import table
from benchmarks.search.search_record import Promise
from layout_tuner.predictions.belief.known_measurements import knowledge_of
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.search_spaces.tables.selection import CellFilter, select
from layout_tuner.tuner.replay.judged_estimates import estimates_report

HEADER = (
    "what",
    "layouts",
    "calibrated from",
    "time: median / mean error",
    "tau",
    "first choice",
    "memory: median / mean error",
    "false accepts",
    "false rejects",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """What is judged, and what was known before."""

    title: str
    judged: tuple[str, str]
    """Name of a table and a filter of its cells."""
    known: tuple[tuple[str, str], ...] = ()
    """Tables and filters to calibrate on; none: the priors alone."""
    asked: Mapping[str, float] | None = None
    """Figures of the step time, and what they may be at most (of tau: at least)."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that it needs."""
        return (self.judged[0], *(name for name, _ in self.known))


EXAMS: Final = (
    Exam(
        title="18.4B on 256, from smaller models on 2 to 64",
        judged=("vtrain_a100_multi", "model=GPT-18.4B"),
        known=(("vtrain_a100_small", ""), ("vtrain_a100_multi", "model=GPT-3.6B")),
        asked={"mean_error": 0.08, "first_choice_regret": 0.03},
    ),
    Exam(
        title="4 devices, from 2",
        judged=("vtrain_a100_small", "num_devices=4"),
        known=(("vtrain_a100_small", "num_devices=2"),),
        asked={"mean_error": 0.06, "kendall_tau": 0.92},
    ),
)


def cold_exam(name: str) -> Exam:
    """A whole table, by the priors alone."""
    return Exam(title=f"{name}, cold", judged=(name, ""))


def sit(exam: Exam, tables: Mapping[str, MeasurementTable]) -> dict[str, Any]:
    """The judgement, as `layout-tuner replay --estimates` makes it."""
    known = [cell for part in exam.known for cell in _cells(tables, part)]
    return estimates_report(exam.judged[0], _cells(tables, exam.judged), knowledge_of(known))


def _cells(tables: Mapping[str, MeasurementTable], part: tuple[str, str]) -> tuple[TableCell, ...]:
    name, text = part
    chosen = select(tables[name], (CellFilter.read(text),))
    return tuple(cell for cell in chosen if cell.num_completed)


def exams_table(reports: Mapping[str, dict[str, Any]]) -> str:
    """A row an exam."""
    return table(HEADER, [_row(title, report) for title, report in reports.items()])


def _row(title: str, report: dict[str, Any]) -> tuple[str, ...]:
    time, memory = report["estimates"]["time"], report["estimates"]["memory"]
    return (
        title,
        f"{sum(cell['num_layouts'] for cell in report['cells'])}",
        f"{report['settings']['calibrated_from']}",
        f"{_share(time['median_error'])} / {_share(time['mean_error'])}",
        "-" if time["kendall_tau"] is None else f"{time['kendall_tau']:.3f}",
        _share(time["first_choice_regret"]),
        f"{_share(memory['median_error'])} / {_share(memory['mean_error'])}",
        _share(memory["false_accepts"]),
        _share(memory["false_rejects"]),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def exam_promises(exam: Exam, report: dict[str, Any]) -> list[Promise]:
    """What was asked of an exam; of tau, what is missing to 1."""
    time = report["estimates"]["time"]
    names = {
        "mean_error": "mean error",
        "first_choice_regret": "regret of the first choice",
        "kendall_tau": "1 - tau",
    }
    promises = []
    for figure, bound in (exam.asked or {}).items():
        is_tau = figure == "kendall_tau"
        most = 1 - bound if is_tau else bound
        promises.append(
            Promise(
                what=f"estimates, {exam.title}: {names[figure]}",
                asked=f"{most:.2f}" if is_tau else f"{most:.0%}",
                measured=1 - time[figure] if is_tau else time[figure],
                most=most + 1e-9,
                shown="{:.3f}" if is_tau else "{:.1%}",
            )
        )
    return promises
