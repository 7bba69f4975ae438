"""Damaged backups are refused with one line; `db check` says where a file is damaged."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.service.postgres_server import PostgresServer, running_server
from layout_tuner.cli.processes.database import db
from layout_tuner.results_db.admin.backup_file import back_up
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.admin.restore import restore_into_postgresql
from layout_tuner.results_db.errors import BackupInvalidError
from layout_tuner.results_db.migrations import migrate
from tests.results_db.database.test_constraints import fill
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.migrations.test_migrate import rows_of, run
from tests.results_db.sealed import TRAILER, sealed

OBJECTS = {
    "the view plans is not part": "DROP TABLE plans; CREATE VIEW plans AS SELECT * FROM campaigns",
    "the table trials is not as": "UPDATE sqlite_master SET sql = replace(sql, 'tp >= 1', 'tp >= 0') "
    "WHERE name = 'trials'",
    "the trigger measurements_stay is not as": "DROP TRIGGER measurements_stay; CREATE TRIGGER "
    "measurements_stay BEFORE DELETE ON measurements WHEN 0 BEGIN SELECT 1; END",
    "Multiple rows were found": "INSERT INTO alembic_version VALUES ('r000')",
    "it states no revision": "DELETE FROM alembic_version",
    "refers to a row of trials": "INSERT INTO trial_logs VALUES (987654, 'of no trial')",
}
"""What is said of a backup, by what was done to its objects."""


class Bench:
    """A backup that is damaged, and the database that it must not replace."""

    def __init__(self, folder: Path, made_of: str, target: str) -> None:
        self.path = folder / "backup.sqlite3"
        back_up(made_of, self.path, replace=True)
        self.whole = self.path.read_bytes()
        self.database = TRAILER.sub(b"", self.whole)
        self._folder = folder
        self._target = target
        self._place = (
            ["--data-dir", str(folder / "data")]
            if target.startswith("sqlite")
            else ["--database", target]
        )
        self.before = self.content()

    def content(self) -> object:
        """What is in the target."""
        return rows_of(self._target, self._folder)

    def restore(self) -> Result:
        return CliRunner().invoke(db, ["restore", str(self.path), "--force", *self._place])

    def refusal(self, content: bytes) -> str:
        """The line with which a file is refused."""
        self.path.write_bytes(content)
        refused = self.restore()
        assert isinstance(refused.exception, SystemExit), refused.exc_info
        assert refused.exit_code == 1, refused.output
        assert refused.output.startswith("Error: ")
        assert refused.output.count("\n") == 1
        return refused.output

    def forged(self, *statements: str) -> bytes:
        """The backup after statements, with the length and checksum of what it then holds."""
        self.path.write_bytes(self.database)
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(";".join(("PRAGMA writable_schema = ON", *statements)))
        return sealed(self.path).read_bytes()


@pytest.fixture
def bench(tmp_path: Path, sqlite_url: str) -> Bench:
    write_first_weeks(tmp_path / "first.sqlite3")
    return Bench(tmp_path, f"sqlite:///{tmp_path / 'first.sqlite3'}", sqlite_url)


def test_a_backup_ends_with_its_length_and_checksum_and_is_restored(bench: Bench) -> None:
    assert bench.path.read_bytes() == sealed(bench.path).read_bytes()
    with closing(sqlite3.connect(bench.path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert bench.path.read_bytes() == bench.whole
    assert bench.restore().exit_code == 0
    assert bench.content() != bench.before


def test_a_backup_that_was_cut_off_or_changed_anywhere_is_refused(bench: Bench) -> None:
    length, end = len(bench.whole), len(bench.database)
    for at in (0, 1, 15, 100, 4096, length // 2, end - 1, end, end + 1, length - 1):
        assert "was cut off or changed" in bench.refusal(bench.whole[:at])
        assert "was cut off or changed" in bench.refusal(bench.whole[at + 1 :])
    for size in (1, 4096):
        middle = bench.whole[:8192] + bench.whole[8192 + size :]
        assert "was cut off or changed" in bench.refusal(middle)
    assert "was cut off or changed" in bench.refusal(bench.whole + b"\n")
    for at in (0, 20, 28, 100, 150, 3000, len(bench.whole) // 2, len(bench.whole) - 100, -1):
        content = bytearray(bench.whole)
        content[at] ^= 0x20
        assert "was cut off or changed" in bench.refusal(bytes(content))
    assert bench.content() == bench.before


def test_a_backup_with_other_objects_than_its_revision_is_refused(bench: Bench) -> None:
    for said, statements in OBJECTS.items():
        assert said in bench.refusal(bench.forged(statements))
    named = bench.forged("PRAGMA user_version = 0").replace(
        b"CREATE TRIGGER", b"CREATE \xff\xfeIGGER"
    )
    bench.path.write_bytes(named)
    assert "damaged" in bench.refusal(sealed(bench.path).read_bytes())
    assert bench.content() == bench.before


def test_a_database_with_other_objects_makes_no_backup(sqlite_url: str, tmp_path: Path) -> None:
    run(sqlite_url, "DROP INDEX uq_tokens_name_live")
    with pytest.raises(BackupInvalidError, match="the index uq_tokens_name_live is missing"):
        back_up(sqlite_url, tmp_path / "backup.sqlite3")
    assert not (tmp_path / "backup.sqlite3").exists()


def test_rows_that_the_schema_refuses_make_no_backup(postgres_url: str, tmp_path: Path) -> None:
    run(
        postgres_url,
        "ALTER TABLE sweeps DROP CONSTRAINT pk_sweeps",
        "INSERT INTO sweeps SELECT * FROM sweeps",
    )
    with pytest.raises(BackupInvalidError, match="rows of sweeps break a rule of the schema"):
        back_up(postgres_url, tmp_path / "backup.sqlite3")


def damaged(bench: Bench, seed: int) -> bytes:
    """A backup that was cut, of which bytes have changed, or which has other objects."""
    chance = random.Random(seed)
    content = bytearray(bench.whole)
    length = len(content)
    kind = seed % 4
    if kind == 0:
        first = chance.choice((0, chance.randrange(length)))
        del content[first : chance.randrange(first, length) + 1]
    elif kind == 1:
        for at in chance.sample(range(length), chance.choice((1, 4, 40, 400))):
            content[at] ^= chance.randrange(1, 256)
    elif kind == 2:
        first = chance.randrange(length)
        content[first:first] = chance.randbytes(chance.choice((1, 112, 4096)))
    else:
        return bench.forged(*statements(bench, chance))
    return bytes(content)


def statements(bench: Bench, chance: random.Random) -> list[str]:
    """Statements that drop an object of a backup, and perhaps put a table in its place."""
    bench.path.write_bytes(bench.database)
    with closing(sqlite3.connect(bench.path)) as connection:
        query = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite%'"
        kind, name = chance.choice(connection.execute(query).fetchall())
    return [f"DROP {kind} {name}", *chance.choice(([], [f"CREATE TABLE {name} (id, version_num)"]))]


@pytest.mark.slow
def test_of_five_hundred_damaged_backups_none_is_restored(bench: Bench) -> None:
    for seed in range(500):
        bench.refusal(damaged(bench, seed))
    assert bench.content() == bench.before


@pytest.mark.slow
def test_of_a_hundred_damaged_backups_of_a_postgresql_none_is_restored(
    empty_postgres_url: str, sqlite_url: str, postgres_url: str, tmp_path: Path
) -> None:
    write_first_weeks(tmp_path / "first.sqlite3")
    restore_into_postgresql(sealed(tmp_path / "first.sqlite3"), empty_postgres_url)
    for target in (sqlite_url, postgres_url):
        bench = Bench(tmp_path, empty_postgres_url, target)
        for seed in range(50):
            bench.refusal(damaged(bench, seed))
        assert bench.content() == bench.before
        bench.path.write_bytes(bench.whole)
        assert bench.restore().exit_code == 0
        assert bench.content() != bench.before


PAGE = 8192
"""Bytes of a page of PostgreSQL."""


def overwrite(path: Path, page: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(page * size)
        file.write(b"\xa5" * size)


def root_page(path: Path, name: str) -> tuple[int, int]:
    """Where a table or an index of a SQLite begins, and how large its pages are."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = connection.execute(query, (name,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    return page - 1, size


@pytest.mark.parametrize("name", ["iterations", "trials", "alembic_version"])
def test_a_damaged_table_of_a_sqlite_is_named(sqlite_url: str, name: str) -> None:
    fill(sqlite_url)
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    overwrite(path, *root_page(path, name))
    report = check_database(sqlite_url)
    messages = [finding.message for finding in report.findings]
    (message,) = (each for each in messages if each.startswith(f"the table {name} is damaged ("))
    assert "restore the last good backup with `layout-tuner db restore`" in message
    assert report.checks == ("storage",)
    asked = CliRunner().invoke(db, ["check", "--data-dir", str(path.parent)])
    assert asked.exit_code == 1
    assert f"the table {name} is damaged" in asked.output


def test_a_damaged_index_of_a_sqlite_is_named(sqlite_url: str) -> None:
    fill(sqlite_url)
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    name = "ix_trials_campaign_id_state"
    overwrite(path, *root_page(path, name))
    (finding,) = check_database(sqlite_url).findings
    assert finding.message.startswith(f"the index {name} is damaged (")
    assert (
        f'its table is whole: stop the service and rebuild it in `sqlite3 results.sqlite3` with REINDEX "{name}"'
        in finding.message
    )


@pytest.fixture(
    scope="module", params=["full read", pytest.param("amcheck", marks=pytest.mark.slow)]
)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server for this module alone, which is stopped to damage its files.

    The package's PostgreSQL has no amcheck; one that is installed on this machine may have it.
    """
    programs = None
    if request.param == "amcheck":
        controls = Path("/usr/share/postgresql").glob("*/extension/amcheck.control")
        versions = sorted(int(control.parts[4]) for control in controls)
        if not versions or versions[-1] < 14:
            pytest.skip("no PostgreSQL with amcheck is installed")
        programs = Path(f"/usr/lib/postgresql/{versions[-1]}/bin")
    with running_server(programs=programs) as server:
        yield server


def has_amcheck(server: PostgresServer) -> bool:
    return bool(server.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'amcheck'"))


def filled(server: PostgresServer, name: str) -> str:
    server.execute(f"CREATE DATABASE {name}")
    if has_amcheck(server):
        server.execute("CREATE SCHEMA checks", name)
        server.execute("CREATE EXTENSION amcheck SCHEMA checks", name)
    url = server.url(name)
    migrate.upgrade(url)
    fill(url)
    return url


def damage(server: PostgresServer, database: str, relation: str) -> None:
    """Writes over the last page of a relation's file while the server is stopped."""
    ((path, size),) = server.execute(
        f"SELECT pg_relation_filepath('{relation}'), pg_relation_size('{relation}')", database
    )
    server.execute("CHECKPOINT")
    server.stop()
    overwrite(server.data / path, size // PAGE - 1, PAGE)
    server.start()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iterations", "alembic_version"])
def test_a_damaged_table_of_a_postgresql_is_named(server: PostgresServer, name: str) -> None:
    url = filled(server, f"damaged_{name}")
    damage(server, f"damaged_{name}", name)
    report = check_database(url)
    (finding,) = report.findings
    assert finding.message.startswith(f"the table {name} is damaged (")
    assert "block 0" in finding.message
    assert "restore the last good backup with `layout-tuner db restore`" in finding.message
    assert report.checks == ("storage",)


def test_a_damaged_index_of_a_postgresql_is_named_and_rebuilt(server: PostgresServer) -> None:
    url = filled(server, "damaged_index")
    name = "ix_trials_campaign_id_state"
    damage(server, "damaged_index", name)
    report = check_database(url)
    (finding,) = report.findings
    assert report.storage.startswith("amcheck" if has_amcheck(server) else "a full read")
    assert finding.message.startswith(f"the index {name} is damaged (")
    assert f'its table is whole: rebuild it with REINDEX INDEX "{name}"' in finding.message
    server.execute(f'REINDEX INDEX "{name}"', "damaged_index")
    assert check_database(url).findings == ()


def test_amcheck_finds_a_row_that_an_index_lacks(server: PostgresServer) -> None:
    if not has_amcheck(server):
        pytest.skip("its other parameter tests it")
    url = filled(server, "missing_row")
    hidden = "UPDATE pg_index SET indisready = {} WHERE indexrelid = 'pk_trial_logs'::regclass"
    server.execute(hidden.format("false"), "missing_row")
    server.execute(
        "INSERT INTO trial_logs (trial_id, tail) SELECT id, 'x' FROM trials "
        "WHERE id NOT IN (SELECT trial_id FROM trial_logs) LIMIT 1",
        "missing_row",
    )
    server.execute(hidden.format("true"), "missing_row")
    (finding,) = check_database(url).findings
    assert finding.message.startswith("the index pk_trial_logs is damaged (")


def test_amcheck_is_left_out_where_the_role_may_not_call_it(server: PostgresServer) -> None:
    url = filled(server, "not_permitted")
    server.execute("CREATE ROLE reader LOGIN")
    for grant in (
        "CREATE ON DATABASE not_permitted",
        "USAGE ON SCHEMA public",
        "ALL ON ALL TABLES IN SCHEMA public",
        "ALL ON ALL SEQUENCES IN SCHEMA public",
    ):
        server.execute(f"GRANT {grant} TO reader", "not_permitted")
    report = check_database(url.replace("postgres@", "reader@"))
    assert report.storage == "a full read, as amcheck is not installed or not permitted"
    assert report.findings == ()
