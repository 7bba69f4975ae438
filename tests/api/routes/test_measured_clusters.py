"""Campaigns on a machine whose constants were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.settings import Settings
from search_spaces.spec.presets.calibration_file import (
    MeasuredConstants,
    constants_file,
    write_constants,
)
from tests.kit.api import CAMPAIGN, CLUSTER, TOKEN, Api

LATENCY_S = 4.2e-5


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The service's settings, with the data directory in which constants may lie."""
    return Settings(token=TOKEN, data_dir=tmp_path)


def keep(data_dir: Path) -> MeasuredConstants:
    measured = MeasuredConstants(
        cluster="local-cpu",
        host="box",
        measured_at="2026-03-01T12:00:00+00:00",
        constants={"intra_node_latency_s": LATENCY_S},
    )
    write_constants(data_dir, measured)
    return measured


def test_a_campaign_on_a_preset_starts_from_what_was_measured_unless_it_is_written_out(
    api: Api, tmp_path: Path
) -> None:
    measured = keep(tmp_path)
    space = {"global_batch_size": 8, "micro_batch_size": [1, 2], "tp": 1}
    cluster = api.submit(cluster="local-cpu", space=space)["spec"]["cluster"]
    assert cluster["intra_node_latency_s"] == LATENCY_S
    assert cluster["source"] == measured.source

    cluster = api.submit(name="second", cluster=CLUSTER)["spec"]["cluster"]
    assert cluster["intra_node_latency_s"] != LATENCY_S


def test_an_unreadable_file_of_constants_refuses_the_campaign(api: Api, tmp_path: Path) -> None:
    path = constants_file(tmp_path, "local-cpu")
    path.parent.mkdir()
    path.write_text("nonsense")
    refused = api.post("/campaigns", {**CAMPAIGN, "cluster": "local-cpu"}, status=422)
    assert f"{path} is not a readable file of measured constants" in refused["detail"]
    assert api.get("/campaigns")["campaigns"] == []
