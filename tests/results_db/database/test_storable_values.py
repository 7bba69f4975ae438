"""What PostgreSQL would refuse is refused on both databases, in the same words."""

from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text

from results_db.actor import Actor
from results_db.errors import CampaignNotFoundError, DatabaseUnavailableError, ValueUnstorableError
from results_db.store import Store
from search_spaces.protocol.worker_messages import NodeBody, WorkerCreate
from tests.kit.postgres import upgraded
from tests.kit.store import make_campaign, make_spec, make_worker

INTRODUCTION: Final[dict[str, Any]] = {
    "name": "w",
    "host": "h",
    "cluster": "c",
    "num_nodes": 41,
    "devices_per_node": 1,
    "device": "d",
    "versions": {},
}


def test_a_text_that_one_database_would_not_keep_is_kept_by_none(store: Store) -> None:
    for name, why in (
        ("a\0b", r"a text cannot be kept: 'a\\x00b' holds a NUL character"),
        ("n" * 201, "a text has 201 characters, and at most 200 are kept: 'nnnn"),
        ("half \ud800", "a text cannot be kept: 'half .* holds a lone surrogate"),
    ):
        with pytest.raises(ValueUnstorableError, match=why):
            make_worker(store, name)
    assert store.workers.find() == []
    make_worker(store, "ü" * 200)
    assert store.workers.find()[0].name == "ü" * 200, "the longest is kept"


def test_a_text_that_is_too_long_to_be_kept_can_be_looked_for(store: Store) -> None:
    assert store.allocations.find(called="n" * 201) == []
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.by_name("n" * 201)
    with pytest.raises(ValueUnstorableError, match="NUL"):
        store.campaigns.by_name("a\0b")


def test_every_row_of_many_is_checked(store: Store) -> None:
    nodes = [NodeBody(name=f"n{number}", num_devices=1) for number in range(40)]
    long = NodeBody(name="n" * 256, num_devices=1)
    with pytest.raises(ValueUnstorableError, match="256 characters, and at most 255"):
        store.workers.register(WorkerCreate(**INTRODUCTION, nodes=[*nodes, long]))
    assert store.workers.find() == []


def test_values_of_core_statements_are_checked_too(store: Store, campaign: int) -> None:
    somebody = store.by(Actor(name="a" * 65, role="admin"))
    with pytest.raises(ValueUnstorableError, match="65 characters, and at most 64"):
        somebody.campaigns.pause(campaign)
    assert store.campaigns.get(campaign).state == "RUNNING"


def test_numbers_beyond_their_column_are_refused_and_those_of_legal_sets_kept(store: Store) -> None:
    with pytest.raises(ValueUnstorableError, match="2147483648 is beyond 2147483647"):
        make_worker(store, num_nodes=2**31)
    with pytest.raises(ValueUnstorableError, match="2147483648 is beyond"):
        store.campaigns.get(2**31)
    with pytest.raises(CampaignNotFoundError):
        store.campaigns.get(2**31 - 1)
    huge = 2**62
    campaign = store.campaigns.create(make_spec(), num_legal_layouts=huge)
    assert store.campaigns.get(campaign.id).num_legal_layouts == huge


def test_a_damaged_document_says_that_the_database_is_damaged(tmp_path: Path) -> None:
    with closing(Store.open(upgraded(tmp_path))) as store:
        make_campaign(store)
        with store._db.engine.begin() as connection:
            connection.execute(text("UPDATE campaigns SET spec = '{\"a\": '"))
        with pytest.raises(DatabaseUnavailableError, match="it is damaged, restore"):
            store.campaigns.by_name("first")
