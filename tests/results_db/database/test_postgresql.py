"""PostgreSQL: each refusal is one sentence that says what to do, and what goes wrong goes by."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from benchmarks.service.postgres_server import SUPERUSER, PostgresServer, running_server
from layout_tuner.results_db.admin import integrity
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.admin.storage_check import check_storage
from layout_tuner.results_db.database import postgresql
from layout_tuner.results_db.database.retry import MOST_TRIES, retried
from layout_tuner.results_db.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    ResultsDbError,
)
from layout_tuner.results_db.store import Store
from tests.kit.store import at_once, make_campaign

PASSWORD = "open-sesame"


def refusal(url: str) -> str:
    """The line with which a database is refused; nothing that is raised shows the password."""
    with pytest.raises(DatabaseUnavailableError) as refused:
        Store.connect(url)
    (line,) = str(refused.value).splitlines()
    assert PASSWORD not in "".join(traceback.format_exception(refused.value))
    return line


@pytest.fixture
def fresh(postgres_url: str) -> Iterator[Store]:
    with closing(Store(postgres_url)) as store:
        yield store


@pytest.fixture
def guarded() -> Iterator[PostgresServer]:
    """A server that asks for passwords on its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running_server(port=port) as server:
        server.execute(f"ALTER USER {SUPERUSER} PASSWORD '{PASSWORD}'")
        rules = "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (server.data / "pg_hba.conf").write_text(rules)
        server.execute("SELECT pg_reload_conf()")
        yield server


def test_a_server_that_is_not_there_is_named_with_its_port() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        line = refusal(f"postgresql://service:{PASSWORD}@127.0.0.1:{port}/tuning")
    assert line.startswith(
        f"the database postgresql://service@127.0.0.1:{port}/tuning cannot be used:"
    )
    assert "Connection refused" in line


def test_passwords_open_and_are_never_shown(guarded: PostgresServer) -> None:
    where = f"127.0.0.1:{guarded.port}/postgres"
    line = refusal(f"postgresql://{SUPERUSER}:{PASSWORD}x@{where}")
    assert "password authentication failed" in line
    assert "give the right password in ~/.pgpass" in line
    assert "no password supplied" in refusal(f"postgresql://{SUPERUSER}@{where}")
    with closing(Store.connect(f"postgresql://{SUPERUSER}:{PASSWORD}@{where}")) as store:
        store.campaigns.find()
        assert PASSWORD not in repr(store._db.engine)


def test_a_user_without_rights_is_told_what_to_grant(postgres_server: PostgresServer) -> None:
    with postgres_server.database() as url:
        postgres_server.execute("DROP ROLE IF EXISTS plain")
        postgres_server.execute("CREATE ROLE plain LOGIN")
        line = refusal(url.replace(f"{SUPERUSER}@", "plain@"))
        assert "permission denied for schema public" in line
        assert "GRANT CREATE, USAGE ON SCHEMA public" in line
        name = url.split("@/")[1].split("?")[0]
        postgres_server.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 0")
        line = refusal(url.replace(f"{SUPERUSER}@", "plain@"))
        assert "too many connections" in line
        assert "run fewer processes" in line


def test_a_missing_badly_encoded_or_old_database_is_refused(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = refusal(postgres_server.url("nowhere"))
    assert 'database "nowhere" does not exist; create it with createdb' in line
    postgres_server.execute("DROP DATABASE IF EXISTS ascii")
    postgres_server.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
    line = refusal(postgres_server.url("ascii"))
    assert line.startswith("the database ascii has the encoding SQL_ASCII, and UTF8 is needed")
    postgres_server.execute("DROP DATABASE ascii WITH (FORCE)")
    monkeypatch.setattr(postgresql, "OLDEST_VERSION", 99)
    assert "99 or newer is needed" in refusal(postgres_url)


def test_a_server_that_was_away_is_used_again_when_it_is_back() -> None:
    with running_server() as server:
        server.execute("CREATE DATABASE tuning")
        with closing(Store.connect(server.url("tuning"))) as store:
            campaign = make_campaign(store)
            server.stop()
            for _ in range(3):
                with pytest.raises(DatabaseUnavailableError, match="cannot be used: "):
                    store.campaigns.get(campaign)
            server.start()
            assert store.campaigns.get(campaign).name == "first"
            store.campaigns.pause(campaign)


def test_connections_that_were_cut_while_idle_are_noticed_before_they_are_used(
    postgres_server: PostgresServer, fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "TESTED_AFTER_S", 0.0)
    fresh.campaigns.find()
    postgres_server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        f"WHERE datname = '{fresh._db.engine.url.database}'"
    )
    fresh.campaigns.find()


def test_a_reader_sees_one_state_whatever_is_written_meanwhile(fresh: Store) -> None:
    make_campaign(fresh)
    count = text("SELECT count(*) FROM campaigns")
    with fresh._db.read() as session:
        assert session.scalar(count) == 1
        make_campaign(fresh, "second")
        assert session.scalar(count) == 1
    with fresh._db.read() as session:
        assert session.scalar(count) == 2


def test_nobody_waits_long_for_a_lock(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "LOCK_TIMEOUT_S", 1)
    with closing(Store(postgres_url)) as store:
        campaign = make_campaign(store)
        with store._db.write() as session:
            session.execute(text("SELECT * FROM campaigns FOR UPDATE"))
            with pytest.raises(DatabaseUnavailableError, match="another process has held a lock"):
                store.campaigns.pause(campaign)
        assert store.campaigns.pause(campaign).state == "PAUSED"


def test_a_check_of_the_storage_may_take_longer_than_statements_may(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_slowly(session: Session) -> tuple[str, list[str]]:
        session.execute(text("SELECT pg_sleep(2.2)"))
        return check_storage(session)

    monkeypatch.setattr(postgresql, "STATEMENT_TIMEOUT_S", 2)
    monkeypatch.setattr(integrity, "check_storage", check_slowly)
    assert check_database(postgres_url).findings == ()


def test_a_stopped_process_loses_its_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "IDLE_IN_TRANSACTION_S", 1)
    with closing(Store(postgres_url)) as stopped, closing(Store(postgres_url)) as other:
        campaign = make_campaign(other)

        def sleep_in_a_transaction() -> None:
            with stopped._db.write() as session:
                session.execute(text("SELECT * FROM campaigns FOR UPDATE"))
                # Waits for the lock, which goes with the connection of the one that says nothing.
                assert other.campaigns.pause(campaign).state == "PAUSED"
                session.execute(text("SELECT 1"))

        with pytest.raises(DatabaseUnavailableError, match="idle-in-transaction timeout"):
            sleep_in_a_transaction()
        stopped.campaigns.find()


def test_of_two_transactions_in_a_deadlock_one_may_be_run_again(fresh: Store) -> None:
    ids = [make_campaign(fresh, name) for name in ("first", "second")]
    both_hold_one = threading.Barrier(2)

    def lock(first: int, second: int) -> str:
        try:
            with fresh._db.write() as session:
                for campaign_id in (first, second):
                    query = text("SELECT * FROM campaigns WHERE id = :id FOR UPDATE")
                    session.execute(query, {"id": campaign_id})
                    if campaign_id == first:
                        both_hold_one.wait(30)
        except DatabaseConflictError as error:
            return str(error)
        return "done"

    ends = at_once(partial(lock, *ids), partial(lock, *ids[::-1]))
    conflict, done = sorted(ends, key=len, reverse=True)
    assert done == "done"
    assert "deadlock detected; try again" in conflict


def test_what_was_undone_for_another_s_sake_is_run_again_and_not_for_ever() -> None:
    class Part:
        tries = 0

        @retried
        def write(self, *, succeeds_at: int) -> str:
            self.tries += 1
            if self.tries < succeeds_at:
                raise DatabaseConflictError("in each other's way")
            return "written"

    assert Part().write(succeeds_at=MOST_TRIES) == "written"
    hopeless = Part()
    with pytest.raises(DatabaseConflictError):
        hopeless.write(succeeds_at=MOST_TRIES + 1)
    assert hopeless.tries == MOST_TRIES


def test_what_the_server_alone_can_tell_to_be_unstorable_is_a_value_s_fault(fresh: Store) -> None:
    with (
        pytest.raises(ResultsDbError, match="cannot keep this: invalid input syntax for type json"),
        fresh._db.write() as session,
    ):
        session.execute(text("SELECT CAST('{' AS json)"))


def test_processes_go_by_the_server_clock(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def server_time() -> float:
        with fresh._db.read() as session:
            return float(
                session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
            )

    # A machine whose own count jumped by an hour, as one that was asleep.
    monkeypatch.setattr(
        "layout_tuner.results_db.database.store_base.time.monotonic", lambda: 10_000.0
    )
    fresh.agree_on_time()
    monkeypatch.setattr(
        "layout_tuner.results_db.database.store_base.time.monotonic", lambda: 13_600.0
    )
    assert fresh.now().timestamp() > server_time() + 3000
    fresh.agree_on_time()
    assert abs(fresh.now().timestamp() - server_time()) < 60
