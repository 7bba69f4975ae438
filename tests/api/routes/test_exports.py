"""Exports over HTTP: formats, figures in comments, more nodes, and knobs that are dropped."""

from __future__ import annotations

import pytest

from api.exporters import FORMATS
from search_spaces.campaigns.fidelity import Fidelity
from search_spaces.spec.layout import Layout
from tests.kit.api import CLUSTER, Api
from tests.kit.cheap_campaign import FULL, add_cheap_campaign

SPACE = {"global_batch_size": 8, "tp": [1, 2, 4], "pp": [1, 2], "dp": [1, 2], "vpp": [1, 2]}


@pytest.fixture
def measured(api: Api) -> Api:
    """A campaign on one node of four devices, whose trial 2 is interleaved."""
    api.submit(space=SPACE, cluster={**CLUSTER, "num_nodes": 1})
    worker = api.register()
    api.complete(worker, "first", Layout(tp=2, dp=2, micro_batch_size=1, num_microbatches=4))
    interleaved = Layout(pp=2, dp=2, vpp=2, micro_batch_size=1, num_microbatches=4)
    api.complete(worker, "first", interleaved, tokens_per_s=1)
    return api


def script_of(exported: dict[str, object]) -> str:
    (script,) = [file for file in exported["files"] if file["executable"]]  # type: ignore[attr-defined]
    return str(script["content"])


def test_formats_are_listed_and_comments_have_the_figures_and_the_device(measured: Api) -> None:
    listed = measured.get("/exports/formats")["formats"]
    assert [each["name"] for each in listed] == list(FORMATS)
    assert all(each["target_version"] and each["needs"] for each in listed)

    exported = measured.get("/campaigns/first/exports", format="megatron-lm", trial=1)
    trial = measured.get("/campaigns/first/trials")["trials"][0]
    figures = trial["measurement"]
    (line,) = [note for note in exported["notes"] if note.startswith("measured: ")]
    assert f"{figures['tokens_per_s_per_device']:.4g} tokens/s per device" in line
    assert f"{figures['step_time_s']:.4g} s a step" in line
    assert f"MFU {figures['mfu']:.1%}" in line
    assert "peak memory 5 GiB (logical)" in line
    assert line.endswith("on CPU core of node-1")
    assert f"\n# {line}\n" in script_of(exported)
    assert f"# campaign first, trial 1: {trial['layout_key']}" in script_of(exported)


def test_a_scaled_export_says_that_it_was_not_measured(measured: Api) -> None:
    exported = measured.get("/campaigns/first/exports", format="megatron-lm", trial=1, nodes=2)
    script = script_of(exported)
    assert "NUM_NODES=2\nRANKS_PER_NODE=4\n" in script
    assert "--global-batch-size 8" in script
    (note,) = [note for note in exported["notes"] if note.startswith("scaled from")]
    assert "scaled from 1 node to 2: dp=4 instead of 2, num_microbatches=2 instead of 4" in note
    assert "same global batch of 8" in note
    assert f"# {note}" in script
    assert "which was not measured" in script
    same = measured.get("/campaigns/first/exports", format="megatron-lm", trial=1, nodes=1)
    assert same == measured.get("/campaigns/first/exports", format="megatron-lm", trial=1)
    asked = {"format": "embedded", "trial": 1, "nodes": 3}
    problem = measured.get("/campaigns/first/exports", status=422, **asked)
    assert problem["type"].endswith(":export-impossible")
    why = "global_batch_size=8 is not divisible by dp*micro_batch_size=6*1=6 on num_nodes=3"
    assert why in problem["detail"]


def test_a_knob_is_dropped_only_if_it_is_accepted(measured: Api) -> None:
    asked = {"format": "megatron-deepspeed", "trial": 2}
    problem = measured.get("/campaigns/first/exports", status=422, **asked)
    assert problem["type"].endswith(":knobs-lacking")
    assert "--without vpp" in problem["detail"]
    exported = measured.get("/campaigns/first/exports", **asked, without=["vpp"])
    assert any(note.startswith("without vpp: ") for note in exported["notes"])
    problem = measured.get(
        "/campaigns/first/exports", status=422, **asked, without=["vpp", "precision"]
    )
    assert "without=precision is not a knob of this layout" in problem["detail"]


def test_a_cheap_probe_exports_its_whole_layout_and_says_what_was_measured(api: Api) -> None:
    ids = add_cheap_campaign(api)
    exported = api.get("/campaigns/large/exports", format="megatron-lm", trial=1)
    script = script_of(exported)
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
    assert not any("the memory of the layout" in note for note in exported["notes"])

    exported = api.get("/campaigns/large/exports", format="embedded", trial=2)
    assert (
        "the memory of the layout was not measured: the probe ran fewer layers" in exported["notes"]
    )
    best = api.get("/campaigns/large/exports", format="embedded")
    assert best["trial"] == 3
    assert not any("cheap probe" in note for note in best["notes"])

    on_two = Layout(num_nodes=2, dp=8, num_microbatches=16)
    half = Fidelity(num_microbatches=8, dp=4, num_layers=4)
    api.complete(api.register("w2"), "large", on_two, fidelity=half)
    exported = api.get("/campaigns/large/exports", format="megatron-lm", trial=4, nodes=2)
    assert "NUM_NODES=2\n" in script_of(exported)
    assert not any(note.startswith("scaled") for note in exported["notes"])
