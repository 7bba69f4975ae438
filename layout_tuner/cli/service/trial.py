"""`layout-tuner trial`: list, show, log, repeat, requeue, cancel; the option `--where`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.formatting import (
    REPEAT_WORDS,
    cheap_probe_words,
    duration,
    measured_words,
    memory,
    percent,
    state_words,
    step_words,
    trainer_words,
)
from layout_tuner.api.ranked_columns import COLUMNS, LAYOUT, cells, headings
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.options.refusals import fail
from layout_tuner.cli.service.service_connection import (
    answers,
    print_facts,
    print_json,
    service_options,
)
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.documents.numbers import read_number, read_whole
from layout_tuner.documents.reading import nearest
from layout_tuner.predictions.statistics.disturbance import MEANING
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.errors import TrialFilterInvalidError
from layout_tuner.results_db.trials.filter import (
    CHOICES,
    LISTED_FIELDS,
    SINGULAR,
    SORT_KEYS,
    TEXTS,
    SortKey,
    TrialFilter,
    is_job_key,
    job_field,
    job_knob_name,
)
from layout_tuner.terminal.console import write_bytes
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import (
        TrialDetailRead,
        TrialRead,
        TrialsAdded,
    )
    from layout_tuner.client.clients import Client
    from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
    from layout_tuner.predictions.estimates.prediction import Prediction
    from layout_tuner.results_db.records import AttemptRecord

DEFAULT_LIMIT: Final = 50
_FIGURES: Final = ("tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes")
_CHEAP_HEADINGS: Final = ("cheap probe", ">step in full")

_CONDITION: Final = re.compile(r"\s*([a-z_]+|job\.[a-z0-9_]+)\s*(=|>=|<=)\s*(.*?)\s*")
_PLURAL: Final = {singular: name for name, singular in SINGULAR.items()}
_LISTED: Final = tuple(SINGULAR.get(name, name) for name in LISTED_FIELDS)
_BOUNDS: Final = {">=": "min", "<=": "max"}


class SortKeyChoice(click.Choice[str]):
    """A sort key of a list, or `job.` and the name of a job knob."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_job_key(value) else super().convert(value, param, ctx)


where_option = click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Only trials with a knob at a value (tp=2, or tp=1,2 for either; job.compile=true for a knob of the "
    "trainer), in a state (state=FAILED), with a metric or number within a bound (mfu>=0.3, "
    "peak_memory_bytes<=8e9, job.bucket_elements>=4096); may be repeated: all must hold.",
)

TRIAL_HELP: Final = "TRIAL is an id, or CAMPAIGN/NUMBER as tiny/3."


@click.command("list", epilog="A list that was cut short says so.")
@click.argument("campaign")
@where_option
@click.option(
    "--sort",
    type=SortKeyChoice(SORT_KEYS),
    default="number",
    metavar="KEY",
    help="A knob, a metric, job.NAME, number, ended_at or node_seconds.  [default: number]",
)
@click.option(
    "--descending", is_flag=True, help="The largest first; trials without a value stay last."
)
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
    """List a campaign's trials: all, or those that match, sorted by any key."""
    wanted = read_conditions(conditions)
    walk = client.trials(campaign, wanted=wanted, sort=sort, descending=descending)
    found = list(islice(walk, limit + 1))
    shown = found[:limit]
    if as_json:
        from layout_tuner.api.schemas.campaigns_and_trials import TrialPage

        page = TrialPage(
            trials=shown,
            next_cursor=None,
            previous_cursor=None,
            total=len(shown),
            is_total_exact=len(found) <= limit,
        )
        print_json(page)
    else:
        has_baseline = any(each.is_baseline for each in shown)
        has_cheap = any(each.cheap_probe for each in shown)
        columns = (
            *(">id", ">trial", "state"),
            *(("baseline",) if has_baseline else ()),
            *headings((*LAYOUT, *_FIGURES)),
            *(_CHEAP_HEADINGS if has_cheap else ()),
        )
        rows = [_row(each, has_baseline=has_baseline, has_cheap=has_cheap) for each in shown]
        print_table(columns, rows, keys=2)
        if any(each.measurement and each.measurement.is_disturbed for each in shown):
            click.echo(MEANING)
        if any(each.simulated for each in shown):
            click.echo("all of them are simulated, not measured")
    if len(found) > limit:
        click.echo(
            f"there are more than {limit}: narrow them with --where, or raise --limit", err=True
        )


@click.command()
@click.argument("trial")
@answers(lambda trial: print_facts(_facts(trial)))
@service_options
def show(trial: str, client: Client) -> TrialDetailRead:
    """Show a trial: its layout, what it measured or why it did not, and its attempts."""
    return client.trial(_trial_id(client, trial))


@click.command()
@click.argument("trial")
@click.option("--raw", is_flag=True, help="Print the bytes as they are, control characters too.")
@service_options
def log(trial: str, raw: bool, client: Client) -> None:
    """Print the last lines that a trial's ranks printed; control characters are spelled out."""
    printed = client.trial_log(_trial_id(client, trial))
    if raw:
        write_bytes(printed.encode("utf-8", "surrogatepass"))
    else:
        click.echo(printed, nl=False)


@click.command()
@click.argument("trial")
@click.option("--times", type=click.IntRange(1, 20), default=1, show_default=True)
@answers(lambda added: _print_added(added.trials))
@service_options
def repeat(trial: str, times: int, client: Client) -> TrialsAdded:
    """Measure a COMPLETED trial's layout again; the leaderboard pools all of its runs."""
    return client.repeat_trial(_trial_id(client, trial), times=times)


@click.command()
@click.argument("trial")
@answers(lambda added: _print_added([added]))
@service_options
def requeue(trial: str, client: Client) -> TrialRead:
    """Try the layout of a FAILED, INFEASIBLE or CANCELLED trial once more."""
    return client.requeue_trial(_trial_id(client, trial))


@click.command()
@click.argument("trial")
@json_option
@service_options
def cancel(trial: str, as_json: bool, client: Client) -> None:
    """Cancel a trial: at once where it waits, through its worker where it runs."""
    cancelled = client.cancel_trial(_trial_id(client, trial))
    if as_json:
        print_json(cancelled)
    elif cancelled.state == "RUNNING":
        click.echo(f"{_named(trial, cancelled)} runs; its worker stops it after the next heartbeat")
    else:
        click.echo(f"{_named(trial, cancelled)} is {cancelled.state}")


for _command in (show, log, repeat, requeue, cancel):
    _command.epilog = TRIAL_HELP


def read_conditions(conditions: Sequence[str]) -> TrialFilter:
    """The filter of all conditions.

    Raises:
        click.UsageError: a condition is malformed, or they contradict each other.
    """
    stated: dict[str, Any] = {}
    try:
        for condition in conditions:
            name, value = _read(condition)
            if name in stated:
                raise click.UsageError(f"--where {condition!r}: {name} is stated twice")
            stated[name] = value
        return TrialFilter(**stated)
    except TrialFilterInvalidError as error:
        raise click.UsageError(f"--where: {error}") from error


def _read(condition: str) -> tuple[str, Any]:
    parts = _CONDITION.fullmatch(condition)
    if parts is None:
        raise click.UsageError(
            f"--where {condition!r} is not NAME=VALUE, NAME>=NUMBER or NAME<=NUMBER"
        )
    name, sign, text = parts.groups()
    if job_knob_name(name):
        field = name if sign == "=" else f"{_BOUNDS[sign]}_{name}"
        return field, job_field(field, [each.strip() for each in text.split(",")])
    known: Sequence[str] = _LISTED if sign == "=" else tuple(METRICS)
    if name not in known:
        raise click.UsageError(
            f"--where {condition!r}: {name!r} does not go with {sign}{nearest(name, known)}"
        )
    if sign == "=":
        field = _PLURAL.get(name, name)
        return field, tuple(_value(field, each.strip(), condition) for each in text.split(","))
    try:
        value = read_number(text)
    except ValueError as error:
        raise click.UsageError(f"--where {condition!r}: {text!r} is not a number") from error
    # 8e9 is accepted as a whole number of bytes.
    is_whole = METRICS[name].is_whole and value.is_integer()
    return f"{_BOUNDS[sign]}_{name}", int(value) if is_whole else value


def _value(field: str, text: str, condition: str) -> Any:
    if CHOICES.get(field) == (False, True):
        words = {"true": True, "false": False}
        if text.lower() in words:
            return words[text.lower()]
        raise click.UsageError(f"--where {condition!r}: {text!r} is not true or false")
    if field in CHOICES or field in TEXTS:
        return text
    try:
        return read_whole(text)
    except ValueError as error:
        raise click.UsageError(f"--where {condition!r}: {text!r} is not a whole number") from error


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
        fail(f"campaign {campaign!r} has no trial number {int(number)}")
    return page.trials[0].id


def _named(asked: str, trial: TrialRead) -> str:
    """A trial as the user named it, and in the other way."""
    if "/" in asked:
        return f"trial {asked} (id {trial.id})"
    return f"trial {trial.id} (number {trial.number} of campaign {trial.campaign_id})"


def _print_added(added: Sequence[TrialRead]) -> None:
    for each in added:
        click.echo(f"trial {each.id} (number {each.number}) is {each.state}: {each.layout_key}")


def _row(trial: TrialRead, *, has_baseline: bool, has_cheap: bool) -> tuple[str, ...]:
    measured = trial.measurement
    disturbed = ", disturbed" if measured is not None and measured.is_disturbed else ""
    return (
        str(trial.id),
        str(trial.number),
        state_words(trial.state, trial.reason) + disturbed,
        *(("*" if trial.is_baseline else "",) if has_baseline else ()),
        *cells((*LAYOUT, *_FIGURES), trial),
        *(_cheap_cells(trial.cheap_probe) if has_cheap else ()),
    )


def _cheap_cells(probe: CheapProbe | None) -> tuple[str, str]:
    if probe is None:
        return "", ""
    return probe.runs, "-" if probe.full_step is None else step_words(probe.full_step)


def _facts(trial: TrialDetailRead) -> Iterator[tuple[str, str]]:
    yield "trial", f"{trial.number} of campaign {trial.campaign_id} (id {trial.id})"
    yield "layout", f"{trial.layout_key}{', the baseline' if trial.is_baseline else ''}"
    yield "state", state_words(trial.state, trial.reason)
    if trial.simulated:
        yield "", "simulated, not measured"
    if trial.cheap_probe is not None:
        yield "stands for", cheap_probe_words(trial.cheap_probe)
    if trial.message:
        yield "message", trial.message
    if trial.node:
        yield "node", trial.node
    if trial.repeat_of is not None:
        why = REPEAT_WORDS[trial.repeat_reason] if trial.repeat_reason else "not stated"
        yield "repeats", f"trial {trial.repeat_of}, because {why}"
    measured = trial.measurement
    if measured is not None:
        yield from ((COLUMNS[name].label, COLUMNS[name].cell(trial)) for name in _FIGURES)
        yield "iterations", str(len(trial.iterations))
        yield from measured_words(measured)
        if words := trainer_words(measured):
            yield "trainer", words
    if trial.prediction is not None:
        yield "predicted", _predicted(trial.prediction)
    yield "cost", f"{trial.node_seconds:.4g} node-seconds"
    yield from (("attempt", _attempt(attempt, trial.simulated)) for attempt in trial.attempts)


def _predicted(prediction: Prediction) -> str:
    """The prediction at the time of the proposal; the spread is one standard deviation."""
    spread = percent(math.expm1(prediction.log_step_time_sd))
    source = "" if prediction.source == "calibrated" else ", by estimates alone"
    return (
        f"{prediction.step_time_s:.4g} s (±{spread}), {memory(prediction.peak_memory_bytes)}, "
        f"fits with {prediction.fit_probability:.1%}{source}"
    )


def _attempt(attempt: AttemptRecord, is_simulated: bool) -> str:
    end = attempt.ended_at or attempt.seen_at
    lasted = duration((end - attempt.started_at).total_seconds())
    if is_simulated:
        lasted = f"{duration(attempt.held_s)} of simulated time"
    what = attempt.ending or attempt.phase or "running"
    return f"{attempt.attempt} on {attempt.worker_name} ({attempt.host}): {what}, {lasted}"
