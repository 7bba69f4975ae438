"""A request that is sent again makes no second campaign."""

from __future__ import annotations

import pytest

from results_db.actor import Actor
from results_db.campaigns.idempotency_keys import RequestKey
from results_db.errors import (
    CampaignDuplicateError,
    IdempotencyKeyInUseError,
    IdempotencyKeyReusedError,
)
from results_db.store import Store
from tests.kit.store import make_spec

KEY = RequestKey(key="k", request_hash="a" * 64)


def create(store: Store, name: str, request: RequestKey = KEY) -> int:
    return store.campaigns.create(make_spec(name), num_legal_layouts=1, request=request).id


def test_a_request_that_is_sent_again_finds_its_campaign_and_makes_no_other(store: Store) -> None:
    assert store.campaigns.of_request(KEY) is None
    made = create(store, "first")
    found = store.campaigns.of_request(KEY)
    assert found is not None
    assert found.id == made
    with pytest.raises(IdempotencyKeyInUseError):
        create(store, "second")
    with pytest.raises(IdempotencyKeyReusedError, match="'k' was sent with another request"):
        store.campaigns.of_request(RequestKey(key="k", request_hash="b" * 64))
    assert [campaign.name for campaign in store.campaigns.find()] == ["first"]
    other = store.by(Actor(name="somebody", role="submitter"))
    assert other.campaigns.of_request(KEY) is None
    assert create(other, "second") != made


def test_a_request_that_was_refused_keeps_no_key(store: Store) -> None:
    store.campaigns.create(make_spec("taken"), num_legal_layouts=1)
    with pytest.raises(CampaignDuplicateError):
        create(store, "taken")
    assert store.campaigns.of_request(KEY) is None


def test_a_key_lives_as_long_as_its_campaign(store: Store) -> None:
    made = create(store, "first")
    store.campaigns.cancel(made)
    store.campaigns.delete(made)
    assert store.campaigns.of_request(KEY) is None
