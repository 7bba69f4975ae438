"""The judge of cold estimates (`make bench-tables`), on small tables with known answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_tables import Subset, intervals_rows, judged_subsets, shares_rows
from benchmarks.tables.domain_levels import RECIPES, domain_rows
from benchmarks.tables.judged_tables import (
    LACKS,
    NEAR,
    ChoiceScore,
    JudgedRow,
    RowFigures,
    judged_rows,
    read_folder,
)
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.estimates.trainer_storage import MEGATRON_LIKE
from layout_tuner.search_spaces.tables import TableInvalidError, read_table
from layout_tuner.units import GIB
from tests.search_spaces.tables.tables import make_row, make_text


def judged(measured_s: float | None, predicted_s: float, **fields: object) -> JudgedRow:
    """A row of one cell with an interval of 10 % about the predicted seconds."""
    of_row: dict[str, Any] = {
        "cell": "a cell",
        "layout": f"{measured_s}",
        "columns": {},
        "log_sd": math.log(1.1) / 1.96,
    } | fields
    return JudgedRow(step_time_s=measured_s, log_s=math.log(predicted_s), **of_row)


def test_errors_are_relative_to_the_measured_figure() -> None:
    found = RowFigures.of([judged(2.0, 3.0), judged(4.0, 3.0), judged(None, 1.0)])
    assert found.rows == 2
    assert found.error == pytest.approx((0.5 + 0.25) / 2)
    assert found.signed == pytest.approx((0.5 - 0.25) / 2)


def test_tau_is_of_cells_and_not_of_the_pooled_rows() -> None:
    ordered = [judged(t, t / 10) for t in (1.0, 2.0, 3.0)]
    turned = [judged(t, 1 / t, cell="b") for t in (10.0, 20.0, 30.0)]
    swapped = [judged(t, p, cell="c") for t, p in ((1.0, 1.0), (2.0, 3.0), (3.0, 2.0))]
    assert RowFigures.of(ordered).tau == pytest.approx(1.0)
    assert RowFigures.of([*ordered, *turned]).tau == pytest.approx(0.0)
    assert RowFigures.of([*ordered, *swapped]).tau == pytest.approx((1.0 + 1 / 3) / 2)
    assert RowFigures.of(ordered[:2]).tau is None, "two rows are no order"


def test_an_interval_that_misses_the_measurement_counts_as_missed() -> None:
    held = [judged(1.0, p) for p in (1.0, 1.09, 1 / 1.09)]
    assert RowFigures.of(held).held == 1.0
    missed = [*held, judged(1.0, 1.11)]
    assert RowFigures.of(missed).held == 0.75
    assert RowFigures.of(missed).width == pytest.approx(1.1**2)


def test_peaks_have_errors_and_intervals_of_their_own() -> None:
    def peak(expected_gib: float) -> JudgedRow:
        return judged(
            None,
            1.0,
            peak_bytes=4.0 * GIB,
            expected_peak_bytes=expected_gib * GIB,
            low_peak_bytes=(expected_gib - 1.0) * GIB,
            high_peak_bytes=(expected_gib + 1.0) * GIB,
        )

    found = RowFigures.of([peak(4.9), peak(2.9)])
    assert (found.rows, found.peaks, found.error) == (0, 2, None)
    assert found.peak_error == pytest.approx((0.9 + 1.1) / 2 / 4)
    assert found.peak_gib == pytest.approx(1.0)
    assert found.peaks_held == 0.5


def test_a_choice_is_good_within_5_percent_of_the_best() -> None:
    times = (1.0, 1.04, 1.06, 1.2, 1.3)
    rows = {t: judged(t, t) for t in times}

    def score(*order: float) -> ChoiceScore:
        """The layouts predicted in this order."""
        return ChoiceScore.of(
            judged(rows[t].step_time_s, 1.0 + place / 100) for place, t in enumerate(order)
        )

    assert score(1.04, 1.3, 1.2, 1.06, 1.0) == ChoiceScore(cells=1, first=1, first_three=1)
    assert score(1.06, 1.3, 1.0, 1.2, 1.04) == ChoiceScore(cells=1, first=0, first_three=1)
    assert score(1.06, 1.3, 1.2, 1.0, 1.04) == ChoiceScore(cells=1, first=0, first_three=0)
    assert score(1.0, 1.04, 1.06, 1.2) == ChoiceScore(), "four layouts are too few"


def test_choices_weigh_speed_by_the_probability_of_fitting() -> None:
    others = [judged(1.0 + place, 2.0 + place) for place in range(5)]
    failed = judged(None, 1.0)
    assert ChoiceScore.of([failed, *others]) == ChoiceScore(cells=1, first=0, first_three=1)
    unlikely = judged(None, 1.0, fits=0.1)
    assert ChoiceScore.of([unlikely, *others]) == ChoiceScore(cells=1, first=1, first_three=1)


def test_rows_that_lack_something_are_judged_apart() -> None:
    said = judged(1.0, 1.0, columns={LACKS: "", "kind": "a"})
    other = judged(1.0, 1.1, columns={LACKS: "", "kind": "b"})
    lacking = judged(1.0, 9.0, columns={LACKS: "offload", "kind": "a"})
    found = {
        title: RowFigures.of(rows)
        for title, _, rows in judged_subsets({"some": [said, other, lacking]})
    }
    assert {title: each.rows for title, each in found.items()} == {
        "some: all": 2,
        "some: named in `lacks`": 1,
    }
    assert found["some: all"].error == pytest.approx(0.05)
    assert Subset(title="kind a", where={"kind": "a"}).of([said, other, lacking]) == [said]
    assert ChoiceScore.of([lacking] * 5) == ChoiceScore()
    assert intervals_rows({"some": [said, other, lacking]})[-1][1] == "2"


def test_rows_are_recorded_if_something_is_asked_of_their_table() -> None:
    rows = [judged(1.0, 1.0, columns={LACKS: lacks}) for lacks in ("", "offload")]
    recorded = {
        title
        for title, subset, chosen in judged_subsets({"simumax_a100": rows, "some": rows})
        if subset.is_recorded(RowFigures.of(chosen))
    }
    assert recorded == {"simumax_a100: all", "simumax_a100: named in `lacks`"}


def test_a_table_is_judged_with_the_share_that_others_choose() -> None:
    choosing = [judged(1.1**place, 1.0, share=0.5) for place in (0.2, 0.4, 0.8)]
    [row] = shares_rows({"simumax_a100": choosing, "qwen3_235b_jobs": [judged(1.1, 1.0)]})[-1:]
    # 0.4 of an interval that is half as wide as the prior's; the largest of three is left out.
    assert row == ("qwen3_235b_jobs", "1", "0.20", "0%", f"{1.1 ** (2 * 0.2):.2f}")


def test_what_is_asked_and_not_reached_is_marked() -> None:
    subset = Subset(title="all", error=0.1, tau=0.7, peak_error=0.03)
    near = RowFigures(rows=3, error=0.05, tau=0.6, peak_error=None)
    assert subset.asked(near) == "10% (yes), tau 0.7 (**no**), memory 3% (**no**)"


def test_a_table_is_judged_row_by_row_also_where_a_column_parts_one_layout(tmp_path: Path) -> None:
    slow = make_row(step_time_s=3.0, mode="b", lacks="")
    fast = make_row(step_time_s=2.0, mode="a", lacks="")
    (tmp_path / "parted.csv").write_text(make_text(slow, fast))
    rows = judged_rows(tmp_path / "parted.csv")
    assert [row.step_time_s for row in rows] == [3.0, 2.0]
    assert [row.columns["mode"] for row in rows] == ["b", "a"]
    (cell,) = read_table(tmp_path / "parted.csv").cells
    log_s, log_sd = TimeCalibration().predict(
        cell.rows[0].layout, cell.model, cell.cluster, software=cell.key.software
    )
    assert [(row.log_s, row.log_sd) for row in rows] == [(log_s[0], log_sd[0])] * 2


def test_a_column_that_lacks_names_is_not_read(tmp_path: Path) -> None:
    lacking = make_row(lacks="mtp cp_comm_type", cp_comm_type="by hand")
    (tmp_path / "some.csv").write_text(make_text(lacking))
    (row,) = judged_rows(tmp_path / "some.csv")
    (tmp_path / "plain.csv").write_text(make_text(make_row()))
    (plain,) = judged_rows(tmp_path / "plain.csv")
    assert row.layout == plain.layout
    assert not row.is_described
    (tmp_path / "some.csv").write_text(make_text({**lacking, "lacks": "mtp"}))
    with pytest.raises(TableInvalidError, match="cp_comm_type='by hand'"):
        judged_rows(tmp_path / "some.csv")


def test_peaks_in_use_have_blocks_and_context(tmp_path: Path) -> None:
    rows = []
    for extra in ({}, {"memory_unit": "GiB by the share of the device"}):
        made = make_row(source="Megatron-LM", peak_memory_bytes=GIB, **extra)
        (tmp_path / "some.csv").write_text(make_text(made))
        rows += judged_rows(tmp_path / "some.csv")
    allocated, in_use = (row.expected_peak_bytes for row in rows)
    share, context = MEGATRON_LIKE.reserved_share, MEGATRON_LIKE.context_bytes
    assert in_use == pytest.approx(allocated * (1.0 + share) + context)


def test_rows_near_the_best_of_their_cell_are_marked(tmp_path: Path) -> None:
    text = make_text(make_row(mode="a", step_time_s=2.0), make_row(mode="b", step_time_s=3.9))
    (tmp_path / "some.csv").write_text(text)
    rows = judged_rows(tmp_path / "some.csv")
    assert [row.columns[NEAR] for row in rows] == ["1", "0"]


def test_a_file_that_is_no_table_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "links.csv").write_text("ranks,bytes\n2,4\n")
    (tmp_path / "some.csv").write_text(make_text(make_row()))
    assert [name for name, _ in read_folder(tmp_path)] == ["some"]
    assert "left out: links.csv: " in capsys.readouterr().out


def test_domains_are_judged_as_if_all_narrow_types_were_fp8(tmp_path: Path) -> None:
    found = []
    for precision in ("mxfp8", "fp8"):
        made = make_row(
            cluster="gb200", devices_per_node=64, num_devices=64, dp=64, precision="fp8",
            recipe_precision=precision, num_microbatches=1, global_batch_size=64, tp=1, pp=1,
            lacks=precision, step_time_s=1.0,
        )  # fmt: skip
        (tmp_path / RECIPES).write_text(make_text(made))
        found.append(domain_rows(tmp_path))
    assert found[0] == found[1] != []
