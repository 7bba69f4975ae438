"""`layout-tuner allocation show`, `release` and `quarantine`: what the service knows of nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from search_spaces.counting import counted
from workers.command_input import read_token
from workers.slurm.command_options import (
    certificate_option,
    json_option,
    print_table,
    refusals,
    token_file_option,
    url_option,
)

if TYPE_CHECKING:
    from workers.slurm.service import AllocationReader

_MOST_WAITING: Final = 10
"""Trials that wait: a campaign may have hundreds, and why the first ones do is what people ask."""

_CLUSTER: Final = click.option("--cluster", help="Of which cluster, where two have such a node.")


@click.command()
@click.argument("name", required=False)
@url_option
@token_file_option
@certificate_option
@json_option
def show(
    name: str | None, url: str, token_file: Path, certificate: Path | None, as_json: bool
) -> None:
    """Show what each node of the allocations does, and why trials wait.

    NAME is a job's number, a worker's name or its session; without one, every allocation that lives.
    """
    with refusals(), _reader(url, token_file, certificate) as reader:
        found = reader.allocations() if name is None else [reader.allocation(name)]
    if as_json:
        click.echo(json.dumps(found if name is None else found[0]))
        return
    if not found:
        click.echo(
            "no allocation is there; `allocation list` shows whether a job waits in the queue"
        )
    for position, allocation in enumerate(found):
        if position:
            click.echo()
        _print_allocation(allocation)


@click.command()
@click.argument("node")
@_CLUSTER
@url_option
@token_file_option
@certificate_option
@json_option
def release(
    node: str,
    cluster: str | None,
    url: str,
    token_file: Path,
    certificate: Path | None,
    as_json: bool,
) -> None:
    """Take a node out of quarantine; it is checked before its next probe."""
    with refusals(), _reader(url, token_file, certificate) as reader:
        found = reader.release(node, cluster=cluster)
    _say(found, as_json, f"{node} is released; its worker checks it before a probe runs there")


@click.command()
@click.argument("node")
@click.option("--reason", default="asked for by a user", help="Why, for others.")
@_CLUSTER
@url_option
@token_file_option
@certificate_option
@json_option
def quarantine(
    node: str,
    reason: str,
    cluster: str | None,
    url: str,
    token_file: Path,
    certificate: Path | None,
    as_json: bool,
) -> None:
    """Set a node aside: no probe starts there until it is released."""
    with refusals(), _reader(url, token_file, certificate) as reader:
        found = reader.quarantine(node, cluster=cluster, reason=reason)
    _say(found, as_json, f"{node} is in quarantine; `allocation release {node}` ends that")


def _reader(url: str, token_file: Path, certificate: Path | None) -> AllocationReader:
    from workers.slurm.service import AllocationReader

    return AllocationReader(url, read_token(token_file), certificate=certificate)


def _say(found: Mapping[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(found) if as_json else sentence)


def _print_allocation(allocation: Mapping[str, Any]) -> None:
    job = f"job {allocation['job_id']}, " if allocation["job_id"] else ""
    left = allocation["seconds_left"]
    ends = "" if left is None else f", {_span(left)} left"
    launcher = f", launcher {allocation['launcher']}" if allocation["launcher"] else ""
    click.echo(
        f"{allocation['name']} ({job}{counted(allocation['num_nodes'], 'node')} of "
        f"{counted(allocation['devices_per_node'], 'device')} of {allocation['cluster']}{launcher}): {allocation['state']}{ends}"
    )
    if allocation["nodes"]:
        print_table(
            ("node", "state", ">free", "doing, or why not"),
            [_node(node) for node in allocation["nodes"]],
            indent="  ",
        )
    _print_trials("runs", allocation["running"], _progress)
    _print_trials("waits here", allocation["waiting"], lambda trial: trial["waiting_because"])
    _print_trials("not leased", allocation["not_leased"], lambda trial: trial["reason"])
    cost = allocation["cost"]
    parts = ", ".join(
        f"{cost[part] / 3600:.3g} {part}" for part in ("iterations", "start", "idle", "lost")
    )
    click.echo(f"  node-hours: {cost['total'] / 3600:.3g} ({parts})")


def _node(node: Mapping[str, Any]) -> tuple[str, str, str, str]:
    free = "-" if node["free_devices"] is None else f"{node['free_devices']}/{node['num_devices']}"
    return _line(node["name"]), node["state"], free, _line(node["reason"] or node["doing"])


def _progress(trial: Mapping[str, Any]) -> str:
    held = "" if trial["held_s"] is None else f" for {_span(trial['held_s'])}"
    return f"{trial['phase'] or 'leased'}{held}, {counted(trial['iterations_done'], 'iteration')}"


def _print_trials(
    heading: str, trials: Sequence[Mapping[str, Any]], words: Callable[[Mapping[str, Any]], str]
) -> None:
    for trial in trials[:_MOST_WAITING]:
        size = f"{counted(trial['num_devices'], 'device')} on {counted(trial['num_nodes'], 'node')}"
        click.echo(
            f"  {heading}: trial {trial['number']} of {trial['campaign']} ({size}): {_line(words(trial))}"
        )
    if len(trials) > _MOST_WAITING:
        click.echo(f"  {heading}: {len(trials) - _MOST_WAITING} more")


def _line(text: str) -> str:
    """A worker's words on one line of a terminal: a failure's message may have several, and escapes."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _span(seconds: float) -> str:
    """A time span as people write it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
