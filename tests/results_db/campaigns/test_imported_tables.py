"""Cells of measurement tables as campaigns: what is stored, what stays unknown, and the export."""

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.results_db.campaigns.imported_tables import NewImport
from layout_tuner.results_db.errors import (
    CampaignDuplicateError,
    CampaignNotFoundError,
    CampaignStateError,
)
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell, read_table, write_table
from tests.kit.campaigns import spec_of
from tests.kit.store import front, make_campaign, make_spec, make_worker, take_leases
from tests.search_spaces.tables.tables import layouts, make_row, make_text

pytestmark = pytest.mark.sqlite_is_enough


def make_import(name: str, *rows: dict[str, Any]) -> NewImport:
    table = read_table(make_text(*rows))
    (cell,) = table.cells
    spec = spec_of(name=name, model=cell.model.to_mapping(), cluster=cell.cluster.to_mapping())
    return NewImport(spec=spec.to_mapping(), cell=cell, aside_columns=table.aside_columns)


def unnumbered(table: MeasurementTable) -> list[TableCell]:
    """The cells without the places that their rows had in a file."""
    return [
        replace(cell, rows=tuple(replace(row, number=0, line=0) for row in cell.rows))
        for cell in table.cells
    ]


def varied_rows() -> list[dict[str, Any]]:
    """Every status, a repeat, an unknown column, and what tables leave empty."""
    plain = [
        make_row(**layout, step_time_s=0.4 + 0.013 * place)
        for place, layout in enumerate(layouts()[:4])
    ]
    return [
        *plain,
        make_row(**layouts()[4], status="out_of_memory"),
        make_row(**layouts()[5], status="failed", peak_memory_bytes=3_000_000_000),
        make_row(**layouts()[0], step_time_s=0.45, zero_stage=0, peak_memory_bytes=""),
        make_row(**layouts()[6], sequence_parallel="", zero_stage="", vpp="", colour="red"),
    ]


@pytest.fixture
def theirs(store: Store) -> CampaignRecord:
    """The campaign of the varied rows."""
    (campaign,) = store.imports.add([make_import("theirs", *varied_rows())])
    return campaign


@pytest.mark.sqlite_is_enough(False)
def test_an_imported_table_comes_back_as_it_was(store: Store, theirs: CampaignRecord) -> None:
    original = read_table(make_text(*varied_rows()))
    found = store.imports.table(theirs.id)
    assert found.cells == original.cells
    assert found.aside_columns == ("colour",)
    again = read_table(write_table(found))
    assert unnumbered(again) == unnumbered(original)
    ours = make_campaign(store, "ours")
    with pytest.raises(CampaignNotFoundError, match="no imported campaign"):
        store.imports.table(ours)


def test_an_imported_table_keeps_how_attention_was_computed(store: Store) -> None:
    row = make_row(attention="unfused", attention_backend="unfused", dropout="0.1/0.2")
    new = make_import("theirs", row)
    (campaign,) = store.imports.add([new])
    (cell,) = store.imports.table(campaign.id).cells
    assert cell == new.cell
    assert cell.model.title == (
        "small-gpt (attention=unfused, attention_dropout=0.1, hidden_dropout=0.2)"
    )


def test_an_imported_campaign_has_ended_and_says_where_it_comes_from(
    theirs: CampaignRecord,
) -> None:
    assert (theirs.state, theirs.reason, theirs.strategy) == ("COMPLETED", "imported", "imported")
    assert theirs.message == "8 rows of a measurement table from made up"
    assert theirs.num_legal_layouts == 7


def test_an_imported_campaign_is_neither_driven_nor_leased_nor_changed(
    store: Store, theirs: CampaignRecord
) -> None:
    assert store.campaigns.to_drive() == []
    worker = make_worker(store, cluster="testbox")
    assert take_leases(store, worker.id, 9) == []
    for change in (store.campaigns.pause, store.campaigns.resume, store.campaigns.cancel):
        with pytest.raises(CampaignStateError, match="is COMPLETED and cannot be"):
            change(theirs.id)


def test_imported_trials_have_the_states_of_their_rows(
    store: Store, theirs: CampaignRecord
) -> None:
    counts = {state: n for state, n in store.campaigns.count_trials(theirs.id).items() if n}
    assert counts == {"COMPLETED": 6, "INFEASIBLE": 1, "FAILED": 1}
    failed = store.trials.by_number(theirs.id, 6)
    assert (failed.state, failed.reason) == ("FAILED", "unstated")
    assert "not why" in failed.message
    assert store.trials.by_number(theirs.id, 5).reason == "out_of_memory"


def test_what_the_table_does_not_tell_is_none(store: Store) -> None:
    row = make_row(peak_memory_bytes="")
    (campaign,) = store.imports.add([make_import("theirs", row)])
    (trial,) = store.trials.find(campaign.id)
    measured = trial.measurement
    told = {"step_time_s": 0.5, "tokens_per_s": 8192.0, "tokens_per_s_per_device": 1024.0}
    assert {name: getattr(measured, name) for name in told} == told
    assert measured.tokens_per_step == 4096
    untold = (
        *("step_time_q25_s", "step_time_q75_s", "peak_tflops_per_device", "peak_source", "mfu"),
        *("hfu", "peak_memory_bytes", "memory_kind", "breakdown", "warmup_settled"),
        "skipped_steps",
    )
    assert [name for name in untold if getattr(measured, name) is not None] == []
    assert measured.peak_memory_bytes_by_stage == ()
    detail = store.trials.detail(trial.id)
    assert (detail.iterations, detail.environment, detail.attempts) == ((), None, ())
    assert trial.node_seconds == 0


def test_flops_follow_from_the_shape_and_their_share_from_a_stated_peak(store: Store) -> None:
    known = make_row(cluster="a100-sxm", device_memory_gb=80, recompute="full")
    (campaign,) = store.imports.add([make_import("theirs", known)])
    (trial,) = store.trials.find(campaign.id)
    (cell,) = read_table(make_text(known)).cells
    measured = trial.measurement
    flops = 1024.0 * cell.model.model_flops_per_token
    assert measured.model_tflops_per_device == pytest.approx(flops / 1e12, rel=1e-12)
    executed = 1024.0 * cell.model.hardware_flops_per_token("full") / 1e12
    assert measured.hardware_tflops_per_device == pytest.approx(executed, rel=1e-12)
    assert measured.mfu == pytest.approx(flops / cell.cluster.peak_flops_per_s["bf16"], rel=1e-12)
    assert measured.peak_source == f"table ({cell.cluster.device}, bf16)"


def test_imported_repeats_of_a_layout_count_together(store: Store, theirs: CampaignRecord) -> None:
    standings = store.leaderboard.ranked_layouts(theirs.id, "tokens_per_s")
    assert [standing.trial.number for standing in standings] == [2, 1, 3, 4, 8]
    assert standings[1].num_runs == 2
    assert front(store, theirs.id) == {standings[0].trial.id}


def test_trials_are_kept_in_the_order_of_the_rows_wherever_repeats_stand(store: Store) -> None:
    rows = [
        make_row(tp=tp, dp=4 // tp, num_microbatches=2 * tp, step_time_s=0.5 + number / 100)
        for number, tp in enumerate((4, 2, 2, 1, 4, 2))
    ]
    (campaign,) = store.imports.add([make_import("theirs", *rows)])
    trials = sorted(store.trials.find(campaign.id), key=lambda trial: trial.id)
    assert [trial.number for trial in trials] == [1, 2, 3, 4, 5, 6]
    assert [trial.layout.tp for trial in trials] == [4, 2, 2, 1, 4, 2]
    assert [trial.repeat_index for trial in trials] == [0, 0, 1, 0, 1, 2]
    first, second = trials[0].id, trials[1].id
    assert [trial.repeat_of for trial in trials] == [None, None, second, None, first, second]
    measured = [trial.measurement for trial in trials]
    assert [each.step_time_s for each in measured if each] == [0.5, 0.51, 0.52, 0.53, 0.54, 0.55]


def test_all_campaigns_of_an_import_are_kept_or_none(store: Store) -> None:
    make_campaign(store, "taken")
    good, bad = make_import("theirs", *varied_rows()), make_import("taken", *varied_rows())
    with pytest.raises(CampaignDuplicateError, match="'taken' exists already"):
        store.imports.add([good, bad])
    assert [campaign.name for campaign in store.campaigns.find()] == ["taken"]
    with store._db.read() as session:
        for table in ("trials", "measurements", "imports", "imported_rows"):
            count = session.connection().exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()
            assert count == 0, table


def test_imported_trials_teach_only_campaigns_that_name_their_import(store: Store) -> None:
    imported = make_import("theirs", *varied_rows())
    store.imports.add([imported])
    machine = {"cluster": imported.cell.cluster.to_mapping()}
    make_worker(store, cluster="testbox")
    alike = store.campaigns.create(make_spec("alike") | machine, num_legal_layouts=1)
    assert store.plans.known_trials(alike) == []
    spec = make_spec("naming", start_from=["theirs"]) | machine
    known = store.plans.known_trials(store.campaigns.create(spec, num_legal_layouts=1))
    assert [trial.layout for trial in known] == [row.layout for row in imported.cell.rows]
    assert {trial.software for trial in known} == {"made up"}
    assert [trial.step_time_s for trial in known] == [r.step_time_s for r in imported.cell.rows]


def test_rows_of_one_layout_that_a_column_parts_are_layouts_of_their_own(store: Store) -> None:
    rows = [
        make_row(technique=name, step_time_s=step)
        for name, step in (
            ("eager", 0.6),
            ("compile", 0.5),
            ("eager", 0.62),
            ("a~b\u00e4" * 40, 0.7),
            ("", 0.8),
        )
    ]
    new = make_import("parted", *rows)
    (campaign,) = store.imports.add([new])
    assert campaign.num_legal_layouts == 4
    trials = store.trials.find(campaign.id)
    key = trials[0].layout.key
    keys = [trial.layout_key.removeprefix(key) for trial in sorted(trials, key=lambda t: t.number)]
    assert keys[:3] == ["[technique=eager]", "[technique=compile]", "[technique=eager]"]
    assert keys[4] == "[technique=]"
    assert len(keys[3]) == 50
    assert "~" not in keys[3]
    page = store.leaderboard.page_of_layouts(campaign.id, limit=10)
    assert [round(each.step_time_s, 3) for each in page.layouts] == [0.5, 0.61, 0.7, 0.8]
    assert store.imports.table(campaign.id).cells == (new.cell,)
