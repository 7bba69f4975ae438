"""Tokens and the audit in the database, on both of them."""

from datetime import timedelta

import pytest

from results_db.access.tokens import hash_of_token
from results_db.actor import Actor
from results_db.errors import TokenDuplicateError, TokenInvalidError, TokenNotFoundError
from results_db.store import Store
from tests.kit.store import TurnableClock

pytestmark = pytest.mark.sqlite_is_enough

OPERATIONS = Actor(name="operations", role="admin", address="192.0.2.7")


def test_a_token_is_found_by_its_hash_and_kept_nowhere(store: Store) -> None:
    record, token = store.by(OPERATIONS).access.create_token("ci", "submitter")
    assert store.access.token_by_hash(hash_of_token(token.encode())) == record
    assert (record.name, record.role, record.created_by) == ("ci", "submitter", "operations")
    assert token not in repr(store.access.tokens())
    assert token not in repr(store.access.audit())
    assert store.access.token_by_hash(hash_of_token(b"another")) is None


def test_a_token_is_valid_until_its_end_or_revocation(store: Store, clock: TurnableClock) -> None:
    now = clock()
    lasting, _ = store.access.create_token("lasting", "viewer")
    brief, _ = store.access.create_token("brief", "viewer", expires_at=now + timedelta(hours=1))
    assert brief.is_valid(now)
    assert not brief.is_valid(now + timedelta(hours=1))
    assert lasting.is_valid(now + timedelta(days=10_000))
    revoked = store.access.revoke_token(lasting.id)
    assert not revoked.is_valid(now)
    assert store.access.revoke_token(lasting.id) == revoked  # twice is once
    assert [token.name for token in store.access.tokens()] == ["brief"]
    assert [token.name for token in store.access.tokens(revoked=True)] == ["brief", "lasting"]


@pytest.mark.sqlite_is_enough(False)
def test_a_name_has_one_valid_token(store: Store, clock: TurnableClock) -> None:
    first, _ = store.access.create_token("ci", "viewer", expires_at=clock() + timedelta(hours=1))
    with pytest.raises(TokenDuplicateError, match="'ci' is valid; revoke it first"):
        store.access.create_token("ci", "admin")
    clock.forward(3600)
    second, _ = store.access.create_token("ci", "admin")  # the first has expired
    store.access.revoke_token(second.id)
    store.access.create_token("ci", "worker")
    assert {token.id for token in store.access.tokens(revoked=True)} >= {first.id, second.id}


def test_a_token_has_a_proper_name_and_a_proper_end(store: Store, clock: TurnableClock) -> None:
    for name in ("", "-x", "a b", "ü", "x" * 65, "a\n", "system", "local"):
        with pytest.raises(TokenInvalidError, match=r"name=.*(begin with|choose another)"):
            store.access.create_token(name, "viewer")
    for hours in (-1, 0, 24 * 3661):
        with pytest.raises(TokenInvalidError, match="not within the next 3660 days"):
            store.access.create_token("x", "viewer", expires_at=clock() + timedelta(hours=hours))
    with pytest.raises(TokenNotFoundError, match="there is no token 7"):
        store.access.revoke_token(7)


def test_the_last_use_is_known_to_the_minute(store: Store, clock: TurnableClock) -> None:
    token, _ = store.access.create_token("ci", "viewer")
    store.access.note_tokens_used([token.id, 4711])
    first = store.access.tokens()[0].last_used_at
    assert first == clock()
    clock.forward(30)
    store.access.note_tokens_used([token.id])
    assert store.access.tokens()[0].last_used_at == first
    clock.forward(31)
    store.access.note_tokens_used([token.id])
    assert store.access.tokens()[0].last_used_at == clock()


@pytest.mark.sqlite_is_enough(False)
def test_the_audit_says_who_changed_what_where_and_when(store: Store, clock: TurnableClock) -> None:
    began = clock()
    token, _ = store.by(OPERATIONS).access.create_token("ci", "viewer")
    clock.forward(60)
    store.access.revoke_token(token.id)
    revoked, created = store.access.audit()
    assert (created.actor, created.role, created.address) == ("operations", "admin", "192.0.2.7")
    assert (created.action, created.target_kind, created.target) == ("token.create", "token", "ci")
    assert created.details == {"role": "viewer", "expires_at": None}
    assert (created.at, revoked.at) == (began, clock())
    assert (revoked.actor, revoked.action) == ("system", "token.revoke")
    assert store.access.audit(actor="operations") == [created]
    assert store.access.audit(action="token.revoke") == [revoked]
    assert store.access.audit(target_kind="token", target="ci", limit=1) == [revoked]
    assert store.access.audit(target="another") == []
    assert store.access.audit(since=clock()) == [revoked]
    assert store.access.audit(until=clock()) == [created]
    assert store.access.audit(before_id=revoked.id) == [created]


def test_unknown_things_have_no_owner(store: Store) -> None:
    assert store.access.owner_of_campaign(1) is None
    assert store.access.owner_of_campaign("x") is None
    assert store.access.owner_of_trial(1) is None
    assert store.catalogue.owner_of("model", "x") is None
    assert store.catalogue.owner_of("cluster", "x") is None
