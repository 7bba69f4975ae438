"""`layout-tuner trial`: list, show, log, repeat, requeue, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

import click

from api.client import Client
from api.commands.connection import json_option, print_json, service_options
from api.commands.display import duration, figure, layout_extras, memory, print_table, zero
from api.commands.trial_conditions import read_conditions, where_option
from api.errors import ServiceError
from api.schemas import MAX_ID, TrialDetailRead, TrialPage, TrialRead, TrialsAdded
from results_db.records import AttemptRecord
from results_db.trial_filter import TrialFilter
from results_db.trial_order import SORT_KEYS, SortKey

DEFAULT_LIMIT: Final = 50
TRIAL_HELP: Final = "TRIAL is an id, or CAMPAIGN/NUMBER as tiny/3."


@click.group()
def trial() -> None:
    """List, read, repeat and cancel trials."""


@trial.command("list", epilog="A list that was cut short says so.")
@click.argument("campaign")
@where_option
@click.option(
    "--sort",
    type=click.Choice(SORT_KEYS),
    default="number",
    metavar="KEY",
    help="A knob, a metric, number, ended_at or node_seconds.  [default: number]",
)
@click.option("--descending", is_flag=True, help="The most first; those without a value stay last.")
@click.option("--limit", type=click.IntRange(min=1), default=DEFAULT_LIMIT, show_default=True)
@json_option
@service_options
def list_trials(
    campaign: str,
    conditions: Sequence[str],
    sort: SortKey,
    descending: bool,
    limit: int,
    as_json: bool,
    client: Client,
) -> None:
    """List a campaign's trials: those that are meant, in any order."""
    wanted = read_conditions(conditions)
    walk = client.trials(campaign, wanted=wanted, sort=sort, descending=descending)
    found = list(islice(walk, limit + 1))
    shown = found[:limit]
    if as_json:
        print_json(TrialPage(trials=shown, next_cursor=None))
    else:
        columns = (
            *(">id", ">trial", "state", ">nodes", ">tp", ">pp", ">dp", ">mbs", ">acc", ">batch"),
            *(">zero", "also", ">tokens/s", ">step", ">MFU", ">memory"),
        )
        print_table(columns, [_row(each) for each in shown])
    if len(found) > limit:
        click.echo(
            f"there are more than {limit}: narrow them with --where, or raise --limit", err=True
        )


@trial.command()
@click.argument("trial")
@json_option
@service_options
def show(trial: str, as_json: bool, client: Client) -> None:
    """Show a trial: its layout, what it measured or why it did not, and its attempts."""
    found = client.trial(_trial_id(client, trial))
    if as_json:
        print_json(found)
        return
    for label, value in _facts(found):
        click.echo(f"{label:<14}{value}")


@trial.command()
@click.argument("trial")
@service_options
def log(trial: str, client: Client) -> None:
    """Print the last lines that a trial's ranks printed."""
    click.echo(client.trial_log(_trial_id(client, trial)), nl=False)


@trial.command()
@click.argument("trial")
@click.option("--times", type=click.IntRange(1, 20), default=1, show_default=True)
@json_option
@service_options
def repeat(trial: str, times: int, as_json: bool, client: Client) -> None:
    """Measure a COMPLETED trial's layout again; the leaderboard pools all of its runs."""
    added = client.repeat_trial(_trial_id(client, trial), times=times)
    _print_added(added, as_json)


@trial.command()
@click.argument("trial")
@json_option
@service_options
def requeue(trial: str, as_json: bool, client: Client) -> None:
    """Try the layout of a FAILED, INFEASIBLE or CANCELLED trial once more."""
    added = client.requeue_trial(_trial_id(client, trial))
    if as_json:
        print_json(added)
    else:
        _print_added(TrialsAdded(trials=[added]), as_json=False)


@trial.command()
@click.argument("trial")
@json_option
@service_options
def cancel(trial: str, as_json: bool, client: Client) -> None:
    """Cancel a trial: at once where it waits, through its worker where it runs."""
    cancelled = client.cancel_trial(_trial_id(client, trial))
    if as_json:
        print_json(cancelled)
    elif cancelled.state == "RUNNING":
        click.echo(
            f"trial {cancelled.id} runs; its worker is told with its next heartbeat to stop it"
        )
    else:
        click.echo(f"trial {cancelled.id} is {cancelled.state}")


for _command in (show, log, repeat, requeue, cancel):
    _command.epilog = TRIAL_HELP


def _trial_id(client: Client, trial: str) -> int:
    """The id of a trial that is named by it, or by its campaign and number."""
    campaign, slash, number = trial.rpartition("/")
    is_number = number.isascii() and number.isdigit() and len(number) <= len(str(MAX_ID))
    if not is_number or int(number) > MAX_ID or bool(slash) != bool(campaign):
        raise click.UsageError(f"{trial!r} is neither the id of a trial nor CAMPAIGN/NUMBER")
    if not slash:
        return int(number)
    page = client.trial_page(campaign, wanted=TrialFilter(numbers=(int(number),)))
    if not page.trials:
        raise ServiceError(f"campaign {campaign!r} has no trial number {int(number)}")
    return page.trials[0].id


def _print_added(added: TrialsAdded, as_json: bool) -> None:
    if as_json:
        print_json(added)
        return
    for each in added.trials:
        click.echo(f"trial {each.id} (number {each.number}) is {each.state}: {each.layout_key}")


def _row(trial: TrialRead) -> tuple[str, ...]:
    layout, measured = trial.layout, trial.measurement
    return (
        str(trial.id),
        str(trial.number),
        _state(trial),
        str(layout.num_nodes),
        str(layout.tp),
        str(layout.pp),
        str(layout.dp),
        str(layout.micro_batch_size),
        str(layout.num_microbatches),
        str(trial.global_batch_size),
        zero(layout),
        layout_extras(layout),
        "-" if measured is None else figure(measured.tokens_per_s),
        "-" if measured is None else f"{measured.step_time_s:.4g} s",
        "-" if measured is None or measured.mfu is None else f"{measured.mfu:.1%}",
        "-" if measured is None else memory(measured.peak_memory_bytes),
    )


def _state(trial: TrialRead) -> str:
    return trial.state if trial.reason is None else f"{trial.state} ({trial.reason})"


def _facts(trial: TrialDetailRead) -> list[tuple[str, str]]:
    facts = [
        ("trial", f"{trial.number} of campaign {trial.campaign_id} (id {trial.id})"),
        ("layout", trial.layout_key),
        ("state", _state(trial)),
    ]
    if trial.message:
        facts.append(("message", trial.message))
    if trial.node:
        facts.append(("node", trial.node))
    if trial.repeat_of is not None:
        facts.append(("repeats", f"trial {trial.repeat_of}"))
    measured = trial.measurement
    if measured is not None:
        facts += [
            ("step time", f"{measured.step_time_s:.4g} s"),
            ("tokens/s", figure(measured.tokens_per_s)),
            ("MFU", "-" if measured.mfu is None else f"{measured.mfu:.1%}"),
            ("peak memory", memory(measured.peak_memory_bytes)),
            ("iterations", str(len(trial.iterations))),
        ]
    facts.append(("cost", f"{trial.node_seconds:.4g} node-seconds"))
    facts += [("attempt", _attempt(attempt)) for attempt in trial.attempts]
    return facts


def _attempt(attempt: AttemptRecord) -> str:
    end = attempt.ended_at or attempt.seen_at
    lasted = duration((end - attempt.started_at).total_seconds())
    what = attempt.ending or attempt.phase or "running"
    return f"{attempt.attempt} on {attempt.worker_name} ({attempt.host}): {what}, {lasted}"
