"""Follows a campaign: redraws facts in place in a terminal, or writes a line for each change."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from threading import Event
from typing import TYPE_CHECKING, Final

import click

from layout_tuner.api.formatting import cheap_probe_words, duration, used_words
from layout_tuner.cli.live_output import LiveBlock, sparkline
from layout_tuner.cli.service.service_connection import best_words, service_when_called
from layout_tuner.client.errors import ServiceError
from layout_tuner.results_db.trials.filter import TrialFilter
from layout_tuner.search_spaces.objectives import measured_objective
from layout_tuner.terminal.console import escaped_line, on_interrupt, terminal_width
from layout_tuner.terminal.plurals import counted
from layout_tuner.timing_mark import wait_while_timing

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import CampaignDetail, TrialRead
    from layout_tuner.client.clients import Client
    from layout_tuner.protocol.states import TrialState

POLL_S: Final = 0.5
ANSWERS_WITHIN_S: Final = 10.0
"""Longest silence of the service before `watch` says that it does not answer."""

MAX_READ: Final = 2000
"""Most ended trials that are read at once, for the reasons of failures and the best so far."""

_FAILED: Final[tuple[TrialState, ...]] = ("FAILED", "INFEASIBLE")
_MEASURED: Final[tuple[TrialState, ...]] = ("COMPLETED",)
_LABEL: Final = 9
"""Columns of a label, with the space after it."""
_MAX_ROWS: Final = 3
"""Most rows of one fact; the last is cut."""
_MOST_BARS: Final = 120


@click.command()
@click.argument("name")
@service_when_called
def watch(name: str, service: Callable[..., Client]) -> None:
    """Follow a campaign until it ends: current and best layout, failures, cost, time left.

    While the service does not answer, it says so, and goes on when the service is back.

    Exit code 0 when it completed, 1 when it failed or was cancelled, 130 when watching was
    interrupted.
    """
    ended = _Watch(service(once_within_s=ANSWERS_WITHIN_S), name).until_the_end()
    if ended.state != "COMPLETED":
        raise click.exceptions.Exit(1)


class _Watch:
    """Shows a campaign: redraws facts in a terminal; in a file, a line for each change."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self._view = CampaignView(client, name)
        is_terminal = terminal_width(sys.stdout) is not None
        self._block = LiveBlock(sys.stdout) if is_terminal else None
        self._silence = ""
        """Why the service does not answer; empty: it answers."""
        self._last: object = None

    def until_the_end(self) -> CampaignDetail:
        """Shows progress until the campaign ends; returns it as it ended."""
        with on_interrupt(self._interrupted):
            try:
                ended = self._follow()
            finally:
                if self._block is not None:
                    self._block.clear()
            for line in [] if self._block is None else self._lines(ended):
                click.echo(line)
            return ended

    def _follow(self) -> CampaignDetail:
        while True:
            try:
                campaign = self._client.campaign(self._name)
                self._show(campaign)
            except ServiceError as error:
                is_away = error.status is None or error.status >= 500
                # A service that never answered may be at another address.
                if self._last is None or not is_away:
                    raise
                self._silence = str(error)
                line = f"{self._name}: {error}; watching goes on when it is back"
                width = (terminal_width(sys.stdout) or 80) - 1
                self._write(
                    "silence", [line] if self._block is None else textwrap.wrap(line, width)
                )
            else:
                self._silence = ""
                if campaign.ended_at is not None:
                    return campaign
            time.sleep(POLL_S)
            # The service would answer on the cores of ranks that are timed, where they are here.
            wait_while_timing(Event().wait)

    def _show(self, campaign: CampaignDetail) -> None:
        if self._block is None:
            progress = campaign.progress
            now = (campaign.state, progress.trials_ended, progress.best, progress.waiting_reason)
            self._write(now, [progress_line(campaign)])
        else:
            self._view.update(campaign)
            self._write(campaign, self._lines(campaign))

    def _write(self, now: object, lines: Sequence[str]) -> None:
        """Redraws the block with these lines; in a file, appends them if something has changed."""
        if self._block is not None:
            self._block.show(lines)
        elif now != self._last:
            click.echo("\n".join(lines))
        self._last = now

    def _lines(self, campaign: CampaignDetail) -> list[str]:
        # Read each time: the terminal may have been resized.
        width = terminal_width(sys.stdout) or 80
        return self._view.lines(campaign, width - 1, encoding=sys.stdout.encoding)

    def _interrupted(self) -> str:
        again = f"`layout-tuner campaign watch {self._name}` follows it again"
        if self._silence:
            return f"watching has ended; {self._silence}; when it is back, {again}"
        return (
            f"watching has ended; campaign {self._name} goes on: {again}, "
            f"`layout-tuner campaign cancel {self._name}` ends it"
        )


def progress_line(campaign: CampaignDetail, *, with_best: bool = True) -> str:
    """The state, ended trials, the best so far and the time left, in one line."""
    progress = campaign.progress
    of = "" if progress.trials_planned is None else f" of {progress.trials_planned}"
    parts = [f"{campaign.name}: {campaign.state}", f"{progress.trials_ended}{of} trials done"]
    if campaign.simulated is not None:
        parts[0] += ", simulated"
    if campaign.cheap_probes:
        parts[-1] += f" ({counted(campaign.cheap_probes, 'cheap probe')})"
    if progress.trials["RUNNING"]:
        parts.append(f"{progress.trials['RUNNING']} running")
    if with_best and progress.best is not None:
        parts.append(f"best {best_words(campaign)}")
    if campaign.ended_at is not None:
        parts.append(f"ended: {campaign.message or campaign.reason}")
    elif progress.waiting_reason:
        parts.append(f"waiting: {progress.waiting_reason}")
    elif progress.seconds_left is not None:
        parts.append(f"about {duration(progress.seconds_left)} left")
    return escaped_line(", ".join(parts))


class CampaignView:
    """What is shown of a campaign in a terminal; it reads only what has changed."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._running: Sequence[TrialRead] = ()
        self._ended: dict[tuple[TrialState, ...], list[TrialRead]] = {_FAILED: [], _MEASURED: []}
        """The newest trials, in the order in which they ended."""
        self._counts: Mapping[TrialState, int] = {}

    def update(self, campaign: CampaignDetail) -> None:
        """Reads running trials, and trials that have ended where their number has changed."""
        counts = campaign.progress.trials
        running = TrialFilter(states=("RUNNING",))
        self._running = ()
        if counts["RUNNING"]:
            self._running = self._client.trial_page(self._name, wanted=running, limit=1).trials
        for states in self._ended:
            if any(counts[state] != self._counts.get(state, 0) for state in states):
                wanted = TrialFilter(states=states)
                newest = self._client.trials(
                    self._name, wanted=wanted, sort="ended_at", descending=True
                )
                self._ended[states] = list(islice(newest, MAX_READ))[::-1]
        self._counts = counts

    def lines(
        self, campaign: CampaignDetail, width: int, *, encoding: str | None = "utf-8"
    ) -> list[str]:
        rows = textwrap.wrap(
            progress_line(campaign, with_best=False), max(width, 1), max_lines=4, placeholder="…"
        )
        for label, text in self._facts(campaign):
            rows += _fact(label, text, width)
            if label == "best" and (best := self._best_so_far(campaign)):
                bars = sparkline(best, min(max(width - _LABEL, 1), _MOST_BARS), encoding=encoding)
                rows.append(f"{'so far':<{_LABEL}}{bars}")
        return rows

    def _facts(self, campaign: CampaignDetail) -> Iterator[tuple[str, str]]:
        progress = campaign.progress
        if progress.best is not None:
            which = f"trial {progress.best_trial}: {progress.best_layout}"
            yield "best", f"{best_words(campaign)}, {which}"
        for trial in self._running:
            more = progress.trials["RUNNING"] - 1
            others = f"; {more} more" if more > 0 else ""
            done = f"iteration {trial.iterations_done}{_planned(campaign, trial)}"
            probe = trial.cheap_probe
            what = trial.layout_key if probe is None else cheap_probe_words(probe)
            yield "now", f"trial {trial.number}, {done}{others}: {what}"
        if failed := progress.trials["FAILED"] + progress.trials["INFEASIBLE"]:
            yield "failed", f"{failed}: {self._reasons(failed)}"
        yield "used", used_words(campaign.node_seconds, campaign.stored.budget)

    def _reasons(self, failed: int) -> str:
        """How often each reason occurred, the most frequent first."""
        found = [trial.reason or "failed" for trial in self._ended[_FAILED]]
        counts = Counter(found).most_common()
        words = ", ".join(f"{count} {reason}" for reason, count in counts)
        return words if failed <= MAX_READ else f"{words} (of the newest {MAX_READ})"

    def _best_so_far(self, campaign: CampaignDetail) -> list[float]:
        """The best value after each completed trial; values that do not count are left out."""
        best = campaign.progress.best
        if best is None:
            return []
        values = (_value(campaign, trial) for trial in self._ended[_MEASURED])
        return list(accumulate((v for v in values if v is not None and v <= best), max))


def _value(campaign: CampaignDetail, trial: TrialRead) -> float | None:
    """The objective of a trial; None: it has none, or does not count."""
    measured = trial.measurement
    if measured is None or measured.oversubscribed or measured.shortened or trial.cheap_probe:
        return None
    return measured_objective(
        campaign.objective,
        measured,
        num_nodes=trial.layout.num_nodes,
        device_memory_bytes=campaign.stored.device_memory_bytes,
    )


def _planned(campaign: CampaignDetail, trial: TrialRead) -> str:
    """The number of iterations; warm-up may take more of them than were asked for."""
    from layout_tuner.search_spaces.campaigns.fidelity import cheap_iterations  # imports numpy

    probe = campaign.stored.probe
    if probe is None:
        return ""
    iterations = probe.iterations
    planned = probe.warmup + (
        iterations if trial.cheap_probe is None else cheap_iterations(iterations)
    )
    return f" of {max(planned, trial.iterations_done)}"


def _fact(label: str, text: str, width: int) -> list[str]:
    """A fact with its label, in at most `_MAX_ROWS` rows."""
    wrapped = textwrap.wrap(
        escaped_line(text), max(width - _LABEL, 1), max_lines=_MAX_ROWS, placeholder="…"
    )
    labels = [label, *[""] * len(wrapped)]
    return [f"{label:<{_LABEL}}{row}" for label, row in zip(labels, wrapped, strict=False)]
