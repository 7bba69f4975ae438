"""`layout-tuner verify`: whether the order of a leaderboard holds in another trainer."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.formatting import trainer_words, unit
from layout_tuner.api.ranked_columns import LAYOUT, cells, headings
from layout_tuner.cli.live_output import work_line
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.service.service_connection import service_options
from layout_tuner.cli.service.watching import POLL_S
from layout_tuner.client.errors import ServiceError
from layout_tuner.predictions.statistics.disturbance import MEANING
from layout_tuner.predictions.statistics.rank_agreement import (
    MeasuredValue,
    RankAgreement,
    rank_agreement,
    sampled_ranks,
)
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.terminal.console import on_interrupt
from layout_tuner.terminal.text_table import print_table
from layout_tuner.trainers.parameters import ParameterInvalidError, parameters_of

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import CampaignDetail, RankedTrial
    from layout_tuner.client.clients import Client
    from layout_tuner.search_spaces.campaigns.campaign_settings import ProbeSettings

_SPREAD: Final = ("half_interval", "runs")
_MOST: Final = 1000
"""Layouts of a leaderboard of which the sample is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """A layout of the sample in both trainers."""

    ours: RankedTrial
    theirs: RankedTrial | None
    """None: the other trainer did not measure it."""
    failure: str = ""
    """Why not."""

    @property
    def ratio(self) -> float | None:
        """The other trainer's figure over ours."""
        return None if self.theirs is None else self.theirs.value / self.ours.value


@click.command()
@click.argument("campaign")
@click.option("--trainer", required=True, help="The trainer, as the workers' owner has listed it.")
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of a parameter of the trainer; may be repeated.",
)
@click.option(
    "--runs",
    type=click.IntRange(2, 100),
    default=5,
    show_default=True,
    help="Runs of each layout in the other trainer, in turn.",
)
@click.option("--name", help="Name of the campaign that measures; default: CAMPAIGN-TRAINER.")
@json_option
@service_options
def verify(
    campaign: str,
    trainer: str,
    parameters: tuple[str, ...],
    runs: int,
    name: str | None,
    as_json: bool,
    client: Client,
) -> None:
    """Measure a sample of a leaderboard in another trainer, and compare the two orders.

    The sample is chosen before anything is measured: the top 4, and the layouts at 25, 50, 75 and
    100 % of the leaderboard. A second campaign measures it. An interrupted command goes on where it
    was when it is given again.
    """
    source = client.campaign(campaign)
    if source.simulated is not None:
        raise click.ClickException(f"campaign {campaign} is simulated: it measured nothing")
    if source.trainer == trainer:
        raise click.ClickException(f"campaign {campaign} was measured with {trainer}; name another")
    try:
        given = parameters_of(parameters)
    except ParameterInvalidError as error:
        raise click.UsageError(str(error)) from error
    probe = replace(source.stored.spec.probe, trainer=trainer, parameters=given)
    second = _second_campaign(client, source, probe, runs, name or f"{source.name}-{trainer}")
    ended = _wait(client, second.name)
    compared = _compare(client, source, ended)
    both = [(each.ours, each.theirs) for each in compared if each.theirs is not None]
    if not both:
        raise click.ClickException(
            f"campaign {ended.name} ended and measured none of the layouts; `layout-tuner campaign "
            f"show {ended.name}` says why, and --name begins another"
        )
    agreement = rank_agreement(
        [_value(ours) for ours, _ in both], [_value(theirs) for _, theirs in both]
    )
    if as_json:
        click.echo(json.dumps(_document(source, ended, compared, agreement), indent=2))
    else:
        _print(source, ended, compared, agreement)


def _second_campaign(
    client: Client, source: CampaignDetail, probe: ProbeSettings, runs: int, name: str
) -> CampaignDetail:
    """The campaign that measures the sample: the one of this name, or a new one."""
    ranked = client.leaderboard(source.name, limit=_MOST).trials
    if len(ranked) < 2:
        raise click.ClickException(
            f"campaign {source.name} has {len(ranked)} ranked layouts; an order needs two"
        )
    chosen = dict.fromkeys(ranked[rank - 1].layout for rank in sampled_ranks(len(ranked)))
    sample = [layout.to_mapping() for layout in chosen]
    changes: dict[str, Any] = {
        "name": name,
        "objective": source.objective,
        "strategy": "exhaustive",
        "budget": {},
        "layouts": sample,
        "runs": runs,
        "probe": probe.to_mapping(),
        "stop": {"early": False, "remeasure": 0},
        "baseline": None,
        "knowledge": "none",
        "start_from": [],
    }
    try:
        found = client.campaign(name)
    except ServiceError as error:
        if error.status != 404:
            raise
        return client.clone_campaign(source.name, changes)
    if found.created_by != client.whoami().owner:
        other = f"of {found.created_by}"
    else:
        spec = found.stored.spec
        # The leaderboard may have changed since the sample was taken.
        if spec.layouts and {each.key for each in spec.layouts} <= {t.layout.key for t in ranked}:
            changes["layouts"] = [each.to_mapping() for each in spec.layouts]
        wanted = CampaignSpec.from_mapping({**source.stored.spec.to_mapping(), **changes})
        differing = spec.differences(wanted)
        if not differing:
            return found
        other = f"which differs in {', '.join(differing)}"
    raise click.ClickException(
        f"there is another campaign named {name}, {other}; choose a name with --name"
    )


def _wait(client: Client, name: str) -> CampaignDetail:
    notice = (
        f"the campaign {name} goes on; give the same command again to wait for it, or end it with "
        f"`layout-tuner campaign cancel {name}`"
    )
    with on_interrupt(notice), work_line(sys.stderr) as line:
        while True:
            campaign = client.campaign(name)
            if campaign.ended_at is not None:
                return campaign
            progress = campaign.progress
            waiting = f"; {progress.waiting_reason}" if progress.waiting_reason else ""
            line.say(f"{name}: {progress.trials_ended} runs ended{waiting}")
            time.sleep(POLL_S)


def _compare(client: Client, source: CampaignDetail, second: CampaignDetail) -> list[_Compared]:
    """The layouts of the sample in both trainers, in our order."""
    sample = list(client.trials(second.name))
    keys = {trial.layout.key for trial in sample}
    page = client.leaderboard(second.name, objective=source.objective, limit=_MOST)
    theirs = {trial.layout.key: trial for trial in page.trials}
    failures = {
        trial.layout.key: f"{trial.reason}: {trial.message}" for trial in sample if trial.reason
    }
    return [
        _Compared(
            ours=ours,
            theirs=theirs.get(ours.layout.key),
            failure=failures.get(ours.layout.key, "not measured"),
        )
        for ours in client.leaderboard(source.name, limit=_MOST).trials
        if ours.layout.key in keys
    ]


def _value(trial: RankedTrial) -> MeasuredValue:
    return MeasuredValue(value=trial.value, low=trial.value_low, high=trial.value_high)


def _best_of_theirs(compared: Sequence[_Compared]) -> tuple[_Compared, float | None] | None:
    """The other trainer's best layout, and by which share it beats our first one there."""
    there = [(each.theirs.value, each) for each in compared if each.theirs is not None]
    if not there:
        return None
    value, best = max(there, key=lambda each: each[0])
    first = compared[0].theirs
    return best, None if first is None else value / first.value - 1.0


def _document(
    source: CampaignDetail,
    second: CampaignDetail,
    compared: Sequence[_Compared],
    agreement: RankAgreement,
) -> dict[str, Any]:
    best = _best_of_theirs(compared)
    return {
        "campaign": source.name,
        "trainer": source.trainer,
        "verified_by": second.trainer,
        "verification_campaign": second.name,
        "objective": source.objective,
        "kendall_tau": agreement.tau,
        "kendall_tau_low": agreement.low,
        "kendall_tau_high": agreement.high,
        "best_of_other": None if best is None else best[0].ours.layout_key,
        "best_of_other_over_our_first": None if best is None else best[1],
        "layouts": [
            {
                "rank": each.ours.rank,
                "layout": each.ours.layout.to_mapping(),
                "value": asdict(_value(each.ours)),
                "other": None if each.theirs is None else asdict(_value(each.theirs)),
                "disturbed": each.ours.disturbed,
                "other_disturbed": each.theirs is not None and each.theirs.disturbed,
                "other_runs": 0 if each.theirs is None else each.theirs.num_runs,
                "ratio": each.ratio,
                "failure": each.failure if each.theirs is None else "",
            }
            for each in compared
        ],
    }


def _print(
    source: CampaignDetail,
    second: CampaignDetail,
    compared: Sequence[_Compared],
    agreement: RankAgreement,
) -> None:
    objective = source.objective
    ours, theirs = ((f">{each.trainer}", *headings(_SPREAD)) for each in (source, second))
    columns = (*headings(("rank", *LAYOUT)), *ours, *theirs, ">ratio")
    rows = [_cells(each, objective) for each in compared]
    title = f"{source.name}, {unit(objective)} in {source.trainer} and in {second.trainer}"
    print_table(columns, rows, title, keys=1)
    if any(trial and trial.disturbed for each in compared for trial in (each.ours, each.theirs)):
        click.echo(MEANING)
    for each in compared:
        if each.theirs is None:
            click.echo(f"rank {each.ours.rank} was not measured: {each.failure}")
    measured = next((each.theirs for each in compared if each.theirs is not None), None)
    if measured is not None and measured.measurement is not None:
        click.echo(f"the other trainer: {trainer_words(measured.measurement)}")
    click.echo(_tau_words(agreement, second.stored.spec.runs))
    if (best := _best_of_theirs(compared)) is not None:
        click.echo(_best_words(*best))


def _cells(each: _Compared, objective: str) -> tuple[str, ...]:
    names = (objective, *_SPREAD)
    return (
        *cells(("rank", *LAYOUT, *names), each.ours),
        *("-" * len(names) if each.theirs is None else cells(names, each.theirs)),
        "-" if each.ratio is None else f"{each.ratio:.3f}",
    )


def _tau_words(agreement: RankAgreement, runs: int) -> str:
    if agreement.tau is None:
        return (
            "the order cannot be judged: no two layouts are told apart by both trainers; "
            f"{_runs_words(agreement, runs)}"
        )
    interval = (
        "" if agreement.low is None else f" (95 %: {agreement.low:.2f} to {agreement.high:.2f})"
    )
    return (
        f"Kendall's tau {agreement.tau:.2f}{interval} over {agreement.num_layouts} layouts; those "
        "whose 95 % intervals overlap are ties"
    )


def _runs_words(agreement: RankAgreement, runs: int) -> str:
    """How many runs of each layout it would take to judge the order."""
    if agreement.times_the_runs is None:
        return "they are equally fast, and more runs would not tell them apart"
    needed = max(math.ceil(runs * agreement.times_the_runs), runs + 1)
    return (
        f"about {needed} runs of each layout in both would tell half of the pairs apart "
        "(--runs, and `layout-tuner trial repeat` here)"
    )


def _best_words(best: _Compared, over_first: float | None) -> str:
    if over_first is None:
        return f"the other trainer's best is our rank {best.ours.rank}; it did not run our first"
    if best.ours.rank == 1:
        return "our first layout is the best of the other trainer, too"
    return (
        f"the other trainer's best is our rank {best.ours.rank}: there it is {over_first:.1%} over "
        "our first"
    )
