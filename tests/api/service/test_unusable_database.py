"""What starts on a database that is none says so in one line, and leaves it as it is."""

from pathlib import Path

import pytest

from tests.api.process import run_command


@pytest.mark.parametrize("command", ["serve", "driver", "up"])
@pytest.mark.parametrize("how", ["garbage", "directory"])
def test_a_database_that_is_none_is_one_clear_error(tmp_path: Path, how: str, command: str) -> None:
    database = tmp_path / "results.sqlite3"
    garbage = b"no database, but long enough to be taken for one. " * 100
    if how == "garbage":
        database.write_bytes(garbage)
    else:
        database.mkdir()
    port = () if command == "driver" else ("--port", "0")
    refused = run_command(command, "--data-dir", str(tmp_path), *port)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"Error: the database {database} cannot be used: ")
    if how == "garbage":
        assert database.read_bytes() == garbage
