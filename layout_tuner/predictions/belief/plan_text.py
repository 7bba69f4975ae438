"""A plan as text, and the days of training jobs as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from layout_tuner.predictions.belief.job import JobEstimate
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty
from layout_tuner.predictions.belief.plan import BoughtProbes, KnowledgeUsed, Plan, PlannedLayout
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.layouts.knobs import choices_words
from layout_tuner.terminal.plurals import counted, figure
from layout_tuner.terminal.text_table import table_lines
from layout_tuner.units import GIB

PROSE_WIDTH: Final = 100
"""Width of sentences in a file."""

PLAN_COLUMNS: Final[Mapping[str, Callable[[PlannedLayout], str]]] = {
    ">rank": lambda each: str(each.rank),
    "layout": lambda each: each.layout_key,
    ">predicted s": lambda each: figure(each.predicted.step_time_s),
    ">95 %": lambda each: (
        f"{figure(each.predicted.step_time_low_s, 3)}-{figure(each.predicted.step_time_high_s, 3)}"
    ),
    ">tokens/s": lambda each: figure(each.predicted.tokens_per_s),
    ">/device": lambda each: figure(each.predicted.tokens_per_s_per_device),
    ">MFU": lambda each: "-" if each.predicted.mfu is None else f"{each.predicted.mfu:.1%}",
    ">TFLOP/s": lambda each: f"{each.predicted.model_tflops_per_device:.4g}",
    ">GiB": lambda each: f"{each.predicted.peak_memory_bytes / GIB:.3g}",
    ">P(fits)": lambda each: f"{each.predicted.fits:.2f}",
    ">P(best)": lambda each: "-" if each.best_chance is None else f"{each.best_chance:.2f}",
    "limited by": lambda each: ", ".join(
        f"{part.part} {part.share:.0%}" for part in each.shares[:2]
    ),
}
"""What a plan shows of a layout, by the headings (see `table_lines`)."""

_JOB_COLUMNS: Final = (
    "",
    "step time",
    ">days",
    ">95 %",
    ">node-hours",
    ">checkpoint every",
    ">lost",
    "layout",
)
_BOUNDS: Final = {
    "trials": "the budget of trials",
    "node_hours": "the budget of node-hours",
    "wall_time_s": "the wall time, with one probe at a time",
    "layouts": "the number of legal layouts",
}
_MOST_NAMES: Final = 5


def plan_lines(plan: Plan, width: int | None) -> Iterator[str]:
    """The lines of a plan for a terminal of this width; None: for a file, with whole tables."""
    yield from _wrapped(
        f"plan of {plan.campaign}: {plan.model} on {plan.cluster}. Every figure of a layout is "
        "predicted; nothing was run.",
        width,
    )
    yield ""
    yield from _space_lines(plan, width)
    yield ""
    same = _same_parts(plan.layouts) if width else []
    title = (
        f"predicted: the best {len(plan.layouts)} of {plan.num_legal:,} by {plan.objective} times "
        f"P(fits){'; all ' if same else ''}{' '.join(same)}"
    )
    rows = [[text(each) for text in PLAN_COLUMNS.values()] for each in plan.layouts]
    for row in rows:
        row[1] = " ".join(part for part in row[1].split("-") if part not in same)
    yield from table_lines(tuple(PLAN_COLUMNS), rows, title, width=width)
    yield ""
    yield from _wrapped(chances_words(plan), width)
    if plan.fits_depend_on is not None:
        yield from _wrapped(_deciding_words(plan.fits_depend_on), width)
    yield from _wrapped(_budget_words(plan.budget), width)
    yield from _wrapped(f"predicted from {knowledge_words(plan.knowledge)}", width)
    for warning in plan.warnings:
        yield from _wrapped(f"warning: {warning}", width)
    if plan.job is not None:
        yield ""
        jobs = [(f"rank {each.rank}", each.job) for each in plan.layouts if each.job is not None]
        yield from job_lines(plan.job, jobs, width)


def job_lines(
    job: TrainingJob, jobs: Sequence[tuple[str, JobEstimate]], width: int | None
) -> Iterator[str]:
    """The days of a training job with some layouts, and what was assumed.

    `jobs` has the name of each layout, and the estimate. Without a width it is for a file, with a
    whole table.
    """
    where = "the layout's nodes" if job.num_nodes is None else counted(job.num_nodes, "node")
    # A line of its own above the table: a title would be folded into it.
    yield from _wrapped(f"training job: {_count(job.tokens)} tokens on {where}", width)
    rows = [_job_row(name, estimate) for name, estimate in jobs if estimate.duration is not None]
    if rows:
        yield from table_lines(_JOB_COLUMNS, rows, width=width)
    for name, estimate in jobs:
        if estimate.problem:
            yield from _wrapped(f"{name}: {estimate.problem}", width)
    yield from _wrapped(
        f"assumed: a node fails every {job.mtbf_hours:,g} h, a checkpoint takes "
        f"{job.checkpoint_s:g} s, a restart {job.restart_s:g} s; checkpoints at Daly's interval",
        width,
    )


def _space_lines(plan: Plan, width: int | None) -> Iterator[str]:
    yield from _wrapped(
        f"{plan.num_combinations:,} combinations, {plan.num_legal:,} legal, about "
        f"{plan.expected_fitting:,.0f} of these expected to fit into memory",
        width,
    )
    if plan.auto:
        yield from _wrapped(
            f"  auto, since left out: {choices_words(plan.auto)}", width, indent="    "
        )
    for each in plan.illegal:
        yield from _wrapped(
            f"  {each.count:,} illegal by {each.rule}, as: {each.example}", width, indent="    "
        )


def _same_parts(layouts: Sequence[PlannedLayout]) -> list[str]:
    """The parts of the layouts' keys that all of them have; none where there is one layout."""
    if len(layouts) < 2:
        return []
    first, *others = (each.layout_key.split("-") for each in layouts)
    return [part for at, part in enumerate(first) if all(key[at] == part for key in others)]


def _job_row(name: str, estimate: JobEstimate) -> tuple[str, ...]:
    duration = estimate.duration
    assert duration is not None, "the caller has left out the others"
    return (
        name,
        estimate.step_source,
        figure(duration.days, 3),
        f"{figure(duration.days_low, 3)}-{figure(duration.days_high, 3)}",
        figure(duration.node_hours, 3),
        _time(duration.checkpoint_interval_s),
        f"{duration.lost_share:.1%}",
        estimate.layout_key.replace("-", " "),
    )


def chances_words(plan: Plan) -> str:
    """How many layouts to probe for one near the best."""
    if plan.probes_needed is None:
        return "no number of probes gives a 90 % chance of a layout within 5 % of the best"
    many = counted(plan.probes_needed, "layout")
    return f"probing the {many} with the largest P(best) has a 90 % chance of one within 5 % of the best"


def _deciding_words(deciding: DecidingProperty) -> str:
    return (
        "the trainer's memory is not known. Whether these layouts fit depends most on "
        f"{deciding.name}: P(fits) is {deciding.fits:.2f} on average with it (probability "
        f"{deciding.share:.2f}), {deciding.fits_without:.2f} without"
    )


def _budget_words(bought: BoughtProbes) -> str:
    cheap = ""
    if bought.cheap_probes is not None and bought.cheap_probes < 0:
        cheap = ". Its node-hours do not pay for one full probe of the best, which a winner needs"
    elif bought.cheap_probes is not None:
        cheap = (
            f". By its node-hours alone it pays for {counted(bought.cheap_probes, 'cheap probe')} "
            "at most, beside a full one of the best"
        )
    return (
        f"the budget pays for {counted(bought.num_probes, 'probe')} of the best layouts, of which "
        f"about {bought.expected_fitting:,.0f} fit: {figure(bought.node_hours, 3)} node-hours, "
        f"{_time(bought.wall_time_s)} one after another; the bound is {_BOUNDS[bought.ended_by]}. "
        f"A probe is taken to last {bought.probe_start_s:g} s and {bought.iterations} predicted steps"
        f"{cheap}"
    )


def knowledge_words(used: KnowledgeUsed) -> str:
    """The basis of the predictions of a plan."""
    constants = f"the constants of the cluster ({used.constants or 'of unknown origin'})"
    if used.basis != "measurements":
        kind = "measured constants" if used.basis == "calibration" else "data sheets alone"
        return f"{kind}: {constants}, no measurement"
    return (
        f"{counted(used.num_measurements, 'stored measurement')} "
        f"({counted(used.num_step_times, 'step time')}, {counted(used.num_peaks, 'peak')}) of "
        f"{_names(used.models)} on {_names(used.clusters)}, and {constants}"
    )


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:,}"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _wrapped(text: str, width: int | None, *, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, width or PROSE_WIDTH, subsequent_indent=indent, break_on_hyphens=False
    )
