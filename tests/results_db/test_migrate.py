import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from results_db import migrate
from results_db.allocation_records import HeartbeatAnswer, NodeFacts
from results_db.cost import Cost
from results_db.data_dir import DataDir
from results_db.errors import (
    DatabaseInvalidError,
    DatabaseUnavailableError,
    SchemaNewerError,
    SchemaOutdatedError,
)
from results_db.models import Base
from results_db.session import Database
from results_db.store import Store
from search_spaces.layout import Layout
from tests.results_db.test_imports import make_import, varied_rows


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'results.sqlite3'}"


def write_revision(path: Path, revision: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()


def test_the_scripts_are_named_after_their_revisions_and_the_last_is_the_head() -> None:
    scripts = migrate.scripts()
    names = {Path(script.path).name[:4]: script.revision for script in scripts.walk_revisions()}
    assert all(name == revision for name, revision in names.items())
    assert migrate.head() == scripts.get_current_head()


def test_the_migrations_build_exactly_what_the_models_describe(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    database.close()


def test_the_migrations_keep_every_check_of_the_models(url: str) -> None:
    # Alembic does not compare check constraints.
    migrate.upgrade(url)
    database = Database(url)
    found = inspect(database.engine)
    for table in Base.metadata.sorted_tables:
        described = {
            str(c.name): str(c.sqltext) for c in table.constraints if hasattr(c, "sqltext")
        }
        kept = {c["name"]: c["sqltext"] for c in found.get_check_constraints(table.name)}
        assert kept == described, table.name
    database.close()


def test_a_downgrade_takes_everything_away_and_an_upgrade_brings_it_back(url: str) -> None:
    migrate.upgrade(url)
    migrate.downgrade(url, "base")
    database = Database(url)
    assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    database.close()
    migrate.upgrade(url)
    migrate.check(url)


def test_upgrading_twice_changes_nothing(url: str, tmp_path: Path) -> None:
    migrate.upgrade(url)
    before = (tmp_path / "results.sqlite3").read_bytes()
    migrate.upgrade(url)
    assert (tmp_path / "results.sqlite3").read_bytes() == before


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    Store.open(data_dir).close()
    write_revision(tmp_path / "results.sqlite3", "9999")
    before = (tmp_path / "results.sqlite3").read_bytes()
    with pytest.raises(SchemaNewerError, match=r"9999.*newer version"):
        Store.open(data_dir)
    assert (tmp_path / "results.sqlite3").read_bytes() == before


def spoil(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"no database, but long enough to be taken for one. " * 100)
    elif how == "directory":
        path.mkdir()
    else:
        migrate.upgrade(f"sqlite:///{path}")
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes(len(content) - 100))


@pytest.mark.parametrize("how", ["garbage", "directory", "damaged"])
def test_a_database_that_is_none_is_refused_by_its_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "results.sqlite3"
    spoil(path, how)
    for open_it in (
        lambda: Store.open(DataDir(tmp_path)),
        lambda: migrate.check(f"sqlite:///{path}"),
        lambda: Store(f"sqlite:///{path}").ping(),
        lambda: Store(f"sqlite:///{path}").campaigns(),
    ):
        with pytest.raises(DatabaseUnavailableError, match=r"results\.sqlite3 cannot be used: \w+"):
            open_it()


def test_a_database_without_a_schema_is_outdated(url: str) -> None:
    with pytest.raises(SchemaOutdatedError, match="revision none"):
        migrate.check(url)


def test_the_embedded_database_writes_ahead_and_checks_foreign_keys(tmp_path: Path) -> None:
    store = Store.open(DataDir(tmp_path))
    with store._db.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    store.close()


PREVIOUS_ROWS = (
    """INSERT INTO workers VALUES ('a', 'w1', 'login', 'box', 2, 4, 'GPU', '{}', '2026-01-01 00:00:00.000000',
       '2026-01-01 00:00:00.000000', NULL)""",
    "UPDATE campaigns SET node_seconds = 29.0 WHERE id = 1",
    """UPDATE campaigns SET spec = '{"objective": "tokens_per_s", "probe": {"deadline_s": 90}}'
       WHERE id = 1""",
    """UPDATE trials SET node_seconds = 25.0, attempt = 3, lost_attempts = 1 WHERE id = 1""",
    """INSERT INTO attempts VALUES (1, 1, 'a', '2026-01-01', '2026-01-01', '2026-01-01', 'lost', 12.0)""",
    """INSERT INTO attempts VALUES (1, 2, 'a', '2026-01-01', '2026-01-01', '2026-01-01', 'returned',
       3.0)""",
    """INSERT INTO attempts VALUES (1, 3, 'a', '2026-01-01', '2026-01-01', '2026-01-01 00:00:00.000000',
       'reported', 10.0)""",
)
"""What the fourth schema held besides: a worker, and attempts with what they cost."""

OLD_ROWS = (
    """INSERT INTO campaigns VALUES (1, 'old', 'RUNNING', NULL, '',
       '{"name": "old", "objective": "tokens_per_s", "probe": {"warmup": 1, "iterations": 3}}', 'tiny', 'box', 'tokens_per_s',
       'random', 9, 2, 1, '2026-01-01', NULL, NULL, 0.0, 0.0, NULL)""",
    """INSERT INTO campaigns VALUES (2, 'newer', 'RUNNING', NULL, '',
       '{"name": "newer", "objective": "tokens_per_s", "probe": {"warmup": 3}, "warnings": []}', 'tiny', 'box', 'tokens_per_s',
       'random', 9, 1, 0, '2026-01-01', NULL, NULL, 0.0, 0.0, NULL)""",
    """INSERT INTO trials (id, campaign_id, number, layout_key, repeat_index, num_nodes, tp, pp, dp,
       vpp, micro_batch_size, num_microbatches, zero_stage, recompute, sequence_parallel,
       precision, num_devices, global_batch_size, state, message, node, cancel_requested, attempt,
       lost_attempts, iterations_done, node_seconds, created_at, ended_at, ended_seq)
       VALUES (1, 1, 1, 'k', 0, 1, 1, 1, 4, 1, 1, 1, 1, 'none', 0, 'fp32', 4, 4, 'COMPLETED', '',
       '', 0, 1, 0, 2, 0.0, '2026-01-01 00:00:00.000000', '2026-01-01 00:00:00.000000', 1)""",
    """INSERT INTO measurements VALUES (1, 1, 0.5, 0.4, 0.6, 512, 1024.0, 256.0, 0.1, 0.1, 0.2,
       'measured matmul (fp32)', 0.5, 1.25, 4096, 'logical', 0)""",
    "INSERT INTO stage_memories VALUES (1, 0, 4096)",
    "INSERT INTO iterations VALUES (1, 0, 'timed', 0.5, 7.0, 1.5)",
)
"""What the first schema held: a campaign with one measured trial."""


@pytest.fixture
def old_store(url: str, tmp_path: Path) -> Iterator[Store]:
    """A store of the first schema, opened by this version."""
    migrate.upgrade(url, "0001")
    insert(url, OLD_ROWS)
    store = Store.open(DataDir(tmp_path))
    yield store
    store.close()


def test_a_measurement_of_the_first_schema_reads_as_far_as_it_was_made(old_store: Store) -> None:
    detail = old_store.trial_detail(1)
    assert detail.trial.layout == Layout(dp=4, zero_stage=1)
    assert [(i.index, i.loss, i.grad_norm) for i in detail.iterations] == [(0, 7.0, 1.5)]
    measured = detail.trial.measurement
    assert measured is not None
    assert (measured.breakdown, measured.warmup_settled, measured.skipped_steps) == (None, None, 0)
    assert measured.peak_memory_bytes_by_stage == (4096,)
    assert measured.peak_reserved_bytes_by_stage == ()
    assert measured.hfu == 1.25, "what was kept is read as it was kept"


def test_a_campaign_that_warmed_up_once_goes_on_with_two_and_says_so(old_store: Store) -> None:
    spec = old_store.campaign(1).spec
    assert spec["probe"] == {"warmup": 2, "iterations": 3}
    (warning,) = spec["warnings"]
    assert "probe.warmup was 1" in warning
    assert old_store.campaign(2).spec["probe"] == {"warmup": 3}
    assert old_store.campaign(2).spec["warnings"] == []


def test_a_downgrade_keeps_what_the_first_schema_can_hold(old_store: Store, url: str) -> None:
    before = old_store.trial_detail(1)
    migrate.downgrade(url, "0001")
    migrate.upgrade(url)
    assert old_store.trial_detail(1) == before


def test_a_downgrade_takes_measurements_away_that_the_first_schema_would_rank(
    old_store: Store, url: str, tmp_path: Path
) -> None:
    with old_store._db.write() as session:
        session.connection().exec_driver_sql(
            "UPDATE trials SET state = 'FAILED', reason = 'diverged' WHERE id = 1"
        )
    migrate.downgrade(url, "0001")
    with closing(sqlite3.connect(tmp_path / "results.sqlite3")) as connection:
        for table in ("measurements", "stage_memories", "iterations"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        assert connection.execute("SELECT state, reason FROM trials").fetchall() == [
            ("FAILED", "diverged")
        ]


def test_what_tables_may_not_tell_becomes_nullable_and_nothing_measured_is_lost(
    old_store: Store, url: str, tmp_path: Path
) -> None:
    before = old_store.trial_detail(1)
    migrate.downgrade(url, "0003")
    migrate.upgrade(url)
    assert old_store.trial_detail(1) == before
    with closing(sqlite3.connect(tmp_path / "results.sqlite3")) as connection:
        columns = connection.execute("PRAGMA table_info(measurements)").fetchall()
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    nullable = {name for _, name, _, is_required, *_ in columns if not is_required}
    assert {"mfu", "hfu", "peak_memory_bytes", "step_time_q25_s"} <= nullable
    assert not {"step_time_s", "tokens_per_s", "tokens_per_s_per_device"} & nullable


def test_a_downgrade_takes_imported_campaigns_away(old_store: Store, url: str) -> None:
    (imported,) = old_store.import_campaigns([make_import("theirs", *varied_rows())])
    assert imported.id == 3
    migrate.downgrade(url, "0003")
    migrate.upgrade(url)
    assert [campaign.name for campaign in old_store.campaigns()] == ["newer", "old"]
    assert old_store.trial_detail(1).trial.measurement is not None


@pytest.fixture
def previous_store(url: str, tmp_path: Path) -> Iterator[Store]:
    """A store that the schema before this one was at work with."""
    migrate.upgrade(url, "0001")
    insert(url, OLD_ROWS)
    migrate.upgrade(url, "0004")
    insert(url, PREVIOUS_ROWS)
    store = Store.open(DataDir(tmp_path))
    yield store
    store.close()


def insert(url: str, rows: tuple[str, ...]) -> None:
    database = Database(url)
    with database.write() as session:
        for row in rows:
            session.connection().exec_driver_sql(row)
    database.close()


def test_earlier_costs_are_split_as_far_as_is_known_and_none_is_lost(previous_store: Store) -> None:
    attempts = previous_store.trial_detail(1).attempts
    # One step of half a second was kept; what nobody knows better is the start.
    expected = [Cost(lost=12), Cost(lost=3), Cost(iterations=0.5, start=9.5)]
    assert [attempt.cost for attempt in attempts] == expected
    trial, campaign = previous_store.trial(1), previous_store.campaign(1)
    assert trial.cost == Cost(iterations=0.5, start=9.5, lost=15)
    assert campaign.cost == Cost(iterations=0.5, start=13.5, lost=15)
    assert (trial.cost.total, campaign.cost.total) == (25, campaign.node_seconds)


def test_a_worker_of_the_schema_before_goes_on_with_its_session(previous_store: Store) -> None:
    before = previous_store.allocation("a")
    assert (before.worker.scheduler, before.worker.state, before.nodes) == ("none", "working", ())
    assert previous_store.heartbeat("a", []) == HeartbeatAnswer()
    assert previous_store.allocation("a").is_there


def test_deadlines_become_a_column_that_leases_go_by(previous_store: Store) -> None:
    previous_store.add_trial(1, Layout())
    previous_store.add_trial(2, Layout())
    # The second campaign's description says nothing of a deadline: the usual one counts.
    assert previous_store.lease("a", 2, longest_s=89) == []
    assert [lease.campaign_id for lease in previous_store.lease("a", 2, longest_s=90)] == [1]
    assert [lease.campaign_id for lease in previous_store.lease("a", 2, longest_s=300)] == [2]


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004"])
def test_a_database_of_every_released_schema_is_upgraded_with_what_it_holds(
    url: str, tmp_path: Path, revision: str
) -> None:
    migrate.upgrade(url, "0001")
    insert(url, OLD_ROWS)
    migrate.upgrade(url, revision)
    store = Store.open(DataDir(tmp_path))
    migrate.check(url)
    assert [campaign.name for campaign in store.campaigns()] == ["newer", "old"]
    assert store.trial_detail(1).trial.measurement is not None
    assert store.campaign(1).cost == Cost()
    store.close()


def test_a_downgrade_keeps_totals_and_attempts(
    previous_store: Store, url: str, tmp_path: Path
) -> None:
    worker = previous_store.register_worker(
        name="w2",
        host="login",
        cluster="box",
        num_nodes=1,
        devices_per_node=4,
        device="GPU",
        versions={},
        nodes=[NodeFacts(name="n1", num_devices=4)],
    )
    previous_store.quarantine_node("box", "n1", "loud")
    migrate.downgrade(url, "0004")
    with closing(sqlite3.connect(tmp_path / "results.sqlite3")) as connection:
        costs = connection.execute("SELECT node_seconds FROM attempts ORDER BY attempt").fetchall()
        assert costs == [(12.0,), (3.0,), (10.0,)]
        names = connection.execute("SELECT name FROM workers ORDER BY name").fetchall()
        assert names == [("w1",), ("w2",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    migrate.upgrade(url)
    assert previous_store.trial(1).cost == Cost(iterations=0.5, start=9.5, lost=15)
    assert previous_store.allocation(worker.id).nodes == ()


def test_figures_that_the_schema_refuses_stop_an_upgrade_which_says_so_and_changes_nothing(
    url: str,
) -> None:
    migrate.upgrade(url, "0006")
    insert(
        url,
        (
            "INSERT INTO workers (id, name, host, cluster, num_nodes, devices_per_node, device, versions,"
            " registered_at, seen_at, idle_node_seconds) VALUES"
            " ('w', 'w', 'h', 'c', 1, 1, 'd', '{}', '2026-01-01', '2026-01-01', -1)",
        ),
    )
    with pytest.raises(DatabaseInvalidError, match="left as it was"):
        migrate.upgrade(url)
    assert migrate.revision(url) == "0006"
