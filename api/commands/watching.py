"""Follows a campaign: one line that is updated in a terminal, or a line per change in a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import click

from api.client import Client
from api.errors import ServiceError
from api.schemas.campaigns_and_trials import CampaignDetail
from api.service.formatting import duration, figure, unit
from search_spaces.terminal.console import LiveLine, escaped_line, on_interrupt, terminal_width

POLL_S: Final = 0.5
PATIENCE_S: Final = 60.0
"""How long the service may be away, for example during a restart, before watching ends."""


def watch_campaign(client: Client, name: str) -> CampaignDetail:
    """Shows progress until the campaign ends; returns it as it ended."""
    with on_interrupt(
        f"watching has ended; campaign {name} goes on: `layout-tuner campaign watch {name}` "
        f"follows it again, `layout-tuner campaign cancel {name}` ends it"
    ):
        if terminal_width(sys.stdout) is None:
            return _follow(client, name, _print_changes())
        line = LiveLine(sys.stdout)
        try:
            ended = _follow(client, name, lambda campaign: line.show(progress_line(campaign)))
        finally:
            line.clear()
        click.echo(progress_line(ended))
        return ended


def _follow(client: Client, name: str, show: Callable[[CampaignDetail], None]) -> CampaignDetail:
    while True:
        campaign = _read_patiently(client, name)
        show(campaign)
        if campaign.ended_at is not None:
            return campaign
        time.sleep(POLL_S)


def _read_patiently(client: Client, name: str) -> CampaignDetail:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.campaign(name)
        except ServiceError as error:
            is_away = error.status is None or error.status >= 500
            if not is_away or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def _print_changes() -> Callable[[CampaignDetail], None]:
    """Prints a line when a trial has ended or the state has changed."""
    last: object = None

    def show(campaign: CampaignDetail) -> None:
        nonlocal last
        progress = campaign.progress
        now = (campaign.state, progress.trials_ended, progress.best, progress.waiting_reason)
        if now != last:
            last = now
            click.echo(progress_line(campaign))

    return show


def progress_line(campaign: CampaignDetail) -> str:
    """The state, ended trials, the best so far and the time left, in one line."""
    progress = campaign.progress
    of = "" if progress.trials_planned is None else f" of {progress.trials_planned}"
    parts = [f"{campaign.name}: {campaign.state}", f"{progress.trials_ended}{of} trials done"]
    if progress.trials["RUNNING"]:
        parts.append(f"{progress.trials['RUNNING']} running")
    if progress.best is not None:
        parts.append(f"best {figure(progress.best)} {unit(campaign.objective)}")
    if campaign.ended_at is not None:
        parts.append(f"ended: {campaign.message or campaign.reason}")
    elif progress.waiting_reason:
        parts.append(f"waiting: {progress.waiting_reason}")
    elif progress.seconds_left is not None:
        parts.append(f"about {duration(progress.seconds_left)} left")
    return escaped_line(", ".join(parts))
