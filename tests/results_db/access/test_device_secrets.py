"""The secret of a command line in the database: whoever uses it in whatever order, at once too."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.results_db.access.tokens import AGAIN_WITHIN, hash_of_token
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.errors import DeviceSignInRefusedError
from layout_tuner.results_db.store import Store
from tests.kit.store import TurnableClock, at_once

pytestmark = pytest.mark.sqlite_is_enough(False)

ANN = Actor(name="ann-token", role="submitter", owner="ann")
LIFE = timedelta(hours=1)
HOUR_S = 3600.0


def begun(store: Store, days: float = 30.0) -> str:
    """A command line that was allowed and has a token; returns its secret."""
    secret, code = store.access.ask_for_device("h")
    ends_at = store.now() + timedelta(days=days)
    assert store.by(ANN).access.decide_device(code, "0" * 64, ends_at)
    return store.access.exchange_device_secret(secret, LIFE)[1]


def used(store: Store, secret: str) -> tuple[str, str] | None:
    try:
        return store.access.exchange_device_secret(secret, LIFE)
    except DeviceSignInRefusedError as error:
        if error.kind != "invalid_grant":
            raise
        return None


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 60.0, HOUR_S, -HOUR_S])), max_size=12
    )
)
def test_secrets_are_used_once_or_the_sign_in_ends(
    store: Store, clock: TurnableClock, steps: list[tuple[int, float]]
) -> None:
    # What a service has to remember: the last secret, and the one before while it counts.
    issued = [begun(store)]
    last, before, at, has_ended = issued[0], None, clock.now, False
    for which, forward_s in steps:
        clock.forward(forward_s)
        secret = issued[-1 - which % len(issued)]
        is_again = secret == before and clock.now < at + AGAIN_WITHIN
        made = used(store, secret)
        if has_ended or not (secret == last or is_again):
            assert made is None
            has_ended = True
            continue
        token, new = made
        record = store.access.token_by_hash(hash_of_token(token.encode()))
        assert record.is_valid(clock.now)
        before, last, at = (None if is_again else secret), new, clock.now
        issued.append(new)
    (newest, *_) = store.access.tokens(revoked=True)
    assert (newest.revoked_at is not None) == has_ended


def test_of_exchanges_at_once_two_succeed_and_the_third_ends_it(store: Store) -> None:
    for number in (2, 3):
        secret = begun(store)
        made = at_once(*[lambda secret=secret: used(store, secret)] * number)
        assert len([each for each in made if each is not None]) == 2
        (newest,) = store.access.tokens(revoked=True)[:1]
        assert (newest.revoked_at is None) == (number == 2)


def test_of_decisions_at_once_one_counts(store: Store) -> None:
    secret, code = store.access.ask_for_device("h")
    ends_at, own = store.now() + timedelta(days=1), store.by(ANN).access
    decide = [lambda by=by: own.decide_device(code, by, ends_at) for by in ("0" * 64, None) * 2]
    assert sorted(at_once(*decide)) == [False, False, False, True]
    action = store.access.audit(limit=1)[0].action
    assert action in ("device.allow", "device.deny")
    if action == "device.deny":
        with pytest.raises(DeviceSignInRefusedError, match="access denied"):
            store.access.exchange_device_secret(secret, LIFE)
    else:
        store.access.exchange_device_secret(secret, LIFE)


def test_a_long_name_stays_one_of_a_token(store: Store) -> None:
    name = "a" * 64
    secret, code = store.access.ask_for_device("h")
    store.by(Actor(name=name, role="viewer")).access.decide_device(
        code, "0" * 64, store.now() + AGAIN_WITHIN
    )
    token, _ = store.access.exchange_device_secret(secret, LIFE)
    record = store.access.token_by_hash(hash_of_token(token.encode()))
    assert (len(record.name), record.owner, record.created_by) == (64, name, name)
    assert record.expires_at == record.ends_at


def test_revoking_the_token_ends_the_sign_in(store: Store) -> None:
    secret = begun(store)
    store.access.revoke_token(store.access.tokens(revoked=True)[0].id)
    assert used(store, secret) is None
