"""Migrations: versions that meet, interrupted and concurrent upgrades, and rows in an upgrade."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from sqlalchemy.exc import IntegrityError

from layout_tuner.protocol.worker_messages import BeatBody, NodeBody, NodeStatusBody, StatusBody
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.admin.backup_file import back_up
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.admin.restore import restore_into_postgresql
from layout_tuner.results_db.campaigns.filter import CampaignFilter
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.errors import (
    DatabaseInvalidError,
    DatabaseUnavailableError,
    SchemaNewerError,
    SchemaOutdatedError,
)
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.table_base import Base
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.golden.structure import tables_of
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    make_campaign,
    make_spec,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.results_db.first_weeks import CAMPAIGNS, write_first_weeks
from tests.results_db.next_version import (
    NEXT,
    THIS,
    WITH_NEXT,
    become_next_version,
    become_this_version,
)
from tests.results_db.sealed import sealed


def test_scripts_are_named_after_revisions_up_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for head in (THIS, NEXT):
        folders = [str(folder) for folder in migrate.VERSIONS]
        scripts = ScriptDirectory(str(migrate.SCRIPTS), version_locations=folders)
        found = {script.revision: Path(script.path).name for script in scripts.walk_revisions()}
        assert all(name.startswith(f"{revision}_") for revision, name in found.items())
        assert sorted(found) == list(migrate.revisions(migrate.VERSIONS))
        assert migrate.head() == scripts.get_current_head() == head
        become_next_version(monkeypatch)


def assert_as_described(url: str) -> None:
    """The database has the tables, indexes, references and checks of the models."""
    with closing(Database(url)) as database, database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        found = inspect(connection)
        for table in Base.metadata.sorted_tables:
            # Alembic does not compare check constraints, and PostgreSQL writes them in other words.
            described = {
                str(c.name): str(c.sqltext) for c in table.constraints if hasattr(c, "sqltext")
            }
            kept = {c["name"]: c["sqltext"] for c in found.get_check_constraints(table.name)}
            assert kept.keys() == described.keys(), table.name
            assert kept == described or connection.dialect.name != "sqlite", table.name
            references = {reference["name"] for reference in found.get_foreign_keys(table.name)}
            assert references == {each.name for each in table.foreign_key_constraints}


def test_the_migrations_build_what_the_models_describe(database_url: str) -> None:
    assert_as_described(database_url)
    made_as_new = tables_of(database_url)
    migrate.downgrade(database_url, "base")
    with closing(Database(database_url)) as database:
        assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    migrate.upgrade(database_url)
    assert_as_described(database_url)
    assert tables_of(database_url) == made_as_new


@pytest.mark.parametrize(
    ("revision", "table", "column"),
    [
        ("r007", "measurements", "own_share"),
        ("r008", "campaigns", "to_beat"),
        ("r009", "campaigns", "waiting_because"),
        ("r010", "node_quarantines", "scope"),
        ("r010", "workers", "num_unusable"),
        ("r011", "campaigns", "host_failures"),
        ("r012", "trials", "job"),
        ("r013", "workers", "trainer_knobs"),
        ("r014", "trials", "recompute_layers"),
        ("r014", "trials", "offload"),
        ("r016", "trials", "pipeline_layout"),
        ("r017", "tokens", "owner"),
        ("r017", "campaigns", "visibility"),
        ("r017", "events", "owner"),
    ],
)
def test_an_older_database_gets_the_column_that_it_lacks(
    database_url: str, revision: str, table: str, column: str
) -> None:
    migrate.downgrade(database_url, revision)
    with closing(Database(database_url)) as database:
        columns = inspect(database.engine).get_columns(table)
        assert column not in {each["name"] for each in columns}
    migrate.upgrade(database_url)
    assert_as_described(database_url)


@pytest.mark.parametrize(
    ("revision", "layout", "message"),
    [
        ("r015", Layout(recompute="mlp"), "recompute=mlp"),
        ("r015", Layout(offload="activations"), "offload=activations"),
        ("r016", Layout(pp=2, vpp=2, schedule="zbv", num_microbatches=4), "schedule=zbv"),
        ("r016", Layout(pp=2, pipeline_layout="Ettt|tL"), r"pipeline_layout=Et\*3\|tL"),
    ],
)
def test_a_downgrade_drops_no_words_of_trials(
    database_url: str, revision: str, layout: Layout, message: str
) -> None:
    with closing(Store(database_url)) as store:
        store.trials.add(make_campaign(store), layout)
    with pytest.raises(DatabaseInvalidError, match=f"{message}, which the earlier"):
        migrate.downgrade(database_url, revision)
    assert_as_described(database_url)


def test_an_older_database_takes_narrow_precisions_after_the_upgrade(database_url: str) -> None:
    with closing(Store(database_url)) as store:
        trial = store.trials.add(make_campaign(store), Layout()).id
    migrate.downgrade(database_url, "r014")
    write = f"UPDATE trials SET precision = 'fp8_block' WHERE id = {trial}"
    with closing(Database(database_url)) as database:
        with pytest.raises(IntegrityError), database.write() as session:
            session.connection().exec_driver_sql(write.replace("fp8_block", "mxfp8"))
        migrate.upgrade(database_url)
        with database.write() as session:
            assert session.connection().exec_driver_sql(write).rowcount == 1
    assert_as_described(database_url)
    with pytest.raises(DatabaseInvalidError, match=r"precision=fp8_block, which the earlier"):
        migrate.downgrade(database_url, "r014")
    assert_as_described(database_url)


def test_a_new_database_is_made_without_alembic(tmp_path: Path) -> None:
    code = f"""
from layout_tuner.results_db.migrations import migrate
migrate.upgrade("sqlite:///{tmp_path}/new.db")
import sys; sys.exit("alembic" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert migrate.revision(f"sqlite:///{tmp_path}/new.db") == migrate.head()


def test_upgrading_twice_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'results.sqlite3'}"
    with pytest.raises(SchemaOutdatedError, match="revision none"):
        migrate.check(url)
    migrate.upgrade(url)
    before = (tmp_path / "results.sqlite3").read_bytes()
    migrate.upgrade(url)
    assert (tmp_path / "results.sqlite3").read_bytes() == before


def test_a_database_of_the_next_version_is_refused_and_left_as_it_is(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next_version(monkeypatch)
    migrate.upgrade(database_url)
    become_this_version(monkeypatch)
    if database_url.startswith("sqlite"):
        before = (tmp_path / "data" / "results.sqlite3").read_bytes()
        with pytest.raises(SchemaNewerError, match=f"{NEXT}.*newer version"):
            Store.open(DataDir(tmp_path / "data"))
        assert (tmp_path / "data" / "results.sqlite3").read_bytes() == before
    for refused in (migrate.upgrade, migrate.check, migrate.revision, Store.connect):
        with pytest.raises(SchemaNewerError, match=f"{NEXT}.*newer version"):
            refused(database_url)
    become_next_version(monkeypatch)
    assert migrate.check(database_url) == NEXT


def test_an_older_database_keeps_its_quarantines_and_counts_the_nodes(
    database_url: str,
) -> None:
    with closing(Store(database_url)) as store:
        worker = make_worker(store, nodes=[NodeBody(name="n1", num_devices=8)])
        slow = NodeStatusBody(name="n1", state="quarantined", reason="slow")
        send_beats(store, worker.id, [], status=StatusBody(nodes=[slow]))
        store.allocations.quarantine_node("local-cpu", "n1", "loud")
    migrate.downgrade(database_url, "r009")
    migrate.upgrade(database_url)
    with closing(Store(database_url)) as store:
        (node,) = store.allocations.nodes()
        kept = (node.quarantine.reason, node.quarantine.reported_by, node.quarantine.scope)
        assert kept == ("loud", "", "")
        assert store.workers.find()[0].num_unusable == 1


def test_tokens_and_campaigns_of_before_have_owners(database_url: str) -> None:
    with closing(Store(database_url)) as store:
        store.access.create_token("ann", "submitter")
        bob = store.by(Actor(name="bob", role="submitter"))
        make_campaign(bob, "of-bob")
        make_campaign(store, "of-the-service")
    migrate.downgrade(database_url, "r017")
    with closing(Database(database_url)) as database:
        assert not {"owners", "quotas"} & set(inspect(database.engine).get_table_names())
    migrate.upgrade(database_url)
    assert check_database(database_url).findings == ()
    with closing(Store(database_url)) as store:
        found = {each.name: (each.weight, each.groups) for each in store.owners.all()}
        assert found == dict.fromkeys(("ann", "bob", "system"), (1.0, ()))
        assert [each.owner for each in store.access.tokens()] == ["ann"]
        assert {each.visibility for each in store.campaigns.find()} == {"everyone"}
        (own,) = store.seen_by("bob").campaigns.find(chosen=CampaignFilter(created_by="bob"))
        assert own.name == "of-bob"


@pytest.mark.parametrize("visibility", ["private", "group"])
def test_a_downgrade_shows_nobody_what_is_hidden(database_url: str, visibility: Any) -> None:
    with closing(Store(database_url)) as store:
        store.owners.put_group("lab", members=["ann"], known_members=False)
        ann = store.by(Actor(name="ann", role="submitter"))
        sharing = Sharing(visibility=visibility)
        ann.campaigns.create(make_spec("hidden"), num_legal_layouts=1, sharing=sharing)
    with pytest.raises(DatabaseInvalidError, match=rf"visibility={visibility}, which the earlier"):
        migrate.downgrade(database_url, "r017")
    assert_as_described(database_url)
    with closing(Store(database_url)) as store:
        assert store.seen_by("bob").campaigns.find() == []


@pytest.mark.parametrize("how", ["garbage", "directory", "damaged"])
def test_a_database_that_is_none_is_refused_by_its_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / how / "results.sqlite3"
    path.parent.mkdir(mode=0o700)
    if how == "garbage":
        path.write_bytes(b"no database, but long enough to be taken for one. " * 100)
    elif how == "directory":
        path.mkdir()
    else:
        migrate.upgrade(f"sqlite:///{path}")
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes(len(content) - 100))
    for open_it in (
        partial(Store.open, DataDir(path.parent)),
        partial(migrate.check, f"sqlite:///{path}"),
        Store(f"sqlite:///{path}").campaigns.find,
    ):
        with pytest.raises(DatabaseUnavailableError, match=r"results\.sqlite3 cannot be used: "):
            open_it()


def run(url: str, *statements: str) -> None:
    """Runs statements; on SQLite references are not looked at."""
    with closing(Database(url)) as database, database.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            connection.connection.driver_connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.commit()


def test_refused_rows_stop_an_upgrade(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store(database_url)) as store:
        make_worker(store, devices_per_node=65)
    become_next_version(monkeypatch)
    with pytest.raises(
        DatabaseInvalidError, match=r"ck_workers_devices_are_few.*left as it was: put those"
    ):
        migrate.upgrade(database_url)
    assert migrate.revision(database_url) == THIS
    run(database_url, "UPDATE workers SET devices_per_node = 64")
    migrate.upgrade(database_url)
    assert migrate.check(database_url) == NEXT


def test_orphaned_rows_stop_an_upgrade(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sqlite_url, "INSERT INTO trial_logs VALUES (7, 'a log of no trial')")
    become_next_version(monkeypatch)
    with pytest.raises(DatabaseInvalidError, match="row 7 of trial_logs refers to a row of trials"):
        migrate.upgrade(sqlite_url)
    assert migrate.revision(sqlite_url) == THIS


UPGRADE = """
import sys
from pathlib import Path
from layout_tuner.results_db.migrations import migrate

migrate.VERSIONS = tuple(Path(folder) for folder in sys.argv[2:])
refuse_orphans = migrate._refuse_orphans

def pause_before_the_commit(connection):
    print("before the commit", flush=True)
    sys.stdin.readline()
    refuse_orphans(connection)

migrate._refuse_orphans = pause_before_the_commit
print("begins", flush=True)
migrate.upgrade(sys.argv[1])
"""
"""A process of the next version: it upgrades a database and waits for a line before the commit."""


def start_upgrade(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", UPGRADE, url, *map(str, WITH_NEXT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_upgrade_changes_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(database_url)) as store:
        make_campaign(store)
    with start_upgrade(database_url) as process:
        assert process.stdout.readline() == "begins\n"
        assert process.stdout.readline() == "before the commit\n"
        process.kill()
    assert migrate.check(database_url) == THIS
    assert check_database(database_url).findings == ()
    become_next_version(monkeypatch)
    migrate.upgrade(database_url)
    assert migrate.check(database_url) == NEXT
    with closing(Store(database_url)) as store:
        assert [campaign.notes for campaign in store.campaigns.find()] == ["no notes"]


@pytest.mark.slow
def test_of_two_upgrades_at_once_one_waits_and_finds_it_done(
    database_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_upgrade(database_url) as first:
        assert first.stdout.readline() == "begins\n"
        assert first.stdout.readline() == "before the commit\n"
        second = start_upgrade(database_url)
        assert second.stdout.readline() == "begins\n"
        if not database_url.startswith("sqlite"):
            server = request.getfixturevalue("postgres_server")
            while not is_anybody_waiting(server, database_url):
                assert second.poll() is None
        ends = [process.communicate("\n", timeout=60)[1] for process in (first, second)]
    assert (first.returncode, second.returncode, ends) == (0, 0, ["", ""])
    become_next_version(monkeypatch)
    assert migrate.check(database_url) == NEXT


CHANGED = {("campaigns", "notes")}
"""Columns whose values the next version's migration rewrites."""


@pytest.fixture(params=["sqlite", "postgresql"])
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a group's database that this version wrote; from here on it is the next version."""
    url = write_first_weeks(tmp_path / "results.sqlite3")
    if request.param == "postgresql":
        url = request.getfixturevalue("empty_postgres_url")
        restore_into_postgresql(sealed(tmp_path / "results.sqlite3"), url)
    become_next_version(monkeypatch)
    return url


def rows(path: str) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table of a SQLite, by column, in the order of their keys."""
    with closing(sqlite3.connect(path.removeprefix("sqlite:///"))) as connection:
        connection.row_factory = sqlite3.Row
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {
            name: [dict(row) for row in connection.execute(_in_order(connection, name))]
            for (name,) in names.fetchall()
            if name not in ("alembic_version", "sqlite_sequence")
        }


def _in_order(connection: sqlite3.Connection, table: str) -> str:
    columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
    key = ", ".join(f'"{column["name"]}"' for column in columns if column["pk"])
    return f"SELECT * FROM {table} ORDER BY {key}"


def rows_of(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The same of a database of either kind; that of a PostgreSQL goes through a backup."""
    if url.startswith("sqlite"):
        return rows(url)
    path = folder / "rows.sqlite3"
    back_up(url, path, replace=True)
    return rows(str(path))


def test_an_upgrade_keeps_every_value_and_a_downgrade_too(written: str, tmp_path: Path) -> None:
    before = rows_of(written, tmp_path)
    migrate.upgrade(written)
    assert migrate.check(written) == NEXT
    assert check_database(written).findings == ()
    after = rows_of(written, tmp_path)
    for table, kept in before.items():
        assert len(after[table]) == len(kept), table
        for old, new in zip(kept, after[table], strict=True):
            changed = {name for name, value in old.items() if new[name] != value}
            assert {(table, name) for name in changed} <= CHANGED
    assert sum(map(len, before.values())) > 150
    assert {row["notes"] for row in after["campaigns"]} == {"no notes"}
    assert all(row["importance"] == row["last_number"] > 0 for row in after["campaigns"])
    layouts: dict[int, set[str]] = {}
    for trial in after["trials"]:
        layouts.setdefault(trial["campaign_id"], set()).add(trial["layout_key"])
    assert layouts.keys() == {row["id"] for row in after["campaigns"]}
    found = {row["campaign_id"]: row["num_layouts"] for row in after["campaign_layouts"]}
    assert found == {campaign: len(keys) for campaign, keys in layouts.items()}
    migrate.downgrade(written, THIS)
    assert rows_of(written, tmp_path) == before
    migrate.upgrade(written)
    assert check_database(written).findings == ()


@pytest.mark.sqlite_is_enough
def test_its_campaigns_read_as_they_stood_and_work_goes_on_where_it_was(
    written: str, clock: TurnableClock
) -> None:
    migrate.upgrade(written)
    clock.forward(600)
    with closing(TimelyStore(written, clock=clock)) as store:
        found = {campaign.name: campaign.state for campaign in store.campaigns.find()}
        assert found == CAMPAIGNS
        pilot = store.campaigns.by_name("pilot")
        (first, *_) = store.leaderboard.ranked_layouts(pilot.id, "tokens_per_s", limit=1)
        assert first.trial.measurement.tokens_per_s == 1000.0 + 70 * 7
        states = store.campaigns.count_trials(pilot.id)
        assert (states["COMPLETED"], states["INFEASIBLE"], states["FAILED"]) == (10, 1, 1)
        campaign = store.campaigns.by_name("at-work")
        (running,) = store.trials.find(campaign.id, states=["RUNNING"])
        beat = BeatBody(trial_id=running.id, attempt=running.attempt, iterations_done=3)
        assert send_beats(store, running.worker_id, [beat]).stop == ()
        assert post_outcome(store, running.id, 1, completed(running.layout)).state == "COMPLETED"
        (lease,) = take_leases(store, running.worker_id, 9)
        assert lease.campaign_name == "at-work"
        assert post_outcome(store, lease.trial_id, 1, completed(lease.layout)).accepted
        assert store.campaigns.resume(store.campaigns.by_name("on-hold").id).state == "RUNNING"
        (lease,) = take_leases(store, running.worker_id, 9)
        assert lease.campaign_name == "on-hold"
