"""Constants that were measured on a machine: saved, read back, and put into a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import MeasuredConstantsInvalidError
from search_spaces.spec.presets.calibration_file import (
    MeasuredConstants,
    constants_file,
    read_constants,
    with_measured_constants,
    write_constants,
)
from search_spaces.spec.presets.clusters import resolve_cluster


def make_constants(**changes: Any) -> MeasuredConstants:
    values: dict[str, Any] = {
        "cluster": "local-cpu",
        "host": "box",
        "measured_at": "2026-03-01T12:00:00+00:00",
        "versions": {"torch": "2.13.0"},
        "num_devices": 2,
        "constants": {
            "peak_flops_per_s": {"fp32": 1e11, "bf16": 2e11},
            "memory_bandwidth_bytes_per_s": 2e10,
            "intra_node_bandwidth_bytes_per_s": {"2": 3e9},
            "intra_node_latency_s": 4e-5,
            "host_operation_s": 3e-6,
        },
        "fits": ({"operation": "all_reduce", "ranks": 2, "error": 0.1},),
        "timings": ({"operation": "host", "seconds": 3e-6},),
        "noise": 0.05,
        "warnings": (),
    }
    return MeasuredConstants(**(values | changes))


def test_what_is_kept_reads_back_equal_and_what_was_never_measured_is_not_there(
    tmp_path: Path,
) -> None:
    assert read_constants(tmp_path, "local-cpu") is None
    assert with_measured_constants("local-cpu", tmp_path) == "local-cpu"
    measured = make_constants()
    path = write_constants(tmp_path, measured)
    assert path == constants_file(tmp_path, "local-cpu")
    assert read_constants(tmp_path, "local-cpu") == measured
    assert [file.name for file in path.parent.iterdir()] == ["local-cpu.json"]


def changed(**changes: Any) -> bytes:
    return json.dumps(make_constants().to_mapping() | changes).encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *(
            (text, "not a readable file of measured constants")
            for text in (b"", b"{]", b"\xff\xfe")
        ),
        (b"[1, 2]", "the document is [1, 2], not a mapping"),
        (b"{}", "format=None version=None is not 'layout-tuner/measured-constants' 1"),
        (changed(version=2), "version=2 is not"),
        (changed(colour="green"), "unknown field 'colour'"),
        (changed(constants={"num_nodes": 4}), "unknown constant 'num_nodes'"),
        (changed(constants={"host_operation_s": -1}), "=-1 is not a number from 1e-15 to 10 s"),
        (changed(constants={"peak_flops_per_s": {"int8": 1.0}}), "'int8'] is not one of fp32"),
        (changed(constants=3), "constants is 3, not a mapping"),
        (changed(cluster="frontier"), "the constants are those of cluster 'frontier'"),
        (changed(timings="none"), "timings='none' is not a list"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_what_to_do(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    path = constants_file(tmp_path, "local-cpu")
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(MeasuredConstantsInvalidError) as refused:
        read_constants(tmp_path, "local-cpu")
    assert str(refused.value).startswith(str(path))
    assert sentence in str(refused.value)
    assert "run `layout-tuner calibrate` again, or remove the file" in str(refused.value)


def test_constants_take_the_place_of_a_presets_and_say_where_they_come_from(tmp_path: Path) -> None:
    write_constants(tmp_path, make_constants())
    for described in ("local-cpu", {"preset": "local-cpu"}, {"name": "local-cpu"}):
        cluster, warning = resolve_cluster(with_measured_constants(described, tmp_path))
        assert warning is None
        assert cluster.name == "local-cpu"
        assert cluster.intra_node_bandwidth_bytes_per_s == {2: 3e9}
        assert cluster.peak_flops_per_s["bf16"] == 2e11
        assert cluster.source == (
            "measured by layout-tuner calibrate on box, 2026-03-01T12:00:00+00:00"
        )
        assert cluster.device_memory_bytes == resolve_cluster("local-cpu")[0].device_memory_bytes


def test_what_a_description_states_itself_stays(tmp_path: Path) -> None:
    write_constants(tmp_path, make_constants())
    described = {"preset": "local-cpu", "memory_bandwidth_bytes_per_s": 7e9, "devices_per_node": 1}
    cluster, _ = resolve_cluster(with_measured_constants(described, tmp_path))
    assert (cluster.memory_bandwidth_bytes_per_s, cluster.devices_per_node) == (7e9, 1)
    assert cluster.host_operation_s == 3e-6
    full = resolve_cluster("local-cpu")[0].to_mapping()
    assert with_measured_constants(full, tmp_path) == full
    assert with_measured_constants(["nonsense"], tmp_path) == ["nonsense"]


def test_a_measured_cluster_that_is_no_preset_still_warns_of_what_is_guessed(
    tmp_path: Path,
) -> None:
    write_constants(tmp_path, make_constants(cluster="ours"))
    cluster, warning = resolve_cluster(with_measured_constants({"name": "ours"}, tmp_path))
    assert cluster.host_operation_s == 3e-6
    assert "device_memory_bytes" in warning
    assert "memory_bandwidth_bytes_per_s" not in warning
    assert with_measured_constants("ours", tmp_path) == "ours", "its size is not known"
