"""`layout-tuner calibrate`: real ranks on this machine, and constants from timings."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from layout_tuner.cli.predictions.calibrate import calibrate
from layout_tuner.errors import MeasuredConstantsInvalidError
from layout_tuner.search_spaces.clusters.calibration_file import (
    MeasuredConstants,
    constants_file,
    write_constants,
)
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.workers.calibrate.calibration import calibrated_layouts, constants_of
from layout_tuner.workers.trainer.product_layouts import LAYOUTS, OWN_LAYOUTS, products_in
from tests.kit.api import ends
from tests.kit.python_process import printed_by, start_python
from tests.kit.waiting import wait_until
from tests.workers.process_checks import marked

pytestmark = pytest.mark.ranks

PROGRAM = "from layout_tuner.cli.predictions.calibrate import calibrate; calibrate()"


def timing(operation: str, seconds: float, **what: Any) -> dict[str, Any]:
    return {"operation": operation, "seconds": seconds, "spread": 0.02, "repeats": 9, **what}


def synthetic_timings(latency_s: float, bytes_per_s: float) -> list[dict[str, Any]]:
    """A machine whose collectives are rings of exactly these links."""
    listed = [
        timing("matmul", 2e-3, precision="fp32", rows=512, columns=512, inner=512),
        timing("matmul", 1e-3, precision="fp32", rows=512, columns=512, inner=512),
        timing("stream", 1e-2, bytes=1e8),
        timing("host", 5e-4, operations=100),
    ]
    for ranks in (2, 4):
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
            step = latency_s + size / ranks / bytes_per_s
            once = (ranks - 1) * step
            what = {"ranks": ranks, "bytes": size}
            listed.append(timing("all_reduce", 2 * once, **what))
            listed.append(timing("all_gather", once, **what))
    for size in (1 << 10, 1 << 20):
        there = latency_s + size / bytes_per_s
        listed.append(timing("transfer_and_back", 2 * there, ranks=2, bytes=size))
    return listed


def test_rings_of_known_links_give_their_latency_and_bandwidth_back() -> None:
    measured = constants_of(synthetic_timings(20e-6, 4e9), cluster="box", num_devices=4)
    assert measured.constants["intra_node_latency_s"] == pytest.approx(20e-6, rel=1e-3)
    bandwidths = measured.constants["intra_node_bandwidth_bytes_per_s"]
    assert bandwidths == pytest.approx({"2": 4e9, "4": 4e9}, rel=1e-3)
    assert {(fit["operation"], fit["ranks"]) for fit in measured.fits} == {
        *(("all_reduce", 2), ("all_reduce", 4), ("all_gather", 2), ("all_gather", 4)),
        ("transfer", 2),
    }
    for fit in measured.fits:
        assert fit["bytes_per_s"] == pytest.approx(4e9, rel=1e-2)
    assert measured.constants["peak_flops_per_s"] == {"fp32": pytest.approx(2 * 512**3 / 1e-3)}
    assert measured.constants["memory_bandwidth_bytes_per_s"] == pytest.approx(1e10)
    assert measured.constants["host_operation_s"] == pytest.approx(5e-6)
    assert measured.warnings == ()


def test_a_busy_machine_and_a_fit_that_is_no_line_are_warned_of_with_the_numbers() -> None:
    timings = [each | {"spread": 0.5} for each in synthetic_timings(20e-6, 4e9)]
    for each in timings:
        if each["operation"] == "all_gather" and each["bytes"] >= 1 << 18:
            each["seconds"] *= 20
    busy, *rough = constants_of(timings, cluster="box", num_devices=4).warnings
    assert busy.startswith("repeats of one timing differ by 50%")
    assert all(warning.startswith("all_gather over") for warning in rough)
    assert rough


def test_a_machine_of_one_device_has_no_links_to_measure() -> None:
    alone = [each for each in synthetic_timings(1e-6, 1e9) if "ranks" not in each]
    measured = constants_of(alone, cluster="box", num_devices=1)
    assert "intra_node_latency_s" not in measured.constants
    assert measured.fits == ()


class Calibrated(NamedTuple):
    """This machine after one calibration, whose data directory no test changes."""

    data_dir: Path
    printed: str

    @property
    def measured(self) -> MeasuredConstants:
        return MeasuredConstants.from_mapping(json.loads(self.printed))


def calibration(data_dir: Path, *flags: str) -> str:
    """What a calibration of a second prints."""
    return printed_by(PROGRAM, "--data-dir", str(data_dir), "--seconds", "1", "--json", *flags)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    data_dir = tmp_path_factory.mktemp("calibrated")
    return Calibrated(data_dir, calibration(data_dir, "--model", "tiny-llama"))


@pytest.mark.slow
def test_this_machine_is_measured_and_its_figures_are_kept(calibrated: Calibrated) -> None:
    printed = calibrated.measured
    assert printed.cluster == "local-cpu"
    assert printed.constants["peak_flops_per_s"].keys() == {"fp32", "bf16", "fp16"}
    assert 1e8 < printed.constants["peak_flops_per_s"]["fp32"] < 1e13
    operations = {each["operation"] for each in printed.timings}
    assert {"matmul", "stream", "host"} <= operations
    if printed.num_devices > 1:
        assert {"all_reduce", "reduce_scatter", "all_gather"} <= operations
        assert printed.constants["intra_node_bandwidth_bytes_per_s"]
    flags = ["--data-dir", str(calibrated.data_dir), "--show", "--json"]
    shown = CliRunner().invoke(calibrate, flags)
    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == json.loads(calibrated.printed)


@pytest.mark.slow
def test_another_calibration_keeps_the_layouts_of_matrix_products(
    calibrated: Calibrated, tmp_path: Path
) -> None:
    products = products_in(calibrated.measured.timings)
    assert {each["layout"] for each in products} == set(LAYOUTS)
    shutil.copytree(calibrated.data_dir, tmp_path, dirs_exist_ok=True)
    again = MeasuredConstants.from_mapping(json.loads(calibration(tmp_path)))
    assert products_in(again.timings) == products


@pytest.mark.slow
def test_a_probe_lays_its_matrix_products_out_as_calibrated(
    calibrated: Calibrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that certainly counts: the layout that the trainer would choose by itself is slow.
    slowed = [
        each | {"seconds": 9.0 if each["layout"] == OWN_LAYOUTS[each["kind"]] else each["seconds"]}
        for each in products_in(calibrated.measured.timings)
    ]
    write_constants(tmp_path, replace(calibrated.measured, timings=tuple(slowed)))
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path))
    arguments = ["probe", "--model", "tiny-llama", "--num-microbatches=1", "--steps=2", "--json"]
    probed = json.loads(printed_by("from layout_tuner.cli.main import main; main()", *arguments))
    assert "calibrated layouts of matrix products: [['output', 'fp32'," in probed["log_tail"]


def test_a_timing_that_lacks_a_field_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path))
    cluster = detect_local_cpu()
    assert calibrated_layouts(cluster) == {}
    broken = ({"operation": "product", "kind": "output", "seconds": 1.0},)
    kept = MeasuredConstants(
        cluster=cluster.name, host="here", measured_at="earlier", timings=broken
    )
    path = write_constants(tmp_path, kept)
    with pytest.raises(
        MeasuredConstantsInvalidError, match="run `layout-tuner calibrate` again"
    ) as e:
        calibrated_layouts(cluster)
    assert str(path) in str(e.value)


@pytest.mark.slow
def test_a_killed_calibration_leaves_the_kept_constants_alone(tmp_path: Path, mark: str) -> None:
    kept = MeasuredConstants(cluster="local-cpu", host="before", measured_at="earlier")
    before = write_constants(tmp_path, kept).read_bytes()
    with start_python(PROGRAM, "--data-dir", str(tmp_path), "--seconds", "600") as running:
        # The command, its warden, the zygote and a rank.
        wait_until("a rank runs", lambda: len(marked(mark)) >= 4, 60)
        running.kill()
        assert running.wait(10) != 0
    wait_until("nothing is left", lambda: not marked(mark), 10)
    assert constants_file(tmp_path, "local-cpu").read_bytes() == before


def test_a_missing_and_an_unreadable_calibration_are_told_apart(tmp_path: Path) -> None:
    arguments = ["--data-dir", str(tmp_path), "--show"]
    none = CliRunner().invoke(calibrate, arguments)
    ends(none, 1, "no calibration of local-cpu is saved")
    path = constants_file(tmp_path, "local-cpu")
    path.parent.mkdir()
    path.write_text("nonsense")
    nonsense = CliRunner().invoke(calibrate, arguments)
    ends(nonsense, 1, f"Error: {path} is not a readable file of measured constants")


def test_a_place_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("no folder")
    arguments = ["--data-dir", str(occupied / "data"), "--seconds", "600"]
    ended = CliRunner().invoke(calibrate, arguments)
    assert ended.exit_code == 1
    assert ended.stderr == f"Error: {occupied}/data/measured can't be made: Not a directory\n"
