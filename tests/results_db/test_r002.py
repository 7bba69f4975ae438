"""The migration to r002: leaderboards of r001 get the columns of lists, and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from results_db.admin import migrate
from results_db.admin.integrity import check_database
from results_db.admin.restore import restore_into_postgresql
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.test_upgraded_databases import rows_of


@pytest.fixture(params=["sqlite", "postgresql"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with ranked layouts, repeats and failures."""
    url = write_first_weeks(tmp_path / "results.sqlite3")
    if request.param == "postgresql":
        url = str(request.getfixturevalue("empty_postgres_url"))
        restore_into_postgresql(tmp_path / "results.sqlite3", url)
    return url


def test_leaderboards_come_back_whole_from_r001(written: str, tmp_path: Path) -> None:
    before = rows_of(written, tmp_path)["standings"]
    migrate.downgrade(written, "r001")
    # A backup, which `rows_of` makes of PostgreSQL, is refused below this version's schema.
    if written.startswith("sqlite"):
        of_r001 = rows_of(written, tmp_path)["standings"]
        assert not {"tp", "measured_mfu"} & of_r001[0].keys()
        kept = of_r001[0].keys()
        assert of_r001 == [{name: row[name] for name in kept} for row in before]
    migrate.upgrade(written)
    assert rows_of(written, tmp_path)["standings"] == before
    assert len(before) > 5
    assert {row["tp"] for row in before} > {1}
    assert check_database(written).findings == ()
