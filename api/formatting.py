"""Figures with their units, as text for the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from layout_tuner.predictions.statistics.disturbance import disturbance_words
from layout_tuner.protocol.measurement import (
    IMPORTED_TRAINER,
    Environment,
    routing_words,
    skipped_words,
)
from layout_tuner.results_db.service_records import USAGE_PARTS, UsageRow
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM
from layout_tuner.terminal import plurals
from layout_tuner.terminal.plurals import counted
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.simulator import is_simulator
from layout_tuner.units import memory as memory

if TYPE_CHECKING:
    from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
    from layout_tuner.predictions.statistics.job_duration import StepInterval
    from layout_tuner.results_db.leaderboard.leaderboard_records import BaselineRead, GainRead
    from layout_tuner.results_db.records import Cost, MeasurementRecord, RepeatReason


def trainer_words(measured: MeasurementRecord) -> str:
    """The trainer of a measurement and the source of its tokens; empty for the embedded one."""
    if measured.trainer in (EMBEDDED_TRAINER, IMPORTED_TRAINER):
        return ""
    if is_simulator(measured.trainer):
        return measured.trainer
    tokens = "counted" if measured.tokens == "counted" else "assumed from the layout, not counted"
    return f"{measured.trainer} {measured.trainer_version}, tokens {tokens}"


def made_by(measured: MeasurementRecord) -> str:
    """The origin of figures that the embedded trainer did not measure here."""
    if is_simulator(measured.trainer):
        return f"simulated by {measured.trainer}, not measured"
    words = trainer_words(measured)
    return f"measured by the trainer {words}" if words else ""


def measured_words(measured: MeasurementRecord) -> Iterator[tuple[str, str]]:
    """What a reader of a measurement's figures must know: other load, routing, skipped steps."""
    if words := disturbance_words(measured.others_share, measured.throttled, measured.own_share):
        yield "taken by others", words
    if words := routing_words(measured.balanced_routing, measured.expert_load):
        yield "routing", words
    if words := skipped_words(measured.skipped_steps):
        yield "skipped steps", words


_ROUNDING_NODE_S: Final = 1e-3
"""Sums of the same costs in another order differ by less."""

REPEAT_WORDS: Final[Mapping[RepeatReason, str]] = {
    "best": "it is among the best",
    "tie": "it cannot be told apart from others among the best",
    "doubted": "its measurement is doubted",
    "disturbed": "others took its devices while it was measured",
    "request": "a user or the campaign's file asked for it",
}
"""Why a layout is measured again, as the end of a sentence."""


def unit(objective: str) -> str:
    """The unit of an objective, made from a name such as tokens_per_s_per_device."""
    return (
        objective.replace("node_hour", "node-hour")
        .replace("_per_", "/")
        .replace("tflops", "TFLOP/s")
        .replace("_", " ")
    )


def figure(value: float | None) -> str:
    """A measured number with about four digits."""
    return "-" if value is None else plurals.figure(value)


def objective_figure(name: str, value: float | None) -> str:
    """An objective's value: a share in percent, any other as a number."""
    return percent(value) if name == MEMORY_HEADROOM else figure(value)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def step_words(step: StepInterval) -> str:
    """A step time with its 95 % interval."""
    return f"{figure(step.expected_s)} s (95 %: {figure(step.low_s)} to {figure(step.high_s)} s)"


def cheap_probe_words(probe: CheapProbe) -> str:
    """A cheap probe: its whole layout, the part that ran, and the extrapolated step."""
    words = f"cheap probe of {probe.full_layout_key}: {probe.runs}"
    if probe.full_step is None:
        return words
    unsaid = "" if probe.measures_memory else "; it says nothing of the memory"
    return f"{words}; extrapolated step {step_words(probe.full_step)}{unsaid}"


def node_time(seconds: float) -> str:
    """A cost: in node-hours, and below a hundredth of one in node-seconds."""
    if 0 < seconds < 36:
        return f"{figure(seconds)} node-seconds"
    return f"{figure(seconds / 3600)} node-hours"


def money_words(money: Mapping[str, float]) -> str:
    """Amounts by currency."""
    return ", ".join(f"{amount:,.2f} {currency}" for currency, amount in money.items())


def usage_cells(row: UsageRow) -> dict[str, str]:
    """The cells of a row of usage by heading, those of numbers with a leading ">"."""
    hours = (*USAGE_PARTS, "node_hours", "saved_node_hours")
    return {
        "name": row.name or "-",
        ">campaigns": f"{row.campaigns:,}",
        ">trials": f"{row.trials:,}",
        **{f">{name.replace('_', ' ')}": figure(getattr(row, name)) for name in hours},
        ">money": money_words(row.money) or "-",
    }


def used_words(node_seconds: float, budget: Budget) -> str:
    """The cost of a campaign's probes, of its budget where that counts node-hours."""
    return node_time(node_seconds) if budget.node_hours is None else budget.used_words(node_seconds)


def cost_parts(cost: Cost, node_seconds: float) -> dict[str, float]:
    """The cost of a campaign in node-seconds by use; the budget counts all but the last part."""
    of_allocations = cost.total - node_seconds
    if of_allocations < _ROUNDING_NODE_S:
        of_allocations = 0.0
    return {
        "iterations": cost.iterations,
        "start": cost.start,
        "idle": max(cost.idle - of_allocations, 0.0),
        "lost": cost.lost,
        "idle allocations": of_allocations,
    }


def cheap_count_words(number: int, node_seconds: float) -> str:
    """The number of cheap probes of a campaign, and their cost."""
    probes = counted(number, "cheap probe")
    return f"{probes}, {node_time(node_seconds)}: they run parts of layouts, and are not ranked"


def state_words(state: str, reason: str | None) -> str:
    return f"{state} ({reason})" if reason else state


def half_interval(value: float, low: float | None, high: float | None) -> str:
    """Half of a 95 % interval in percent of the value; both halves where they differ."""
    if low is None or high is None:
        return "-"
    if math.isclose(high / value, value / low, rel_tol=1e-4):
        return f"±{high / value - 1:.1%}"
    return f"-{1 - low / value:.1%} +{high / value - 1:.1%}"


def gain_sentence(gain: GainRead, baseline: BaselineRead, objective: str) -> str:
    """The gain of a layout over the baseline, with the 95 % interval."""
    if gain.trial_number == baseline.trial_number:
        return f"trial {gain.trial_number} is the baseline itself"
    low, high = gain.ratio_low, gain.ratio_high
    interval, equal = "", ""
    if low is not None and high is not None:
        interval = f" (95 %: {low:.4g} to {high:.4g})"
        if low <= 1.0 <= high:
            equal = "; the two cannot be told apart"
    return (
        f"trial {gain.trial_number} gives {gain.ratio:.4g} times{interval} the {unit(objective)} of the "
        f"baseline, trial {baseline.trial_number}{equal}"
    )


def measured_sentence(measurement: MeasurementRecord, environment: Environment | None) -> str:
    """The figures of a measurement and its environment, where they are known."""
    figures = [
        f"{figure(measurement.tokens_per_s_per_device)} tokens/s per device",
        f"{figure(measurement.step_time_s)} s a step",
    ]
    if measurement.peak_memory_bytes is not None:
        kind = f" ({measurement.memory_kind})" if measurement.memory_kind else ""
        figures.append(f"peak memory {memory(measurement.peak_memory_bytes)}{kind}")
    if measurement.mfu is not None:
        figures.append(f"MFU {percent(measurement.mfu)}")
    where = f", on {environment.device} of {environment.host}" if environment else ""
    words = trainer_words(measurement)
    by = f", by the trainer {words}" if words else ""
    mark = "; disturbed" if measurement.is_disturbed else ""
    how = made_by(measurement) if is_simulator(measurement.trainer) else "measured"
    return f"{how}: {', '.join(figures)}{where}{by}{mark}"


def baseline_words(baseline: BaselineRead, objective: str) -> str:
    """The state of a baseline's trial, with its value or the reason why it has none."""
    if baseline.trial_number is None or baseline.state is None:
        words = "not proposed yet"
    else:
        words = f"trial {baseline.trial_number}, {state_words(baseline.state, baseline.reason)}"
    if baseline.value is not None:
        half = half_interval(baseline.value, baseline.value_low, baseline.value_high)
        words += f", {figure(baseline.value)} {unit(objective)}"
        words += "" if half == "-" else f" {half}"
        words += "" if baseline.is_ranked else ", not ranked"
        words += ", disturbed" if baseline.disturbed else ""
    if baseline.outside_space:
        words += " (outside of the space)"
    return f"{words}: {baseline.message}" if baseline.message else words


def effect_words(effect: float | None, state: str, is_apart: bool | None) -> str:
    """The effect of one step of a knob on the objective, or why none is known."""
    if effect is None:
        words = {"out_of_memory": "out of memory", "failed": "fails"}.get(state, "")
    else:
        words = f"{effect:+.1%}"
    return f"{words} (tied)" if is_apart is False else words


def duration(seconds: float | None) -> str:
    """A time span in seconds, minutes and seconds, or hours and minutes."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory_of(value_bytes: int | None, capacity_bytes: int | None) -> str:
    """Bytes of a capacity, with the share that is free."""
    if value_bytes is None or not capacity_bytes:
        return memory(value_bytes)
    free = 1 - value_bytes / capacity_bytes
    return f"{memory(value_bytes)} of {memory(capacity_bytes)}, {free:.0%} free"


def budget_words(budget: Budget) -> str:
    bounds = []
    if budget.trials is not None:
        bounds.append(counted(budget.trials, "trial"))
    if budget.node_hours is not None:
        bounds.append(f"{budget.node_hours:g} node-hours")
    if budget.wall_time_s is not None:
        bounds.append(duration(budget.wall_time_s))
    return f"at most {' or '.join(bounds)}" if bounds else "all of them are tried"


def moment(at: datetime | None) -> str:
    """A date and time in UTC."""
    return "-" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def machine(num_nodes: int, devices_per_node: int, device: str | None) -> str:
    """The size of a cluster or of an allocation."""
    nodes = f"{num_nodes:,} node{'s' if num_nodes > 1 else ''}"
    return f"{nodes} with {devices_per_node} x {device or 'device'}"


def zero(layout: Layout) -> str:
    """The ZeRO stage, with the number of copies if states are sharded over groups within dp."""
    copies = f"x{layout.zero_replicas}" if layout.zero_replicas > 1 else ""
    return f"{layout.zero_stage}{copies}"


def other_knobs(layout: Layout) -> str:
    """The knobs without a column that are not at their default, also the job's, as one text."""
    words = [
        knob.words(getattr(layout, knob.name))
        for knob in KNOBS.values()
        if knob.is_shown and not knob.heading and getattr(layout, knob.name) != knob.default
    ]
    return ", ".join(filter(None, (*words, layout.job.words)))


def seen_by(visibility: str, group: str | None) -> str:
    """Who sees a campaign beside administrators."""
    return {"private": "its owner", "group": f"group {group}"}.get(visibility, "everyone")
