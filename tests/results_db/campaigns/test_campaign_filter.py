"""What lists of campaigns show, and by what they are found."""

from __future__ import annotations

from datetime import timedelta

import pytest

from results_db.actor import Actor
from results_db.campaigns.filter import CampaignFilter
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import START, TurnableClock, make_campaign, make_spec


@pytest.fixture
def names(store: Store, clock: TurnableClock) -> Store:
    """Four campaigns, a minute apart."""
    physics = store.by(Actor(name="physics", role="submitter"))
    physics.campaigns.create(make_spec("Sweep-1", model={"name": "gpt"}), num_legal_layouts=1)
    clock.forward(60)
    store.campaigns.create(make_spec("sweep_2", cluster="frontier"), num_legal_layouts=1)
    clock.forward(60)
    two = ["tokens_per_s", "memory_headroom"]
    store.campaigns.create(make_spec("both", objective=two), num_legal_layouts=1)
    clock.forward(60)
    last = store.campaigns.create(make_spec("50%", strategy="guided"), num_legal_layouts=1)
    store.campaigns.pause(last.id)
    return store


def test_campaigns_are_found_by_what_they_are_and_pages_hold_to_it(names: Store) -> None:
    for asked, found in (
        ({}, ["50%", "both", "sweep_2", "Sweep-1"]),
        ({"model": "gpt"}, ["Sweep-1"]),
        ({"cluster": "frontier"}, ["sweep_2"]),
        ({"strategy": "guided"}, ["50%"]),
        ({"created_by": "physics"}, ["Sweep-1"]),
        ({"states": ("PAUSED",)}, ["50%"]),
        ({"states": ("PAUSED", "RUNNING"), "model": "gpt"}, ["Sweep-1"]),
        ({"objective": "tokens_per_s"}, ["both"]),
        ({"objective": "memory_headroom"}, ["both"]),
        ({"objective": "tokens_per_s_per_device"}, ["50%", "sweep_2", "Sweep-1"]),
        ({"name_contains": "SWEEP"}, ["sweep_2", "Sweep-1"]),
        ({"name_contains": "_"}, ["sweep_2"]),
        ({"name_contains": "%"}, ["50%"]),
        ({"name_contains": "' OR 1=1 --"}, []),
        ({"created_after": START + timedelta(seconds=60)}, ["50%", "both", "sweep_2"]),
        ({"created_before": START + timedelta(seconds=60)}, ["Sweep-1"]),
        ({"model": "nothing"}, []),
    ):
        chosen = CampaignFilter(**asked)
        assert [each.name for each in names.campaigns.find(chosen=chosen)] == found, asked
    chosen = CampaignFilter(name_contains="sweep")
    (first,) = names.campaigns.find(chosen=chosen, limit=1)
    (second,) = names.campaigns.find(chosen=chosen, limit=1, before_id=first.id)
    assert (first.name, second.name) == ("sweep_2", "Sweep-1")


@pytest.mark.sqlite_is_enough(False)
def test_campaigns_are_counted_skipped_and_their_values_listed(store: Store) -> None:
    for name in ("one", "two", "three"):
        make_campaign(store, name)
    store.campaigns.cancel(store.campaigns.by_name("two").id)
    running = CampaignFilter(states=("RUNNING",))
    assert store.reports.count_campaigns(running) == 2
    assert [each.name for each in store.campaigns.find(chosen=running, limit=5, offset=1)] == [
        "one"
    ]
    choices = store.reports.campaign_choices()
    assert choices["state"] == {"CANCELLED": 1, "RUNNING": 2}
    assert choices["cluster_name"] == {"local-cpu": 3}
    store.campaigns.create(make_spec("later", start_from=["one"]), num_legal_layouts=1)
    assert store.reports.campaigns_from("one") == [("later", "RUNNING")]
    assert store.reports.campaigns_from("later") == []


def test_the_newest_events_come_first_and_pages_go_back(store: Store, campaign: int) -> None:
    store.campaigns.pause(campaign)
    store.campaigns.resume(campaign)
    store.events.number()
    newest = store.events.newest(campaign, limit=2)
    assert [event.kind for event in newest] == ["campaign.resumed", "campaign.paused"]
    (older,) = store.events.newest(campaign, before=newest[-1].seq, limit=2)
    assert older.kind == "campaign.created"


def test_only_a_running_trial_has_a_phase(store: Store, campaign: int, running: int) -> None:
    store.trials.add(campaign, Layout(tp=2))
    ((trial, phase),) = store.reports.running_phases(campaign).items()
    assert (trial, phase.waiting_because) == (running, "")
