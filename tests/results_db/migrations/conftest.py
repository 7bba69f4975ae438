"""A database with a group's rows, of either kind."""

from pathlib import Path

import pytest

from results_db.admin.restore import restore_into_postgresql
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.sealed import sealed


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with a group's rows."""
    own = write_first_weeks(tmp_path / "results.sqlite3")
    if request.param == "sqlite":
        return own
    other = str(request.getfixturevalue("empty_postgres_url"))
    restore_into_postgresql(sealed(tmp_path / "results.sqlite3"), other)
    return other
