"""Cheap probes over HTTP: what a trial says of the layout that it stands for."""

from __future__ import annotations

import pytest

from search_spaces.estimates.time import step_time_s
from search_spaces.spec.cluster import Cluster
from tests.kit.api import Api
from tests.kit.cheap_campaign import FEWER, FULL, MODEL, ONLY_CHEAP, add_cheap_campaign


@pytest.fixture
def ids(api: Api) -> dict[int, int]:
    return add_cheap_campaign(api)


def test_a_cheap_probe_names_its_full_layout_and_the_extrapolated_step(
    api: Api, ids: dict[int, int]
) -> None:
    trial = api.get(f"/trials/{ids[1]}")
    assert trial["layout"]["num_microbatches"] == 8
    assert trial["layout"]["dp"] == 1
    probe = trial["cheap_probe"]
    assert probe["full_layout"] == FULL.to_mapping(every_knob=True)
    assert probe["full_layout_key"] == FULL.key
    assert trial["layout_key"].startswith(f"{FULL.key}~")
    assert probe["runs"] == "8 of 64 micro-batches, 1 of 2 replicas"
    assert probe["num_layers"] == MODEL.num_layers
    assert probe["measures_memory"]
    cluster = Cluster.from_mapping(api.get("/campaigns/large")["spec"]["cluster"])
    whole, part = (step_time_s(each, MODEL, cluster)[0] for each in (FULL, FEWER.reduced(FULL)))
    measured_s = trial["measurement"]["step_time_s"]
    step = probe["full_step"]
    assert step["expected_s"] == pytest.approx(measured_s * whole / part)
    assert step["low_s"] < step["expected_s"] < step["high_s"]
    assert step["low_s"] * step["high_s"] == pytest.approx(step["expected_s"] ** 2)


def test_lists_the_campaign_and_its_table_say_which_trials_are_cheap(
    api: Api, ids: dict[int, int]
) -> None:
    text = api.http.get("/v1/campaigns/large/table").text
    head, *rows = (line.split(",") for line in text.splitlines())
    columns = ("model", "num_layers", "num_microbatches", "global_batch_size")
    found = [tuple(row[head.index(column)] for column in columns) for row in rows]
    assert found == [
        ("tiny", "4", "8", "8"),
        ("tiny-2-layers", "2", "8", "16"),
        ("tiny", "4", "64", "128"),
    ]

    campaign = api.get("/campaigns/large")
    assert campaign["cheap_probes"] == 2
    took = sum(api.get(f"/trials/{ids[number]}")["node_seconds"] for number in (1, 2))
    assert campaign["cheap_probe_node_seconds"] == pytest.approx(took)
    (best,) = api.get("/campaigns/large/leaderboard")["trials"]
    assert best["number"] == 3
    api.submit()
    assert api.get("/campaigns/first")["cheap_probes"] == 0

    waiting = api.store.trials.add(
        api.store.campaigns.by_name("large").id, ONLY_CHEAP, fidelity=FEWER
    )
    trials = api.get("/campaigns/large/trials")["trials"]
    found = [each["cheap_probe"] and each["cheap_probe"]["full_layout_key"] for each in trials]
    assert found == [FULL.key, ONLY_CHEAP.key, None, ONLY_CHEAP.key]
    assert trials[3]["cheap_probe"]["full_step"] is None
    cancelled = api.post(f"/trials/{waiting.id}/cancel")
    assert cancelled["cheap_probe"]["runs"] == "8 of 64 micro-batches, 1 of 2 replicas"
    (again,) = api.post(f"/trials/{ids[2]}/repeat", status=201)["trials"]
    assert again["cheap_probe"]["runs"] == "8 of 64 micro-batches, 2 of 4 layers"
