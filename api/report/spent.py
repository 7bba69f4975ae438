"""Sections on failures, cost, and the environment of the trials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from api.report.facts import Failure, ReportFacts
from api.report.markup import Content, Markup, note, pairs, section, table, tag
from api.report.plots import PlotPart, stacked
from api.service.findings import REASONS
from api.service.formatting import duration, figure, machine, memory, moment
from results_db.campaigns.imports import IMPORTED

_NUMBERS_SHOWN: Final = 12
_NODES_SHOWN: Final = 8


def failures(facts: ReportFacts) -> Markup:
    """Trials without a result by reason, with their nodes and the end of a log."""
    if not facts.failures:
        return section("Failures", tag("p", "No trial failed, and none ran out of memory."))
    rows = [
        (
            failure.reason,
            f"{len(failure.trials)}",
            _nodes(failure),
            _numbers(failure),
            figure(sum(trial.node_seconds for trial in failure.trials) / 3600),
            REASONS.get(failure.reason, ""),
        )
        for failure in facts.failures
    ]
    columns = ("reason", ">trials", "nodes where it began", "which", ">node-hours", "meaning")
    return section("Failures", table(columns, rows), *map(_example, facts.failures))


def _nodes(failure: Failure) -> str:
    counted = failure.nodes.most_common()
    named = [f"{node} ({times})" for node, times in counted[:_NODES_SHOWN]]
    if len(counted) > _NODES_SHOWN:
        named.append(f"{len(counted) - _NODES_SHOWN} more")
    return ", ".join(named) or "not told"


def _numbers(failure: Failure) -> str:
    numbers = [str(trial.number) for trial in failure.trials]
    if len(numbers) > _NUMBERS_SHOWN:
        more = len(numbers) - _NUMBERS_SHOWN
        return f"{', '.join(numbers[:_NUMBERS_SHOWN])} and {more} more"
    return ", ".join(numbers)


def _example(failure: Failure) -> Markup:
    """The newest trial of a failure, with its message and log."""
    trial = failure.trials[-1]
    where = f" on {trial.node}" if trial.node else ""
    return tag(
        "div",
        tag("h3", f"{failure.reason}: trial {trial.number}{where}"),
        tag("p", tag("code", trial.layout_key)),
        tag("p", trial.message) if trial.message else None,
        tag("pre", failure.log) if failure.log else None,
        class_="example",
    )


def cost(facts: ReportFacts) -> Markup:
    """Node-hours by use, and the used part of the budget."""
    campaign = facts.campaign
    if campaign.strategy == IMPORTED:
        return section("Cost", tag("p", "Nothing was spent here: the campaign is imported."))
    spent = campaign.cost
    parts = [
        PlotPart(name=use, size=seconds, says=f"{_hours(seconds)} ({seconds / spent.total:.1%})")
        for use, seconds in asdict(spent).items()
        if seconds > 0
    ]
    return section(
        "Cost",
        tag("p", f"{_hours(spent.total)} in all; {_hours(campaign.node_seconds)} held by probes."),
        stacked(parts) if parts else None,
        note(
            "Iterations: devices that iterated, warm-up included. Start: the rest of probes that count. "
            "Idle: devices held and not used, and the campaign's share of idle allocations. Lost: "
            "attempts that taught nothing."
        ),
        tag("div", pairs(_budget(facts)), pairs(_by_state(facts)), class_="beside"),
    )


def _hours(seconds: float) -> str:
    return f"{figure(seconds / 3600)} node-hours"


def _budget(facts: ReportFacts) -> Iterator[tuple[str, Content]]:
    campaign = facts.campaign
    budget = campaign.spec["budget"]
    trials = sum(facts.counts.values()) - facts.counts["CANCELLED"]
    most = budget.get("trials")
    yield "budget: trials", f"{trials:,}" + ("" if most is None else f" of {most:,}")
    hours = budget.get("node_hours")
    used = figure(campaign.node_seconds / 3600)
    yield "budget: node-hours", used + ("" if hours is None else f" of {hours:g}")
    wall = budget.get("wall_time_s")
    spent = duration(campaign.wall_time_s)
    yield "budget: wall time", spent + ("" if wall is None else f" of {duration(wall)}")
    yield "submitted", f"{moment(campaign.created_at)} by {campaign.created_by or 'somebody'}"
    yield "first probe", moment(campaign.started_at)
    yield "ended", moment(campaign.ended_at)


def _by_state(facts: ReportFacts) -> Iterator[tuple[str, Content]]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for trial in facts.ended:
        seconds[trial.state] += trial.node_seconds
    for state, count in facts.counts.items():
        if count:
            yield f"{state.lower()} trials", f"{count:,}, {_hours(seconds[state])}"
    if facts.num_known:
        yield "started from", f"{facts.num_known:,} trials of other campaigns"


def environment(facts: ReportFacts) -> Markup:
    """Machines, software, and the cluster as the campaign describes it."""
    cluster = facts.campaign.spec["cluster"]
    found: list[Content] = []
    if facts.environments:
        columns = ("host", "device", "backend", "Python", "torch", "numpy", "revision", ">trials")
        rows = [
            (
                each.host,
                each.device,
                each.backend,
                each.python_version,
                each.torch_version,
                each.numpy_version,
                each.git_revision,
                f"{times:,}",
            )
            for each, times in facts.environments
        ]
        found += [tag("h3", "What trials ran on"), table(columns, rows)]
    if facts.workers:
        found += [tag("h3", "Workers"), _workers(facts)]
    described = (
        ("cluster", cluster["name"]),
        ("size", machine(cluster["num_nodes"], cluster["devices_per_node"], cluster.get("device"))),
        ("memory a device", memory(cluster.get("device_memory_bytes"))),
        ("where its constants come from", cluster.get("source") or "not told"),
    )
    return section("Environment", *found, tag("h3", "As it was described"), pairs(described))


def _workers(facts: ReportFacts) -> Markup:
    columns = ("name", "host", "devices", "launcher", "job", "versions", ">attempts", ">lost")
    rows = [
        (
            worker.name,
            worker.host,
            machine(worker.num_nodes, worker.devices_per_node, worker.device),
            worker.launcher or "-",
            worker.job_id or "-",
            ", ".join(f"{name} {version}" for name, version in worker.versions.items()) or "-",
            str(worker.num_attempts),
            str(worker.num_lost),
        )
        for worker in facts.workers
    ]
    return table(columns, rows)
