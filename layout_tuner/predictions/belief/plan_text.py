"""A plan as text, and the days of training jobs as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from layout_tuner.documents.reading import word_of
from layout_tuner.predictions.belief.best_chances import ENOUGH
from layout_tuner.predictions.belief.job import JobEstimate
from layout_tuner.predictions.belief.job_knobs.plan_gains import KnobGain
from layout_tuner.predictions.belief.plan import KnowledgeUsed, Plan, PlannedBaseline, PlannedLayout
from layout_tuner.predictions.belief.plan_parts.bought_probes import BoughtProbes
from layout_tuner.predictions.belief.plan_parts.comparison_text import (
    chance_words,
    change_words,
    comparison_tables,
    comparison_words,
    ratio_words,
)
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.layouts.knobs import choices_words
from layout_tuner.terminal.plurals import counted, figure
from layout_tuner.terminal.text_table import table_lines
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.units import GIB

PROSE_WIDTH: Final = 100
"""Width of sentences in a file."""

PLAN_COLUMNS: Final[Mapping[str, Callable[[PlannedLayout], str]]] = {
    ">rank": lambda each: str(each.rank),
    "layout": lambda each: " ".join((each.layout_key, *_marks(each))),
    ">predicted s": lambda each: figure(each.predicted.step_time_s),
    ">95 %": lambda each: (
        f"{figure(each.predicted.step_time_low_s, 3)}-{figure(each.predicted.step_time_high_s, 3)}"
    ),
    ">tokens/s": lambda each: figure(each.predicted.tokens_per_s),
    ">/device": lambda each: figure(each.predicted.tokens_per_s_per_device),
    ">MFU": lambda each: "-" if each.predicted.mfu is None else f"{each.predicted.mfu:.1%}",
    ">TFLOP/s": lambda each: f"{each.predicted.model_tflops_per_device:.4g}",
    ">GiB": lambda each: f"{each.predicted.peak_memory_median_bytes / GIB:.3g}",
    ">80 %": lambda each: (
        f"{each.predicted.peak_memory_low_bytes / GIB:.3g}-"
        f"{each.predicted.peak_memory_high_bytes / GIB:.3g}"
    ),
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
_LEAST_GIB: Final = 0.005
"""Change of a peak below which it is not said."""
PREDICTED_WORDS: Final = "Every figure of a layout is predicted; nothing was run."


def plan_lines(plan: Plan, width: int | None) -> Iterator[str]:
    """The lines of a plan for a terminal of this width; None: for a file, with whole tables."""
    yield from _wrapped(f"{head_words(plan)}. {PREDICTED_WORDS}", width)
    if plan.baseline is not None:
        yield from _wrapped(baseline_words(plan, plan.baseline), width)
    yield ""
    yield from _space_lines(plan, width)
    yield ""
    same = _same_parts(plan.rows) if width else []
    title = (
        f"predicted: the best {len(plan.layouts)} of {plan.num_ranked:,} by {plan.objective} times "
        f"P(fits){'; all ' if same else ''}{' '.join(same)}"
    )
    columns = dict(PLAN_COLUMNS)
    if width is not None and plan.fits_depend_on is None:
        del columns[">80 %"]  # the peaks of a known trainer are well known, and terminals narrow
    rows = [[text(each) for text in columns.values()] for each in plan.rows]
    for row, each in zip(rows, plan.rows, strict=True):
        different = (part for part in _parts(each.layout_key) if part not in same)
        row[1] = " ".join((*different, *_marks(each)))
    yield from table_lines(tuple(columns), rows, title, width=width)
    for sentence in refusal_words(plan):
        yield from _wrapped(sentence, width)
    yield ""
    for sentence in gain_words(plan.knobs):
        yield from _wrapped(sentence, width)
    yield from _wrapped(chances_words(plan), width)
    if plan.fits_depend_on is not None:
        yield from _wrapped(plan.fits_depend_on.words, width)
    yield from _wrapped(bought_words(plan.budget), width)
    yield from _wrapped(f"predicted from {knowledge_words(plan.knowledge)}", width)
    for warning in plan.warnings:
        yield from _wrapped(f"warning: {warning}", width)
    if plan.job is not None:
        yield ""
        jobs = [(f"rank {each.rank}", each.job) for each in plan.rows if each.job is not None]
        yield from job_lines(plan.job, jobs, width)
    if plan.comparison is not None:
        yield ""
        for sentence in comparison_words(plan.comparison):
            yield from _wrapped(sentence, width)
        for table in comparison_tables(plan.comparison):
            yield ""
            yield from table_lines(table.columns, table.rows, table.title, width=width)


def head_words(plan: Plan) -> str:
    """What the plan is of, for which trainer, and why on fewer nodes than there are."""
    who = "the embedded trainer" if plan.trainer == EMBEDDED_TRAINER else plan.trainer
    where = f", {plan.nodes}" if plan.nodes else ""
    return f"plan of {plan.campaign} for {who}: {plan.model} on {plan.cluster}{where}"


def baseline_words(plan: Plan, baseline: PlannedBaseline) -> str:
    """How good the layout is that runs today, and what to change in it."""
    rank, num_legal = baseline.planned.rank, plan.num_ranked
    if baseline.to_best is None:
        better = "no layout" if rank == 1 else f"no layout that {plan.trainer} runs"
        return f"the baseline is rank {rank:,} of {num_legal:,}: {better} is predicted to be better"
    where = f"the baseline is rank {rank:,} of {num_legal:,}"
    if baseline.is_outside:
        where = f"the baseline would be rank {rank:,} of {num_legal:,} (it is outside of the space)"
    best = "rank 1" if rank > 1 else "the best of the space"
    key = baseline.to_best.second.layout_key
    if key != plan.layouts[0].layout_key:
        best = f"{key}, the best that {plan.trainer} runs,"
    elif plan.layouts[0].refused:
        best += f", which {plan.trainer} refuses,"
    return (
        f"{where}: {best} gives {ratio_words(baseline.to_best)} of it; from the baseline to that: "
        f"{change_words(baseline.to_best.changes)}"
    )


def refusal_words(plan: Plan) -> Iterator[str]:
    """Which layouts of a plan its trainer refuses, and why: a sentence for each reason."""
    ranks: dict[str, list[str]] = {}
    for each in plan.rows:
        for reason in each.refused:
            ranks.setdefault(reason, []).append(str(each.rank))
    for reason, refused in ranks.items():
        noun = "rank" if len(refused) == 1 else "ranks"
        yield f"{plan.trainer} refuses {noun} {', '.join(refused)}: {reason}"


def jobs_words(plan: Plan) -> str:
    """How many jobs the layouts make with the settings of their knobs; empty: there are none."""
    if plan.num_jobs is None:
        return ""
    return f"; with the settings of job knobs they are {counted(plan.num_jobs, 'job')}"


def gain_words(gains: Sequence[KnobGain]) -> Iterator[str]:
    """What each value of a job knob is expected to bring to the best layout: a sentence each."""
    for each in gains:
        value, reference = (word_of(of) for of in (each.value, each.reference))
        memory = each.peak_memory_bytes / GIB
        more = "more" if memory > 0 else "less"
        adds = "" if abs(memory) < _LEAST_GIB else f", and {abs(memory):.2g} GiB {more}"
        chosen = " (chosen)" if each.is_chosen else ""
        yield (
            f"job knob {each.knob}: the step takes {each.step_ratio:.3g} times as long with "
            f"{value}{chosen} as with {reference} (95 %: {each.step_ratio_low:.3g} to "
            f"{each.step_ratio_high:.3g}){adds}; it helps with a chance of "
            f"{chance_words(each.helps)}"
        )


def _marks(each: PlannedLayout) -> list[str]:
    """Remarks behind the key of a layout."""
    marks = {"baseline": each.is_baseline, "refused": bool(each.refused)}
    said = ", ".join(mark for mark, is_set in marks.items() if is_set)
    return [f"({said})"] if said else []


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
        f"{plan.expected_fitting:,.0f} of these expected to fit into memory{jobs_words(plan)}",
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
    first, *others = (_parts(each.layout_key) for each in layouts)
    return [part for part in first if all(part in key for key in others)]


def _parts(layout_key: str) -> list[str]:
    """The parts of a key: fields of the layout, and settings such as ~compile.true."""
    layout, *settings = layout_key.split("~")
    return [*layout.split("-"), *(f"~{each}" for each in settings)]


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
    """How many layouts to probe for one near the best, and what chance the budget buys."""
    bought = f"the budget buys a chance of {chance_words(plan.budget.chance)}"
    bought += " with full probes alone" * (plan.budget.cheap_probes is not None)
    if plan.needed is None:
        why = ""
        if plan.some_fit < ENOUGH:
            why = f", since with probability {1 - plan.some_fit:.2f} no layout fits into memory"
        return f"no number of probes gives a 90 % chance of a layout within 5 % of the best{why}; {bought}"
    late, deadline_s = "", plan.budget.deadline_s
    if plan.needed.longest_s > deadline_s:
        late = (
            f", if probe.deadline is raised from {deadline_s:g} s: the longest takes "
            f"{plan.needed.longest_s:,.0f} s"
        )
    return (
        f"probing the {counted(plan.needed.number, 'layout')} with the largest P(best) has a 90 % "
        "chance of one within 5 % of the best, and takes "
        f"{figure(plan.needed.node_hours, 3)} node-hours{late}; {bought}"
    )


def bought_words(bought: BoughtProbes) -> str:
    """What the budget pays for."""
    cheap = late = ""
    if bought.num_late:
        many = "it" if bought.num_late == bought.num_probes == 1 else f"{bought.num_late} of them"
        late = (
            f"; {many} would last longer than probe.deadline, {bought.deadline_s:g} s, and end as "
            f"{'a timeout' if bought.num_late == 1 else 'timeouts'}"
        )
    if bought.cheap_probes is not None and bought.cheap_probes < 0:
        cheap = ". Its node-hours do not pay for one full probe of the best, which a winner needs"
    elif bought.cheap_probes is not None:
        cheap = (
            f". By its node-hours alone it pays for {counted(bought.cheap_probes, 'cheap probe')} "
            "at most, beside a full one of the best"
        )
    first = "" if bought.baseline_s is None else "the baseline, which is measured first, and "
    return (
        f"the budget pays for {first}{counted(bought.num_probes, 'probe')} of the best layouts, of which "
        f"about {bought.expected_fitting:,.0f} fit: {figure(bought.node_hours, 3)} node-hours, "
        f"{_time(bought.wall_time_s)} one after another; the bound is {_BOUNDS[bought.ended_by]}{late}. "
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
