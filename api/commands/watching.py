"""Follows a campaign in the terminal: one line that changes, or plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from api.client import Client
from api.commands.display import duration, figure, unit
from api.errors import ServiceError
from api.schemas import CampaignDetail

POLL_S: Final = 0.5
PATIENCE_S: Final = 60.0
"""How long the service may be away (it is being started again) before watching is given up."""


def watch_campaign(client: Client, name: str) -> CampaignDetail:
    """Shows progress until the campaign ends; returns it as it ended."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return _follow(client, name, _print_changes())
    with console.status("") as status:
        ended = _follow(client, name, lambda campaign: status.update(Text(progress_line(campaign))))
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
    """Prints a line when a trial has ended or something else happened, not when time passed."""
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
    """Trials done, best so far, time left, in one line."""
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
    return ", ".join(parts)
