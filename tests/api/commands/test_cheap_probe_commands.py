"""What commands print of cheap probes."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from api.client import Client
from api.commands.watching import CampaignView, progress_line
from tests.kit.api import Api, Command
from tests.kit.cheap_campaign import FEWER, FULL, ONLY_CHEAP, add_cheap_campaign

Run = Callable[..., str]


@pytest.fixture
def run(api: Api, command: Command) -> Run:
    """Runs a command on the campaign with cheap probes; returns its output."""
    add_cheap_campaign(api)

    def output(*arguments: str) -> str:
        result = command(*arguments)
        assert result.exit_code == 0, result.output
        return click.unstyle(result.stdout)

    return output


def step_of(client: Client, number: int) -> str:
    """The extrapolated step of a trial, in the words of commands."""
    step = client.trial_page("large").trials[number - 1].cheap_probe.full_step
    return f"{step.expected_s:.4g} s (95 %: {step.low_s:.4g} to {step.high_s:.4g} s)"


def test_trials_that_are_cheap_say_what_they_stand_for_and_are_not_ranked(
    run: Run, client: Client, api: Api
) -> None:
    assert (
        f"stands for    cheap probe of {FULL.key}: 8 of 64 micro-batches, 1 of 2 replicas; "
        f"extrapolated step {step_of(client, 1)}\n"
    ) in run("trial", "show", "large/1")
    assert (
        f"8 of 64 micro-batches, 2 of 4 layers; extrapolated step {step_of(client, 2)}; it says "
        "nothing of the memory\n"
    ) in run("trial", "show", "large/2")
    assert "cheap" not in run("trial", "show", "large/3")

    _, _, *rows = run("trial", "list", "large").splitlines()
    assert "8 of 64 micro-batches, 1 of 2 replicas" in rows[0]
    assert rows[0].rstrip().endswith(step_of(client, 1))
    assert "micro-batches" not in rows[2]
    api.submit()
    assert "cheap probe" not in run("trial", "list", "first")

    ranked = run("leaderboard", "large")
    assert "the best 1 of 1" in ranked
    assert "beside them: 2 cheap probes, " in ranked
    assert "not ranked" in run("campaign", "show", "large")
    assert "cheap" not in run("leaderboard", "first")
    assert "cheap" not in run("campaign", "show", "first")


def test_watching_names_the_layout_that_a_cheap_probe_stands_for(
    run: Run, client: Client, api: Api
) -> None:
    api.store.trials.add(api.store.campaigns.by_name("large").id, ONLY_CHEAP, fidelity=FEWER)
    api.lease(api.store.workers.find()[0].id)
    campaign = client.campaign("large")
    assert "3 trials done (2 cheap probes), 1 running" in progress_line(campaign)
    view = CampaignView(client, "large")
    view.update(campaign)
    lines = view.lines(campaign, 300)
    (now,) = (line for line in lines if line.startswith("now"))
    assert f"cheap probe of {ONLY_CHEAP.key}: 8 of 64 micro-batches, 1 of 2 replicas" in now
    assert "iteration 0 of 6:" in now, "two of warm-up, and four timed ones"
    (so_far,) = (line for line in lines if line.startswith("so far"))
    assert len(so_far.split()[-1]) == 1, "cheap probes are not among the best so far"
