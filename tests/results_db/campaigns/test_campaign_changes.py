"""Another budget, notes, and deletion."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from results_db.errors import CampaignNotFoundError, CampaignStateError
from results_db.models.base import Base
from results_db.store import Store
from search_spaces.errors import CampaignInvalidError
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    failed,
    make_campaign,
    make_spec,
    post_outcome,
    run_trial,
)
from tests.results_db.campaigns.test_analyses import make_analysis

pytestmark = pytest.mark.sqlite_is_enough


def rows(store: Store, statement: str, **values: Any) -> list[Any]:
    with store._db.read() as session:
        return list(session.execute(text(statement), values))


def told(store: Store, campaign_id: int) -> list[str]:
    found = rows(store, "SELECT kind FROM events WHERE campaign_id = :c ORDER BY id", c=campaign_id)
    return [kind for (kind,) in found]


def audited(store: Store) -> list[str]:
    return [action for (action,) in rows(store, "SELECT action FROM audit ORDER BY id")]


def end(store: Store, campaign_id: int) -> None:
    store.campaigns.end(campaign_id, "COMPLETED", "budget", "done")


def test_a_changed_budget_is_told_and_audited_also_in_a_pause(store: Store, campaign: int) -> None:
    changed = store.campaigns.update(campaign, budget={"trials": 40, "wall_time": "1h"})
    budget = {"trials": 40, "node_hours": None, "wall_time_s": 3600.0}
    assert changed.spec["budget"] == store.campaigns.get(campaign).spec["budget"] == budget
    store.campaigns.update(campaign, budget={"trials": 40}, notes="")
    store.campaigns.update(campaign)
    assert told(store, campaign) == ["campaign.created", "campaign.changed"], "once"
    assert audited(store) == ["campaign.create", "campaign.update"]
    store.campaigns.pause(campaign)
    assert store.campaigns.update(campaign, budget={"trials": 11}).spec["budget"]["trials"] == 11
    assert store.campaigns.get(campaign).state == "PAUSED"


def test_an_ended_campaign_changes_its_notes_alone(store: Store, campaign: int) -> None:
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.update(999, notes="x")
    with pytest.raises(CampaignInvalidError, match=r"budget\.trials"):
        store.campaigns.update(campaign, budget={"trials": -1}, notes="more")
    end(store, campaign)
    with pytest.raises(CampaignStateError, match=r"is COMPLETED and is not reopened.*clone"):
        store.campaigns.update(campaign, budget={"trials": 40}, notes="more")
    record = store.campaigns.get(campaign)
    assert (record.spec["budget"]["trials"], record.notes) == (10, "")
    assert store.campaigns.update(campaign, notes="we took it").notes == "we took it"


def test_an_ending_that_rests_on_another_budget_is_refused(store: Store, campaign: int) -> None:
    store.trials.add(campaign, Layout())
    looked_at = store.campaigns.get(campaign).spec["budget"]
    store.campaigns.update(campaign, budget={"trials": 40})
    with pytest.raises(CampaignStateError, match="was changed meanwhile"):
        store.campaigns.end(campaign, "COMPLETED", "budget", "10 of 10", budget=looked_at)
    with pytest.raises(CampaignStateError, match="was changed meanwhile"):
        store.campaigns.cancel_pending(campaign, "time is up", budget=looked_at)
    assert store.campaigns.get(campaign).state == "RUNNING"
    assert store.campaigns.count_trials(campaign)["PENDING"] == 1
    budget = store.campaigns.get(campaign).spec["budget"]
    assert store.campaigns.cancel_pending(campaign, "time is up", budget=budget) == 1
    assert store.campaigns.end(campaign, "COMPLETED", "budget", "", budget=budget).ended_at


def full_campaign(store: Store, name: str = "first") -> int:
    """A campaign with a row in every table that knows of campaigns."""
    campaign = make_campaign(store, name)
    first, _ = run_trial(store, campaign), run_trial(store, campaign)
    run_trial(store, campaign, Layout(tp=2), failed())
    store.reports.keep_analysis(campaign, make_analysis(first))
    end(store, campaign)
    return campaign


def count_rows(store: Store) -> dict[str, int]:
    """Rows of every table but those that tell what happened, and the workers' own."""
    kept = {"audit", "events", "event_counter", "workers", "allocation_nodes"}
    tables = [name for name in Base.metadata.tables if name not in kept]
    with store._db.read() as session:
        return {name: session.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in tables}


@pytest.mark.sqlite_is_enough(False)
def test_deletion_takes_all_that_was_measured_and_nothing_of_others(store: Store) -> None:
    full_campaign(store, "other")
    before = count_rows(store)
    campaign = full_campaign(store)
    assert count_rows(store)["trials"] == before["trials"] + 3
    store.campaigns.delete(campaign)
    assert count_rows(store) == before
    assert told(store, campaign) == ["campaign.deleted"]
    assert audited(store)[-1] == "campaign.delete"
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.delete(campaign)
    assert store.campaigns.get(make_campaign(store)).name == "first", "the name is free again"


@pytest.mark.sqlite_is_enough(False)
def test_a_campaign_is_deleted_when_nothing_of_it_runs(
    store: Store, campaign: int, running: int
) -> None:
    for state in ("RUNNING", "PAUSED"):
        with pytest.raises(CampaignStateError, match=f"is {state}; cancel it before"):
            store.campaigns.delete(campaign)
        store.campaigns.pause(campaign)
    store.campaigns.cancel(campaign)
    with pytest.raises(CampaignStateError, match="still stopping 1 trial of"):
        store.campaigns.delete(campaign)
    post_outcome(store, running, 1, failed("cancelled"))
    store.campaigns.delete(campaign)


@pytest.mark.sqlite_is_enough(False)
def test_a_campaign_that_an_open_one_starts_from_is_not_deleted(store: Store) -> None:
    source = full_campaign(store, "source")
    spec = make_spec("heir", start_from=["source"])
    heir = store.campaigns.create(spec, num_legal_layouts=100).id
    with pytest.raises(CampaignStateError, match="'heir' starts from 'source'"):
        store.campaigns.delete(source)
    store.campaigns.cancel(heir)
    store.campaigns.delete(source)
    assert store.plans.known_trials(store.campaigns.get(heir)) == []
