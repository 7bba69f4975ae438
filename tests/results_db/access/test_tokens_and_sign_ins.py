"""Tokens, one-time codes, sessions and the audit in the database, on both kinds."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text

from layout_tuner.results_db.access import browser_sessions
from layout_tuner.results_db.access.browser_sessions import (
    CODE_LIFE,
    SESSION_IDLE_LIFE,
    SESSION_LIFE,
)
from layout_tuner.results_db.access.tokens import hash_of_token
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.admin.backup_file import back_up
from layout_tuner.results_db.admin.restore import restore_into_data_dir
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.errors import (
    TokenDuplicateError,
    TokenInvalidError,
    TokenNotFoundError,
)
from layout_tuner.results_db.retention import Pruned, Retention
from layout_tuner.results_db.service_records import AuditEntryRead
from layout_tuner.results_db.store import Store
from tests.kit.store import START, TurnableClock, at_once
from tests.results_db.sealed import sealed

pytestmark = pytest.mark.sqlite_is_enough

TOKEN = hash_of_token(b"lt_somebody")
CI = Actor(name="ci", role="viewer", address="192.0.2.7")


def hashed(secret: str) -> str:
    return hash_of_token(secret.encode())


def rows(store: Store) -> int:
    with store._db.read() as session:
        return int(session.scalar(text("SELECT count(*) FROM browser_sign_ins")) or 0)


@pytest.mark.sqlite_is_enough(False)
def test_a_code_becomes_one_session_of_its_token(store: Store, clock: TurnableClock) -> None:
    code, expires_at = store.by(CI).sign_ins.create_code(TOKEN)
    assert expires_at == clock() + CODE_LIFE
    assert store.sign_ins.token_of_code(hashed(code)) == TOKEN
    secret = store.by(CI).sign_ins.exchange_code(hashed(code))
    session = store.sign_ins.session_by_hash(hashed(secret))
    assert (session.token_hash, session.created_at) == (TOKEN, clock())
    assert store.sign_ins.exchange_code(hashed(code)) is None
    assert store.sign_ins.token_of_code(hashed(code)) is None
    assert rows(store) == 1
    actions = [(entry.action, entry.actor, entry.details) for entry in store.access.audit()]
    assert actions == [("session.begin", "ci", {"by": "code"}), ("sign_in.code", "ci", {})]


def test_neither_secrets_nor_the_kinds_are_mixed_up(store: Store) -> None:
    code, _ = store.sign_ins.create_code(TOKEN)
    secret = store.sign_ins.create_session(TOKEN)
    assert store.sign_ins.session_by_hash(hashed(code)) is None
    assert store.sign_ins.exchange_code(hashed(secret)) is None
    assert store.sign_ins.exchange_code(TOKEN) is None
    assert store.sign_ins.exchange_code(code) is None  # the code itself is nowhere
    assert store.sign_ins.session_by_hash(hashed(secret)) is not None
    with store._db.read() as session:
        kept = repr(session.execute(text("SELECT * FROM browser_sign_ins")).all())
    assert code not in kept
    assert secret not in kept


def test_a_session_ends_without_use_and_after_a_week(store: Store, clock: TurnableClock) -> None:
    begun = clock()
    unused, used = store.sign_ins.create_session(TOKEN), store.sign_ins.create_session(TOKEN)
    step_s = SESSION_IDLE_LIFE.total_seconds() / 4
    while clock() < begun + SESSION_LIFE - timedelta(seconds=step_s):
        clock.forward(step_s)
        store.sign_ins.renew_sessions([hashed(used), hashed("another")])
        is_young = clock() < begun + SESSION_IDLE_LIFE
        assert (store.sign_ins.session_by_hash(hashed(unused)) is not None) is is_young
        assert store.sign_ins.session_by_hash(hashed(used)) is not None
    clock.forward(step_s)
    store.sign_ins.renew_sessions([hashed(used)])
    assert store.sign_ins.session_by_hash(hashed(used)) is None


@pytest.mark.sqlite_is_enough(False)
def test_an_ended_session_is_not_renewed_and_sessions_end_with_their_token(store: Store) -> None:
    record, token = store.access.create_token("ci", "viewer")
    ended, going = (store.sign_ins.create_session(hashed(token)) for _ in range(2))
    store.by(CI).sign_ins.end_session(hashed(ended))
    store.sign_ins.renew_sessions([hashed(ended)])
    store.by(CI).sign_ins.end_session(hashed(ended))
    assert store.sign_ins.session_by_hash(hashed(ended)) is None
    assert store.sign_ins.session_by_hash(hashed(going)) is not None
    assert [entry.action for entry in store.access.audit(actor="ci")] == ["session.end"]
    store.sign_ins.create_code(hashed(token))
    other = store.sign_ins.create_session(TOKEN)
    store.access.revoke_token(record.id)
    assert store.sign_ins.session_by_hash(hashed(other)) is not None
    assert rows(store) == 1


def test_a_token_cannot_fill_the_table(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_sessions, "MAX_OF_TOKEN", 3)
    codes = [store.sign_ins.create_code(TOKEN)[0] for _ in range(5)]
    sessions = [store.sign_ins.create_session(TOKEN) for _ in range(5)]
    assert rows(store) == 6
    assert sum(store.sign_ins.token_of_code(hashed(code)) is not None for code in codes) == 3
    assert store.sign_ins.session_by_hash(hashed(sessions[-1])) is not None


def test_a_code_ends_after_its_time_and_is_pruned(store: Store, clock: TurnableClock) -> None:
    code, late = (store.sign_ins.create_code(TOKEN)[0] for _ in range(2))
    clock.forward(CODE_LIFE.total_seconds())
    assert store.sign_ins.token_of_code(hashed(code)) is None
    assert store.sign_ins.exchange_code(hashed(late)) is None
    secret = store.sign_ins.create_session(TOKEN)
    assert store.retention.prune(Retention()) == Pruned()
    assert rows(store) == 1
    assert store.sign_ins.session_by_hash(hashed(secret)) is not None


@pytest.mark.sqlite_is_enough(False)
def test_of_two_services_that_exchange_a_code_at_once_one_gets_a_session(database_url: str) -> None:
    with closing(Store(database_url)) as here, closing(Store(database_url)) as there:
        for _ in range(5):
            code_hash = hashed(here.sign_ins.create_code(TOKEN)[0])
            exchanges = [
                partial(store.sign_ins.exchange_code, code_hash) for store in (here, there)
            ]
            assert [secret is None for secret in at_once(*exchanges * 2)].count(False) == 1
        assert rows(here) == 5


@pytest.mark.sqlite_is_enough(False)
def test_backups_and_restored_databases_have_no_sign_ins(database_url: str, tmp_path: Path) -> None:
    path, restored = tmp_path / "backup.sqlite3", DataDir(tmp_path / "restored")
    with closing(Store(database_url)) as store:
        store.access.create_token("ci", "viewer")
        store.sign_ins.create_code(TOKEN)
        secret = store.sign_ins.create_session(TOKEN)
        back_up(database_url, path)
        assert rows(store) == 2
    assert hashed(secret).encode() not in path.read_bytes()
    with closing(Store(f"sqlite:///{path}")) as copy:
        assert rows(copy) == 0
        assert len(copy.access.tokens()) == 1
        late = copy.sign_ins.create_session(TOKEN)  # as in a copy that another program made
    restore_into_data_dir(sealed(path), restored)
    with closing(Store.open(restored)) as store:
        assert rows(store) == 0
        assert store.sign_ins.session_by_hash(hashed(late)) is None


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


@pytest.fixture
def changes(store: Store, clock: TurnableClock) -> tuple[AuditEntryRead, AuditEntryRead]:
    """Entries of a token that operations made and, a minute later, the system revoked."""
    token, _ = store.by(OPERATIONS).access.create_token("ci", "viewer")
    clock.forward(60)
    store.access.revoke_token(token.id)
    revoked, created = store.access.audit()
    return created, revoked


@pytest.mark.sqlite_is_enough(False)
def test_the_audit_says_who_changed_what_where_and_when(
    changes: tuple[AuditEntryRead, AuditEntryRead], clock: TurnableClock
) -> None:
    created, revoked = changes
    assert (created.actor, created.role, created.address) == ("operations", "admin", "192.0.2.7")
    assert (created.action, created.target_kind, created.target) == ("token.create", "token", "ci")
    assert created.details == {"role": "viewer", "owner": "ci", "expires_at": None}
    assert (created.at, revoked.at) == (START, clock())
    assert (revoked.actor, revoked.action) == ("system", "token.revoke")


@pytest.mark.sqlite_is_enough(False)
def test_the_audit_is_filtered_by_each_of_its_fields(
    store: Store, changes: tuple[AuditEntryRead, AuditEntryRead], clock: TurnableClock
) -> None:
    created, revoked = changes
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
