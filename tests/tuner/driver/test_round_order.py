"""In which order a round drives campaigns, and that an owner's many do not keep others waiting."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.tuner.driver import round_order
from layout_tuner.tuner.driver.driver import Driver
from layout_tuner.tuner.driver.round_order import AGAIN_AFTER_S, in_turns
from tests.tuner.factories import FakeWorker, make_spec


def submit(store: Store, owners: str) -> list[CampaignRecord]:
    """A campaign for each letter, which is its owner; the name is the letter with a number."""
    numbers = Counter[str]()
    found = []
    for owner in owners:
        numbers[owner] += 1
        spec = make_spec(f"{owner}{numbers[owner]}", knowledge="none", budget={"trials": 20})
        own = store.by(Actor(name=owner, role="submitter"))
        found.append(own.campaigns.create(spec.to_mapping(), num_legal_layouts=28))
    return found


def names(campaigns: list[CampaignRecord], *, step_s: float) -> str:
    """The order of a round in which each campaign takes so long."""
    clock = count()
    found = in_turns(campaigns, clock=lambda: next(clock) * step_s)
    return " ".join(each.name for each in found)


@pytest.mark.sqlite_is_enough
def test_owners_take_turns_and_those_with_few_come_again_in_a_long_round(store: Store) -> None:
    campaigns = submit(store, "aaabba")
    assert names(campaigns, step_s=0.0) == "a1 b1 a2 b2 a3 a4", "a short round"
    assert names(campaigns, step_s=AGAIN_AFTER_S) == "a1 b1 a2 b2 a3 b1 a4"
    assert names(campaigns[:1], step_s=AGAIN_AFTER_S) == "a1"
    assert names([], step_s=1.0) == ""


def test_a_campaign_goes_on_while_a_round_drives_those_of_another_owner(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaigns = submit(store, "aaaaaab")
    worker, driver = FakeWorker(store), Driver(store)
    monkeypatch.setattr(round_order, "AGAIN_AFTER_S", 0.0)
    step = driver._step_campaign

    def step_and_run(campaign: CampaignRecord) -> bool:
        ok = step(campaign)
        while worker.run_one():
            pass
        return ok

    monkeypatch.setattr(driver, "_step_campaign", step_and_run)
    assert driver.step()
    ran = {each.name: store.campaigns.count_trials(each.id)["COMPLETED"] for each in campaigns}
    assert ran["b1"] > 2 * max(number for name, number in ran.items() if name != "b1")


@pytest.mark.sqlite_is_enough
def test_what_ended_or_was_deleted_in_a_round_is_not_driven_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, "aaabc")
    driver = Driver(store)
    monkeypatch.setattr(round_order, "AGAIN_AFTER_S", 0.0)
    step, driven = driver._step_campaign, Counter[str]()

    def step_and_end(campaign: CampaignRecord) -> bool:
        driven[campaign.name] += 1
        ok = step(campaign)
        if campaign.name == "b1":
            store.campaigns.cancel(campaign.id)
        if campaign.name == "c1":
            store.campaigns.cancel(campaign.id)
            store.campaigns.delete(campaign.id)
        return ok

    monkeypatch.setattr(driver, "_step_campaign", step_and_end)
    assert driver.step()
    assert driven == dict.fromkeys(["a1", "a2", "a3", "b1", "c1"], 1)
