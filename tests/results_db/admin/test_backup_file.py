"""Backups of both kinds of database, taken while it is at work, and put back into either kind."""

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from layout_tuner.results_db.admin.backup_file import back_up
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.admin.restore import restore_into_data_dir, restore_into_postgresql
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.errors import (
    BackupInvalidError,
    BackupPathError,
    DatabaseInUseError,
    DatabaseNotEmptyError,
    DatabaseUnavailableError,
    SchemaNewerError,
)
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import TurnableClock, make_campaign, make_worker, run_trial
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.migrations.test_migrate import rows
from tests.results_db.next_version import NEXT, THIS, become_next_version, become_this_version
from tests.results_db.sealed import sealed


def fill(store: Store, num_trials: int = 3) -> int:
    campaign = make_campaign(store)
    for size in range(1, num_trials + 1):
        run_trial(store, campaign, Layout(micro_batch_size=size))
    return campaign


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A backup of another database, with seven campaigns."""
    write_first_weeks(tmp_path / "other.sqlite3")
    return sealed(tmp_path / "other.sqlite3")


@pytest.fixture
def backup(store: Store, database_url: str, tmp_path: Path) -> Path:
    """A backup of a database with three measured trials, of either kind."""
    fill(store)
    store.events.number()
    path = tmp_path / "backup.sqlite3"
    report = back_up(database_url, path)
    assert (report.num_campaigns, report.num_trials) == (1, 3)
    assert report.num_bytes == path.stat().st_size
    return path


def test_a_backup_is_a_whole_file_for_its_owner(
    backup: Path, store: Store, clock: TurnableClock
) -> None:
    assert backup.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in backup.parent.iterdir() if "backup" in path.name] == [backup.name]
    assert check_database(f"sqlite:///{backup}").findings == ()
    with closing(Store(f"sqlite:///{backup}", clock=clock)) as copy:
        assert copy.campaigns.find() == store.campaigns.find()
        for number in (1, 2, 3):
            assert copy.trials.detail(number) == store.trials.detail(number)
        assert copy.events.find(after=0, limit=99) == store.events.find(after=0, limit=99)


@pytest.mark.sqlite_is_enough
def test_a_restored_database_is_whole_and_goes_on(
    backup: Path, empty_postgres_url: str, tmp_path: Path
) -> None:
    restore_into_postgresql(backup, empty_postgres_url)
    assert check_database(empty_postgres_url).findings == ()
    back_up(empty_postgres_url, tmp_path / "again.sqlite3")
    assert rows(str(tmp_path / "again.sqlite3")) == rows(str(backup))
    restore_into_data_dir(backup, DataDir(tmp_path / "restored"))
    for url in (empty_postgres_url, DataDir(tmp_path / "restored").database_url):
        with closing(Store(url)) as store:
            campaign = make_campaign(store, "next")
            # Those of trials that were made after the backup are known to workers still.
            assert campaign == 1_002
            assert store.trials.add(campaign, Layout()).id == 100_004
            store.events.number()
            seqs = [event.seq for event in store.events.find(after=0, limit=99)]
            assert seqs == sorted(set(seqs))


def test_backups_of_every_schema_are_made_and_restored_into_both_kinds(
    empty_postgres_url: str, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore_into_postgresql(other, empty_postgres_url)
    become_next_version(monkeypatch)
    # Before an upgrade is when a backup is wanted most.
    assert back_up(empty_postgres_url, tmp_path / "copy.sqlite3").revision == THIS
    assert rows(str(tmp_path / "copy.sqlite3")) == rows(str(other))
    url = write_first_weeks(other)
    migrate.upgrade(url)
    into_file = restore_into_data_dir(sealed(other), DataDir(tmp_path / "data"))
    into_postgresql = restore_into_postgresql(other, empty_postgres_url, replace=True)
    assert (into_file.revision, into_file.findings) == (NEXT, ())
    assert (into_postgresql.revision, into_postgresql.findings) == (NEXT, ())
    back_up(empty_postgres_url, tmp_path / "of-postgresql.sqlite3")
    assert rows(str(tmp_path / "of-postgresql.sqlite3")) == rows(
        str(tmp_path / "data" / "results.sqlite3")
    )


@pytest.mark.sqlite_is_enough
def test_owners_groups_and_quotas_go_between_databases(
    empty_postgres_url: str, other: Path, tmp_path: Path
) -> None:
    restore_into_postgresql(other, empty_postgres_url)
    back_up(empty_postgres_url, tmp_path / "again.sqlite3")
    before, after = rows(str(other)), rows(str(tmp_path / "again.sqlite3"))
    for table in ("owners", "owner_groups", "group_members", "quotas", "past_use"):
        assert before[table], table
        assert after[table] == before[table]
    with closing(Store(empty_postgres_url)) as store:
        lab, site = store.owners.groups()
        assert (lab.members, site.members, lab.weight) == (("ann", "bob", "cid"), ("cid",), 2.0)
        assert [each.owner for each in store.access.tokens()] == ["ann"]
        store.owners.note_claimed_groups("cid", [])
        assert [each.members for each in store.owners.groups()] == [("ann", "bob"), ()]


@pytest.mark.sqlite_is_enough
def test_the_wall_time_of_a_restored_campaign_stands_until_a_worker_is_there(
    store: Store, database_url: str, clock: TurnableClock, tmp_path: Path
) -> None:
    campaign = make_campaign(store)
    make_worker(store)
    store.driver.move_clocks()
    clock.forward(5)
    store.driver.move_clocks()
    back_up(database_url, tmp_path / "backup.sqlite3")
    place = DataDir(tmp_path / "restored")
    restore_into_data_dir(tmp_path / "backup.sqlite3", place)
    clock.forward(60)
    with closing(Store(place.database_url, clock=clock)) as restored:
        for _ in range(10):
            clock.forward(10)
            assert restored.campaigns.get(campaign).wall_time_s == 5
            restored.driver.move_clocks()
        make_worker(restored)
        restored.driver.move_clocks()
        clock.forward(2)
        assert restored.campaigns.get(campaign).wall_time_s == 7


def test_a_backup_is_of_the_moment_at_which_it_began(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.results_db.admin.backup_file._PAGES_AT_ONCE", 10)
    said: list[str] = []
    with closing(Store(sqlite_url)) as store:
        campaign = fill(store)

        def say(words: str) -> None:
            assert len(said) < 1000, "the backup begins again after each change"
            if words.startswith("copying"):
                store.trials.add(campaign, Layout(micro_batch_size=10 + len(said)))
            said.append(words)

        before = store.campaigns.count_trials(campaign)
        report = back_up(sqlite_url, tmp_path / "copy.sqlite3", say=say)
        after = store.campaigns.count_trials(campaign)
    assert report.num_trials == sum(before.values())
    assert sum(after.values()) == sum(before.values()) + len(said) - 1
    assert len(said) > 5
    assert said[-2:] == ["copying: 100%", "checking the copy"]
    assert check_database(f"sqlite:///{report.path}").findings == ()


@pytest.mark.slow
def test_a_backup_at_work_is_of_one_moment(store: Store, database_url: str, tmp_path: Path) -> None:
    campaign = fill(store)
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        for size in range(10, 10_000):
            if stop.is_set():
                return
            written.append(store.trials.add(campaign, Layout(micro_batch_size=size)).id)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(3):
            least = len(written)
            report = back_up(database_url, tmp_path / f"{number}.sqlite3")
            assert report.num_trials >= 3 + least
            # Counters, events and trials agree only where all are of one moment.
            assert check_database(f"sqlite:///{report.path}").findings == ()
    finally:
        stop.set()
        thread.join()
    assert len(written) > 3


def test_a_backup_replaces_a_file_on_wish_and_never_the_database(
    sqlite_url: str, tmp_path: Path
) -> None:
    backup, database = tmp_path / "backup", Path(sqlite_url.removeprefix("sqlite:///"))
    backup.write_bytes(b"something")
    with pytest.raises(BackupPathError, match=r"is there already.*--force"):
        back_up(sqlite_url, backup)
    assert backup.read_bytes() == b"something"
    back_up(sqlite_url, backup, replace=True)
    assert check_database(f"sqlite:///{backup}").findings == ()
    # Whoever has it open would go on writing to a file that has lost its name.
    before = database.read_bytes()
    (tmp_path / "link").symlink_to(database)
    for path in (database, tmp_path / "link"):
        with pytest.raises(BackupPathError, match="is the database itself"):
            back_up(sqlite_url, path, replace=True)
    assert database.read_bytes() == before


def test_a_backup_that_cannot_be_made_leaves_nothing(sqlite_url: str, tmp_path: Path) -> None:
    with pytest.raises(BackupPathError, match=r"missing/b cannot be written: No such file"):
        back_up(sqlite_url, tmp_path / "missing" / "b")
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(BackupPathError, match="Permission denied"):
            back_up(sqlite_url, tmp_path / "closed" / "b")
    with pytest.raises(DatabaseUnavailableError, match="no database to back up"):
        back_up(f"sqlite:///{tmp_path / 'none.sqlite3'}", tmp_path / "backup")
    path = tmp_path / "results.sqlite3"
    write_first_weeks(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    with pytest.raises((BackupInvalidError, DatabaseUnavailableError), match=r"damaged|malformed"):
        back_up(f"sqlite:///{path}", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert not list(tmp_path.glob("**/*.part"))


@pytest.fixture
def full(sqlite_url: str, tmp_path: Path) -> DataDir:
    """A data directory whose database holds a campaign with three trials; nobody has it open."""
    with closing(Store(sqlite_url)) as store:
        fill(store)
    return DataDir(tmp_path / "data")


def test_an_empty_database_is_just_replaced(sqlite_url: str, other: Path, tmp_path: Path) -> None:
    report = restore_into_data_dir(other, DataDir(tmp_path / "data"))
    assert (report.num_campaigns, report.set_aside) == (7, None)


NO_BACKUPS: dict[str, tuple[bytes | None, type[Exception]]] = {
    "is no backup": (b"no database, but long enough to be one. " * 100, BackupInvalidError),
    "was cut off": (b"", BackupInvalidError),
    "there is no file": (None, BackupPathError),
}
"""What a file holds that is no backup, None where there is none, by how it is refused."""


def test_a_full_database_is_replaced_only_when_asked(
    full: DataDir, other: Path, tmp_path: Path
) -> None:
    place = full.path / "results.sqlite3"
    before = rows(str(place))
    with pytest.raises(DatabaseNotEmptyError, match=r"holds a database already: --force"):
        restore_into_data_dir(other, full)
    for lock in ("serve", "driver"):
        refused = pytest.raises(DatabaseInUseError, match=f"{lock}.lock.*stop it first")
        with full.lock(lock), refused:
            restore_into_data_dir(other, full, replace=True)
    with closing(Store(full.database_url)) as store:
        store.campaigns.find()
        with pytest.raises(DatabaseInUseError, match="open; end it first"):
            restore_into_data_dir(other, full, replace=True)
    for words, (content, error) in NO_BACKUPS.items():
        file = tmp_path / words
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(error, match=words):
            restore_into_data_dir(file, full, replace=True)
    assert rows(str(place)) == before
    assert not [*full.path.glob("*before-restore*"), *full.path.glob(".*part*")]
    report = restore_into_data_dir(other, full, replace=True)
    assert report.set_aside is not None
    assert rows(str(report.set_aside)) == before
    assert len(rows(str(place))["campaigns"]) == report.num_campaigns == 7


def test_a_postgresql_is_replaced_whole_or_not_at_all(postgres_url: str, other: Path) -> None:
    with closing(Store(postgres_url)) as store:
        fill(store)
        with pytest.raises(DatabaseInUseError, match="stop them first"):
            restore_into_postgresql(other, postgres_url, replace=True)
    with pytest.raises(DatabaseNotEmptyError, match=r"rows in .*campaigns.*--force"):
        restore_into_postgresql(other, postgres_url)
    with closing(sqlite3.connect(other)) as connection, connection:
        # SQLite keeps it; PostgreSQL has no such text.
        connection.execute("UPDATE trials SET message = 'a' || char(0) || 'b' WHERE id = 3")
    with pytest.raises(BackupInvalidError, match="PostgreSQL cannot keep the rows of trials"):
        restore_into_postgresql(sealed(other), postgres_url, replace=True)
    with closing(Store(postgres_url)) as store:
        assert [campaign.name for campaign in store.campaigns.find()] == ["first"]
    write_first_weeks(other)
    assert restore_into_postgresql(sealed(other), postgres_url, replace=True).num_campaigns == 7
    assert check_database(postgres_url).findings == ()


def test_a_backup_that_the_next_version_made_is_refused_by_this_one(
    full: DataDir, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = tmp_path / "backup"
    url = write_first_weeks(tmp_path / "next.sqlite3")
    become_next_version(monkeypatch)
    migrate.upgrade(url)
    assert back_up(url, backup).revision == NEXT
    become_this_version(monkeypatch)
    before = rows(full.database_url)
    for restore in (
        lambda: restore_into_data_dir(backup, full, replace=True),
        lambda: restore_into_postgresql(backup, postgres_url, replace=True),
    ):
        with pytest.raises(SchemaNewerError, match=NEXT):
            restore()
    assert rows(full.database_url) == before
    assert migrate.check(postgres_url) == THIS


def test_a_damaged_database_is_replaced_with_all_its_files(full: DataDir, other: Path) -> None:
    place = full.path / "results.sqlite3"
    place.write_bytes(b"\xff" * 8192)
    place.with_name("results.sqlite3-wal").write_bytes(b"frames of another database")
    report = restore_into_data_dir(other, full, replace=True)
    assert report.set_aside.read_bytes() == b"\xff" * 8192
    assert not place.with_name("results.sqlite3-wal").exists()
    with closing(Store(full.database_url)) as store:
        assert len(store.campaigns.find()) == 7


def test_events_without_a_number_have_one_in_a_backup(postgres_url: str, tmp_path: Path) -> None:
    # On PostgreSQL they are numbered a moment after the commit; in a file nobody would ever do it.
    with closing(Store(postgres_url)) as store:
        make_campaign(store)
        assert store.statistics.service_stats().unnumbered_events == 1
    back_up(postgres_url, tmp_path / "backup.sqlite3")
    copy = Database(f"sqlite:///{tmp_path / 'backup.sqlite3'}")
    with closing(copy), copy.read() as session:
        assert session.scalar(text("SELECT seq FROM events")) == 1
        assert session.scalar(text("SELECT last_seq FROM event_counter")) == 1
