from __future__ import annotations

import pytest

from results_db.campaigns.filter import CampaignFilter
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    lease_one,
    make_campaign,
    make_spec,
    make_worker,
)

pytestmark = pytest.mark.sqlite_is_enough


@pytest.mark.sqlite_is_enough(False)
def test_campaigns_are_counted_skipped_and_their_values_listed(store: Store) -> None:
    for name in ("one", "two", "three"):
        make_campaign(store, name)
    store.campaigns.cancel(store.campaigns.by_name("two").id)
    running = CampaignFilter(states=("RUNNING",))
    assert store.overview.count_campaigns(running) == 2
    assert [each.name for each in store.campaigns.find(chosen=running, limit=5, offset=1)] == [
        "one"
    ]
    choices = store.overview.campaign_choices()
    assert choices["state"] == {"CANCELLED": 1, "RUNNING": 2}
    assert choices["cluster_name"] == {"local-cpu": 3}


def test_campaigns_that_start_from_one_are_named(store: Store) -> None:
    make_campaign(store)
    store.campaigns.create(make_spec("later", start_from=["first"]), num_legal_layouts=1)
    assert store.overview.campaigns_from("first") == [("later", "RUNNING")]
    assert store.overview.campaigns_from("later") == []


def test_the_newest_events_come_first_and_pages_go_back(store: Store, campaign: int) -> None:
    store.campaigns.pause(campaign)
    store.campaigns.resume(campaign)
    store.events.number()
    newest = store.events.newest(campaign, limit=2)
    assert [event.kind for event in newest] == ["campaign.resumed", "campaign.paused"]
    (older,) = store.events.newest(campaign, before=newest[-1].seq, limit=2)
    assert older.kind == "campaign.created"


def test_a_running_trial_has_a_phase_and_others_have_none(store: Store) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    store.trials.add(campaign, Layout())
    assert store.overview.running_phases(campaign) == {}
    lease = lease_one(store, worker.id)
    found = store.overview.running_phases(campaign)
    assert found[lease.trial_id].waiting_because == ""
