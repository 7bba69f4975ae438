"""Cheap probes over HTTP: what a trial says of the layout that it stands for."""

from __future__ import annotations

import re

import pytest

from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import Api
from tests.kit.cheap_campaign import FEWER, FULL, MODEL, ONLY_CHEAP, add_cheap_campaign
from tests.kit.page import Page

EXPORTS = "/campaigns/large/exports"
FEWER_LAYERS = "the memory of the layout was not measured: the probe ran fewer layers"


@pytest.fixture(scope="module")
def ids(api: Api) -> dict[int, int]:
    return add_cheap_campaign(api)


def test_a_cheap_probe_names_its_full_layout_and_what_of_it_runs(
    api: Api, ids: dict[int, int]
) -> None:
    trial = api.get(f"/trials/{ids[1]}")
    assert (trial["layout"]["num_microbatches"], trial["layout"]["dp"]) == (8, 1)
    probe = trial["cheap_probe"]
    assert probe["full_layout"] == FULL.to_mapping(every_knob=True) | {"job": {}}
    assert probe["full_layout_key"] == FULL.key
    assert trial["layout_key"].startswith(f"{FULL.key}~")
    assert probe["runs"] == "8 of 64 micro-batches, 1 of 2 replicas"
    assert (probe["num_layers"], probe["measures_memory"]) == (MODEL.num_layers, True)


def test_a_cheap_probe_has_the_extrapolated_step_with_its_interval(
    api: Api, ids: dict[int, int]
) -> None:
    trial = api.get(f"/trials/{ids[1]}")
    cluster = Cluster.from_mapping(api.get("/campaigns/large")["spec"]["cluster"])
    kernels = kernels_of("", cluster)  # of the embedded trainer
    whole, part = (
        step_time_s(each, MODEL, cluster, kernels=kernels)[0]
        for each in (FULL, FEWER.reduced(FULL))
    )
    measured_s = trial["measurement"]["step_time_s"]
    step = trial["cheap_probe"]["full_step"]
    assert step["expected_s"] == pytest.approx(measured_s * whole / part)
    assert step["low_s"] < step["expected_s"] < step["high_s"]
    assert step["low_s"] * step["high_s"] == pytest.approx(step["expected_s"] ** 2)


def test_a_report_says_what_cheap_probes_took_and_that_the_winner_ran_in_full(
    api: Api, ids: dict[int, int]
) -> None:
    page = Page(api.http.get("/v1/campaigns/large/report").text)
    assert "It was measured in full" in page.text
    assert "Besides, there were 2 cheap probes, " in page.text
    row = r"of these (cheap probes|in full)(\d), [0-9.]+ node-(?:hours|seconds)"
    assert re.findall(row, page.text) == [("cheap probes", "2"), ("in full", "1")]
    api.submit()
    assert "cheap" not in Page(api.http.get("/v1/campaigns/first/report").text).text
    assert api.get("/campaigns/first")["cheap_probes"] == 0


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
    took = sum(api.get(f"/trials/{ids[number]}")["node_seconds"] for number in (1, 2))
    assert campaign["cheap_probes"] == 2
    assert campaign["cheap_probe_node_seconds"] == pytest.approx(took)
    (best,) = api.get("/campaigns/large/leaderboard")["trials"]
    assert best["number"] == 3

    waiting = api.store.trials.add(campaign["id"], ONLY_CHEAP, fidelity=FEWER)
    trials = api.get("/campaigns/large/trials")["trials"]
    keys = [each["cheap_probe"] and each["cheap_probe"]["full_layout_key"] for each in trials]
    assert keys == [FULL.key, ONLY_CHEAP.key, None, ONLY_CHEAP.key]
    assert trials[3]["cheap_probe"]["full_step"] is None
    cancelled = api.post(f"/trials/{waiting.id}/cancel")
    assert cancelled["cheap_probe"]["runs"] == "8 of 64 micro-batches, 1 of 2 replicas"
    (again,) = api.post(f"/trials/{ids[2]}/repeat", status=201)["trials"]
    assert again["cheap_probe"]["runs"] == "8 of 64 micro-batches, 2 of 4 layers"
    api.post(f"/trials/{again['id']}/cancel")


def test_a_cheap_probe_exports_its_whole_layout_and_says_what_was_measured(
    api: Api, ids: dict[int, int]
) -> None:
    exported = api.get(EXPORTS, format="megatron-lm", trial=1)
    script = exported["files"][0]["content"]
    assert f"# campaign large, trial 1: {FULL.key}\n" in script
    assert "--global-batch-size 128" in script
    step = api.get(f"/trials/{ids[1]}")["cheap_probe"]["full_step"]
    for note in (
        "the layout was not measured in full: a cheap probe ran 8 of 64 micro-batches, 1 of 2 "
        "replicas",
        f"extrapolated to the whole layout: a step of {step['expected_s']:.4g} s (95 %: "
        f"{step['low_s']:.4g} to {step['high_s']:.4g} s)",
    ):
        assert note in exported["notes"]
        assert f"# {note}\n" in script
    (measured,) = [note for note in exported["notes"] if "measured: " in note]
    assert measured.startswith("of what ran, measured: 2,048 tokens/s per device, ")


@pytest.mark.usefixtures("ids")
def test_an_export_notes_that_a_probe_of_fewer_layers_measured_no_memory(api: Api) -> None:
    assert FEWER_LAYERS not in api.get(EXPORTS, format="megatron-lm", trial=1)["notes"]
    assert FEWER_LAYERS in api.get(EXPORTS, format="embedded", trial=2)["notes"]


@pytest.mark.usefixtures("ids")
def test_the_layout_that_was_measured_in_full_is_the_one_that_is_exported(api: Api) -> None:
    best = api.get(EXPORTS, format="embedded")
    assert best["trial"] == 3
    assert not any("cheap probe" in note for note in best["notes"])


@pytest.mark.usefixtures("ids")
def test_an_export_on_the_nodes_of_the_whole_layout_is_not_scaled(api: Api) -> None:
    on_two = Layout(num_nodes=2, dp=8, num_microbatches=16)
    half = Fidelity(num_microbatches=8, dp=4, num_layers=4)
    id_of_last = api.complete(api.register("w2"), "large", on_two, fidelity=half)
    number = api.get(f"/trials/{id_of_last}")["number"]
    exported = api.get(EXPORTS, format="megatron-lm", trial=number, nodes=2)
    assert "NUM_NODES=2\n" in exported["files"][0]["content"]
    assert not any(note.startswith("scaled") for note in exported["notes"])
