"""The migration to r007: trials get the columns of cheap probes, and a downgrade drops those."""

from __future__ import annotations

from pathlib import Path

from results_db.admin import migrate
from results_db.admin.integrity import check_database
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.results_db.factories import lease_one
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.test_r002 import written as written
from tests.results_db.test_upgraded_databases import rows, rows_of
from tests.results_db.trials.test_cheap_probes import FEWER, SMALLEST, Bench

COLUMNS = {"full_num_nodes", "full_dp", "full_num_microbatches", "num_layers"}


def test_trials_of_earlier_versions_run_their_layouts_in_full(written: str, tmp_path: Path) -> None:
    before = rows_of(written, tmp_path)
    migrate.downgrade(written, "r006")
    migrate.upgrade(written)
    after = rows_of(written, tmp_path)
    assert after == before
    assert {trial[name] for trial in after["trials"] for name in COLUMNS} == {None}


def test_a_downgrade_takes_a_campaign_s_cheap_probes_with_their_costs(database_url: str) -> None:
    store = Store(database_url)
    bench = Bench.of(store)
    cheap = bench.probe(fidelity=FEWER)
    store.repeat_trial(cheap.id)
    bench.run()
    whole = bench.probe(Layout(tp=2, num_microbatches=64)), bench.probe()
    bench.add(fidelity=SMALLEST)
    lease_one(store, bench.worker)
    store.close()
    migrate.downgrade(database_url, "r006")
    migrate.upgrade(database_url)
    store = Store(database_url)
    assert store.trials(bench.campaign) == list(whole)
    cost = sum(trial.node_seconds for trial in whole)
    assert 0 < store.campaign(bench.campaign).node_seconds == cost
    assert check_database(database_url).findings == ()
    store.close()


def test_r006_has_none_of_the_columns(tmp_path: Path) -> None:
    url = write_first_weeks(tmp_path / "results.sqlite3")
    migrate.downgrade(url, "r006")
    assert not COLUMNS & rows(url)["trials"][0].keys()
