"""What `campaign watch` reads of a campaign, and how it says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from api.client import Client
from api.commands.watching import CampaignView
from api.settings import Settings
from results_db.store import Store
from search_spaces.protocol.outcome import Outcome
from search_spaces.protocol.worker_messages import BeatBody
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, TOKEN
from tests.kit.live import live_service
from tests.kit.postgres import upgraded
from tests.kit.store import (
    TimelyStore,
    completed,
    failed,
    lease_one,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(TimelyStore.open(upgraded(tmp_path / "data"))) as store:
        yield store


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    with (
        live_service(Settings(token=TOKEN), store) as url,
        Client(url.removesuffix("/v1"), TOKEN) as client,
    ):
        client.create_campaign({**CAMPAIGN, "name": "watched", "budget": {"node_hours": 2}})
        yield client


def add_ended(store: Store, end: Outcome | float, number: int) -> None:
    """Ends the next trial with an outcome, or measures so many tokens a second."""
    store.trials.add(store.campaigns.by_name("watched").id, Layout(num_microbatches=number))
    lease = lease_one(store, store.workers.find()[0].id)
    outcome = end if isinstance(end, Outcome) else completed(lease.layout, tokens_per_s=end)
    post_outcome(store, lease.trial_id, lease.attempt, outcome)


def lines_of(view: CampaignView, client: Client, width: int = 120) -> list[str]:
    campaign = client.campaign("watched")
    view.update(campaign)
    return view.lines(campaign, width)


def test_a_view_grows_with_its_campaign(store: Store, client: Client) -> None:
    view = CampaignView(client, "watched")
    assert lines_of(view, client)[1:] == ["used     0 of 2 node-hours, 2 left"]
    make_worker(store)
    for number, rate in enumerate((100.0, 300.0, 200.0, 500.0), start=1):
        add_ended(store, rate, number)
    add_ended(store, failed(), 5)
    lines = lines_of(view, client)
    assert "best     500 tokens/s, trial 4: n1-tp1-pp1-dp1" in lines[1]
    assert lines[2] == "so far   ▁▅▅█"
    assert lines[3] == "failed   1: 1 crashed"
    add_ended(store, failed("out_of_memory"), 6)
    add_ended(store, failed(), 7)
    add_ended(store, 900.0, 8)
    lines = lines_of(view, client)
    assert lines[2] == "so far   ▁▃▃▅█"
    assert lines[3] == "failed   3: 2 crashed, 1 out_of_memory"
    assert lines[4].startswith("used     0.0")
    assert lines[4].endswith("left")


def test_the_running_trial_is_shown_with_its_iterations(store: Store, client: Client) -> None:
    campaign = store.campaigns.by_name("watched")
    for number in (1, 2):
        store.trials.add(campaign.id, Layout(num_microbatches=number))
    worker = make_worker(store).id
    leases = take_leases(store, worker, 2)
    beat = [BeatBody(trial_id=each.trial_id, attempt=1, iterations_done=3) for each in leases]
    send_beats(store, worker, beat)
    probe = campaign.spec["probe"]
    planned = probe["warmup"] + probe["iterations"]
    view = CampaignView(client, "watched")
    assert (
        f"now      trial 1, iteration 3 of {planned}; 1 more: "
        "n1-tp1-pp1-dp1-vpp1-mbs1-mb1-z0-rc_none-sp0-fp32"
    ) in lines_of(view, client)


@pytest.mark.parametrize("width", [19, 40, 299])
def test_no_line_is_wider_than_the_terminal(store: Store, client: Client, width: int) -> None:
    make_worker(store)
    for number in range(1, 200):
        store.trials.add(store.campaigns.by_name("watched").id, Layout(num_microbatches=number))
    add_ended(store, 1000.0, 200)
    add_ended(store, failed(), 201)
    lines = lines_of(CampaignView(client, "watched"), client, width)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= 23
