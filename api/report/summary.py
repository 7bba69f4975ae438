"""The first page of a report: how the campaign stands, what it found, and the winner."""

from __future__ import annotations

from collections.abc import Iterator

from api.figures import duration, figure, memory, objective_figure, unit
from api.report.facts import ReportFacts
from api.report.layouts import bounds, machine, moment, peak, short, value
from api.report.markup import Content, Markup, join, tag
from api.report.plots import Part, bar, stacked
from api.report.tables import note, pairs, section, table
from results_db.imports import IMPORTED
from results_db.records import MeasurementRecord
from results_db.standing import Standing


def header(facts: ReportFacts) -> Markup:
    """The campaign's name and what it is about."""
    campaign = facts.campaign
    cluster = campaign.spec["cluster"]
    size = machine(cluster["num_nodes"], cluster["devices_per_node"], cluster.get("device"))
    ended = f" ({campaign.reason})" if campaign.reason else ""
    return tag(
        "header",
        tag("h1", campaign.name),
        tag("span", f"{campaign.state}{ended}", class_=f"state {campaign.state.lower()}"),
        tag(
            "p",
            f"{campaign.model_name} on {campaign.cluster_name} ({size}), by {campaign.objective}",
            class_="subject",
        ),
    )


def summary(facts: ReportFacts) -> Markup:
    """What it found, in sentences and in four figures."""
    return tag(
        "section",
        tag("p", join(*_lead(facts)), class_="lead"),
        tag("div", *_cards(facts), class_="cards"),
        *_remarks(facts),
    )


def _lead(facts: ReportFacts) -> Iterator[Content]:
    campaign, winner = facts.campaign, facts.winner
    if campaign.ended_at is None:
        yield f"The campaign is {campaign.state}: what follows may change. "
    if winner is None:
        yield f"No layout has been measured to the end. {campaign.message}"
        return
    yield "The best of "
    yield tag("b", f"{facts.num_ranked:,} measured layouts")
    yield " runs at "
    yield tag("b", value(campaign.objective, winner.value))
    yield f", {bounds(campaign.objective, winner)}: "
    yield tag("b", short(winner.trial.layout))
    yield ". "
    tied = len(facts.tied)
    if tied:
        yield (
            f"{tied} other{'s' if tied > 1 else ''} cannot be told apart from it with 95 % "
            "confidence; they are named below. "
        )
    elif facts.num_ranked > 1 and winner.low is not None:
        yield "All others are slower with 95 % confidence. "
    middle = facts.median_value
    if middle and facts.num_ranked > 2:
        yield f"That is {winner.value / middle:.2f} times what the median layout reached."


def _cards(facts: ReportFacts) -> Iterator[Markup]:
    campaign, winner, counts = facts.campaign, facts.winner, facts.counts
    best = "-" if winner is None else objective_figure(campaign.objective, winner.value)
    yield _card(best, f"best, {unit(campaign.objective)}")
    unhappy = counts["FAILED"] + counts["INFEASIBLE"]
    told = f"trials completed, {unhappy} without a result" if unhappy else "trials completed"
    yield _card(f"{counts['COMPLETED']:,}", told)
    yield _card(f"{facts.num_ranked:,} of {campaign.num_legal_layouts:,}", "legal layouts measured")
    if campaign.strategy != IMPORTED:
        yield _card(figure(campaign.node_seconds / 3600), "node-hours in probes")
        yield _card(duration(campaign.wall_time_s), "of search")


def _card(number: str, words: str) -> Markup:
    return tag("div", tag("b", number), tag("span", words), class_="card")


def _remarks(facts: ReportFacts) -> Iterator[Markup]:
    campaign = facts.campaign
    if campaign.notes:
        yield tag("p", campaign.notes, class_="notes")
    if campaign.ended_at is not None and campaign.message:
        yield note(f"How it ended: {campaign.message}.")
    if facts.source is not None:
        yield note(
            f"Imported, not measured here: {facts.source or 'the table does not say from where'}."
        )
    for warning in campaign.spec.get("warnings", ()):
        yield tag("p", warning, class_="warning")


def winner(facts: ReportFacts) -> Markup:
    """The winner: its knobs, what was measured of it, and who is as good."""
    best = facts.winner
    if best is None:
        return section("Winner", tag("p", "There is none yet: no layout was measured to the end."))
    measured = best.trial.measurement
    assert measured is not None  # it is ranked
    return section(
        "Winner",
        tag(
            "div",
            pairs(_knobs(best)),
            pairs(_figures(facts, best, measured)),
            class_="beside",
        ),
        *_step(best, measured),
        *_stages(facts, measured),
        _ties(facts),
    )


def _knobs(best: Standing) -> Iterator[tuple[str, Content]]:
    layout = best.trial.layout
    yield "nodes", f"{layout.num_nodes} ({layout.num_devices} devices)"
    yield "tensor parallel, tp", str(layout.tp)
    yield "pipeline parallel, pp", str(layout.pp)
    yield "data parallel, dp", str(layout.dp)
    if layout.vpp > 1:
        yield "virtual stages, vpp", str(layout.vpp)
    yield "micro-batch size", str(layout.micro_batch_size)
    yield "micro-batches a step", str(layout.num_microbatches)
    yield "global batch", str(layout.global_batch_size)
    copies = f", {layout.zero_replicas} copies" if layout.zero_replicas > 1 else ""
    yield "ZeRO stage", f"{layout.zero_stage}{copies}"
    yield "recomputation", layout.recompute
    yield "sequence parallel", "yes" if layout.sequence_parallel else "no"
    yield "precision", layout.precision


def _figures(
    facts: ReportFacts, best: Standing, measured: MeasurementRecord
) -> Iterator[tuple[str, Content]]:
    objective = facts.campaign.objective
    yield unit(objective), tag("b", objective_figure(objective, best.value))
    yield "95 % interval", bounds(objective, best).removesuffix(" (95 %)")
    low, high = best.step_time_low_s, best.step_time_high_s
    within = "" if low is None or high is None else f" ({low:.4g} to {high:.4g})"
    yield "step time", f"{best.step_time_s:.4g} s{within}"
    yield "runs", str(best.num_runs)
    speedup = measured.step_time_s / best.step_time_s
    if objective != "tokens_per_s":
        yield "tokens/s", figure(measured.tokens_per_s * speedup)
    yield "MFU, HFU", f"{_share(measured.mfu, speedup)}, {_share(measured.hfu, speedup)}"
    yield "model TFLOP/s a device", figure(measured.model_tflops_per_device * speedup)
    yield "peak memory a device", peak(best, facts.device_memory_bytes)
    yield "trial", f"{best.trial.number} (id {best.trial.id})"
    yield "measured", moment(best.trial.ended_at)


def _share(part: float | None, times: float) -> str:
    return "-" if part is None else f"{part * times:.1%}"


def _step(best: Standing, measured: MeasurementRecord) -> Iterator[Markup]:
    """Where a step of the winner goes."""
    parts = measured.breakdown
    if parts is None:
        return
    named = (
        ("compute", parts.compute_s),
        ("tensor parallel", parts.tp_s),
        ("pipeline", parts.pp_s),
        ("data parallel", parts.dp_s),
        ("optimizer", parts.optimizer_s),
        ("unexplained", max(parts.unexplained_s, 0.0)),
    )
    yield tag("h3", f"Where its step of {best.step_time_s:.4g} s goes")
    shares = [
        Part(name=name, size=seconds, says=f"{seconds / measured.step_time_s:.1%}")
        for name, seconds in named
    ]
    yield stacked([part for part in shares if part.size > 0])


def _stages(facts: ReportFacts, measured: MeasurementRecord) -> Iterator[Markup]:
    """How full the devices of each pipeline stage are."""
    whole = facts.device_memory_bytes
    stages = measured.peak_memory_bytes_by_stage
    if len(stages) < 2 or not whole:
        return
    yield tag("h3", "Peak memory by pipeline stage")
    rows = [
        (str(stage), memory(peak_bytes), f"{peak_bytes / whole:.0%}", bar(peak_bytes / whole))
        for stage, peak_bytes in enumerate(stages)
    ]
    yield table((">stage", ">peak", ">of the device", ""), rows)


def _ties(facts: ReportFacts) -> Markup:
    tied = facts.tied
    if not tied and (facts.winner is None or facts.winner.low is None):
        return note("Too little is known of its runs to say which other layouts are as good.")
    if not tied:
        return note("No other layout is as good: each is slower with 95 % confidence.")
    objective = facts.campaign.objective
    rows = [
        (
            str(standing.trial.number),
            short(standing.trial.layout),
            objective_figure(objective, standing.value),
            bounds(objective, standing).removesuffix(" (95 %)"),
            peak(standing, facts.device_memory_bytes),
        )
        for standing in tied
    ]
    return join(
        tag("h3", "As good as the winner"),
        note(
            "These cannot be told apart from it with 95 % confidence: choose among them by memory, by "
            "nodes, or by what is simplest to run."
        ),
        table((">trial", "layout", f">{unit(objective)}", "95 % interval", "peak memory"), rows),
    )
