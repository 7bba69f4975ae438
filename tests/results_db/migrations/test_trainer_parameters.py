"""Revision r003 adds the parameters of trainers, which are unknown of earlier sessions."""

from contextlib import closing
from pathlib import Path

import pytest

from results_db.admin.integrity import check_database
from results_db.admin.restore import restore_into_postgresql
from results_db.migrations import migrate
from results_db.store import Store
from tests.kit.store import make_worker
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.sealed import sealed


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_sessions_of_r002_offer_trainers_without_known_parameters(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = write_first_weeks(tmp_path / "results.sqlite3")
    with closing(Store.connect(url)) as store:
        make_worker(store, "earlier", cluster="c", trainers={"theirs": "1"})
    if kind == "postgresql":
        url = str(request.getfixturevalue("empty_postgres_url"))
        restore_into_postgresql(sealed(tmp_path / "results.sqlite3"), url)
    with closing(Store.connect(url)) as store:
        before = store.workers.find(live=False)
    migrate.downgrade(url, "r002")
    assert migrate.revision(url) == "r002"
    migrate.upgrade(url)
    assert check_database(url).findings == ()
    with closing(Store.connect(url)) as store:
        assert store.workers.find(live=False) == before
        assert store.workers.declared_parameters("c", "theirs") == [None]
        assert store.workers.declared_parameters("c", "ours") == []
