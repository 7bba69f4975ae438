"""The first page of a report: the state of the campaign, its result, and the winner."""

from __future__ import annotations

from collections.abc import Iterator

from api.report.facts import ReportFacts
from api.report.markup import Content, Markup, join, note, pairs, section, table, tag
from api.report.plots import PlotPart, bar, stacked
from api.service.findings import bounds, lead, peak_words, short_layout
from api.service.formatting import (
    duration,
    figure,
    machine,
    memory,
    moment,
    objective_figure,
    percent,
    state_words,
    unit,
)
from results_db.campaigns.imports import IMPORTED
from results_db.leaderboard.ranked_layout import RankedLayout
from results_db.records import MeasurementRecord
from search_spaces.spec.layout import KNOBS, Layout


def header(facts: ReportFacts) -> Markup:
    """The campaign's name, state, model and cluster."""
    campaign = facts.campaign
    state = state_words(campaign.state, campaign.reason)
    cluster = campaign.spec["cluster"]
    size = machine(cluster["num_nodes"], cluster["devices_per_node"], cluster.get("device"))
    return tag(
        "header",
        tag("h1", campaign.name),
        tag("span", state, class_=f"state {campaign.state.lower()}"),
        tag(
            "p",
            f"{campaign.model_name} on {campaign.cluster_name} ({size}), by {campaign.objective}",
            class_="subject",
        ),
    )


def summary(facts: ReportFacts) -> Markup:
    """The result, in sentences and in a few figures."""
    return tag(
        "section",
        tag("p", join(*_lead(facts)), class_="lead"),
        tag("div", *_cards(facts), class_="cards"),
        *_remarks(facts),
    )


def _lead(facts: ReportFacts) -> Iterator[Content]:
    for words, is_strong in lead(facts.finding):
        yield tag("b", words) if is_strong else words


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
    """The winner: its knobs, its measurements, and the layouts that are tied with it."""
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


def _knobs(best: RankedLayout) -> Iterator[tuple[str, Content]]:
    layout = best.trial.layout
    for knob in KNOBS.values():
        is_default = getattr(layout, knob.name) == knob.default
        if knob.is_shown and not (knob.is_count and not knob.heading and is_default):
            yield knob.label, _knob_text(layout, knob.name)
        if knob.name == "num_microbatches":
            yield "global batch", str(layout.global_batch_size)


def _knob_text(layout: Layout, name: str) -> str:
    chosen = getattr(layout, name)
    if name == "num_nodes":
        return f"{chosen} ({layout.num_devices} devices)"
    if name == "zero_stage" and layout.zero_replicas > 1:
        return f"{chosen}, {layout.zero_replicas} copies"
    return ("yes" if chosen else "no") if isinstance(chosen, bool) else str(chosen)


def _figures(
    facts: ReportFacts, best: RankedLayout, measured: MeasurementRecord
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
    yield "MFU, HFU", f"{percent(measured.mfu, speedup)}, {percent(measured.hfu, speedup)}"
    yield "model TFLOP/s a device", figure(measured.model_tflops_per_device * speedup)
    yield "peak memory a device", peak_words(best, facts.device_memory_bytes)
    yield "trial", f"{best.trial.number} (id {best.trial.id})"
    yield "measured", moment(best.trial.ended_at)


def _step(best: RankedLayout, measured: MeasurementRecord) -> Iterator[Markup]:
    """The time breakdown of the winner's step."""
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
        PlotPart(name=name, size=seconds, says=f"{seconds / measured.step_time_s:.1%}")
        for name, seconds in named
    ]
    yield stacked([part for part in shares if part.size > 0])


def _stages(facts: ReportFacts, measured: MeasurementRecord) -> Iterator[Markup]:
    """The peak memory of each pipeline stage."""
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
            str(ranked.trial.number),
            short_layout(ranked.trial.layout),
            objective_figure(objective, ranked.value),
            bounds(objective, ranked).removesuffix(" (95 %)"),
            peak_words(ranked, facts.device_memory_bytes),
        )
        for ranked in tied
    ]
    return join(
        tag("h3", "As good as the winner"),
        note(
            "These cannot be told apart from it with 95 % confidence: choose among them by memory, by "
            "nodes, or by what is simplest to run."
        ),
        table((">trial", "layout", f">{unit(objective)}", "95 % interval", "peak memory"), rows),
    )
