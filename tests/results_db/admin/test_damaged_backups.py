"""A damaged backup is refused with one line and changes nothing; a whole one is restored."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from results_db.admin.backup_file import back_up
from results_db.admin.commands import db
from results_db.admin.restore import restore_into_postgresql
from results_db.errors import BackupInvalidError
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.migrations.test_migrate import run
from tests.results_db.migrations.test_upgraded_databases import rows_of
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
