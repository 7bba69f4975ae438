from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from results_db.actor import Actor
from results_db.campaigns.filter import CampaignFilter
from results_db.store import Store
from tests.kit.store import START, TurnableClock, make_spec


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("asked", "found"),
    [
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
    ],
    ids=str,
)
def test_campaigns_are_found_by(names: Store, asked: dict[str, Any], found: list[str]) -> None:
    chosen = CampaignFilter(**asked)
    assert [campaign.name for campaign in names.campaigns.find(chosen=chosen)] == found


def test_pages_hold_to_the_filter(names: Store) -> None:
    chosen = CampaignFilter(name_contains="sweep")
    (first,) = names.campaigns.find(chosen=chosen, limit=1)
    (second,) = names.campaigns.find(chosen=chosen, limit=1, before_id=first.id)
    assert (first.name, second.name) == ("sweep_2", "Sweep-1")
