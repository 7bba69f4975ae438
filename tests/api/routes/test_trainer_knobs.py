"""Job knobs that workers declare: read, searched, and refused at submission."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.api.schemas.trainer_documents import TrainerRead
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from layout_tuner.trainers.program import read_trainers
from tests.kit.api import CAMPAIGN, CLUSTER, Api, client_of

FUSED = {"kind": "switch", "default": False, "when": "tp > 1", "arguments": ["--fused"]}
CHUNK = {"kind": "count", "values": [8, 64], "default": 8, "environment": {"CHUNK": "{value}"}}


def declared(**fields: Any) -> dict[str, Any]:
    """What a worker with such an entry tells the service of its trainer `ours`."""
    entry = {"name": "ours", "version": "0.16.1", "command": ["train", "{arguments}"], **fields}
    of = read_trainers({"trainers": [entry]})["ours"].of
    knobs = {name: knob.to_mapping() for name, knob in of.job_knobs.items()}
    return {"trainers": {"ours": "0.16.1"}, "trainer_knobs": {"ours": knobs}}


def document(cluster: str, job: Any, **changes: Any) -> dict[str, Any]:
    space = {**CAMPAIGN["space"], "job": job, **changes.pop("space", {})}
    machine = {**CLUSTER, "name": cluster}
    changes = {"name": cluster, "probe": {"trainer": "ours"}, **changes}
    return {**CAMPAIGN, "cluster": machine, "space": space, **changes}


def refused(api: Api, asked: dict[str, Any]) -> dict[str, str]:
    answer = api.post("/campaigns", asked, status=422)
    return {each["field"]: each["message"] for each in answer["errors"]}


def test_campaigns_search_what_the_workers_of_their_cluster_declare(api: Api) -> None:
    job = {"chunk": [8, 64]}
    unknown = refused(api, document("declared", job))
    assert "no such knob" in unknown["body.space.job.chunk"]
    api.register("d1", cluster="declared", **declared(knobs={"fused": FUSED, "chunk": CHUNK}))
    api.post("/campaigns", document("declared", job), status=201)
    stored = api.get("/campaigns/declared")["spec"]["space"]["job"]
    assert stored["chunk"]["search"] == [8, 64]
    assert stored["chunk"]["kind"] == "count"
    misspelt = refused(api, document("declared", {"chunck": [8]}, name="another"))
    assert "did you mean 'chunk'?" in misspelt["body.space.job.chunck"]
    clone = api.post("/campaigns/declared/clone", {}, status=201)
    assert clone["spec"]["space"]["job"] == stored


def test_an_owner_narrows_and_forbids(api: Api) -> None:
    fields = {"adapter": "megatron-lm", "knobs": {"cuda_graphs": {"values": ["attn"]}}}
    only = declared(**fields, knobs_allowed=["cuda_graphs", "ep_overlap"])
    api.register("n1", cluster="narrow", **only)
    api.post("/plans", document("narrow", {"cuda_graphs": ["none", "attn"]}))
    wrong = {"cuda_graphs": ["none", "full_iteration"], "cross_entropy": ["unfused", "te"]}
    found = refused(api, document("narrow", wrong))
    assert "'full_iteration' is not one of none, attn" in found["body.space.job.cuda_graphs"]
    assert "is not one of unfused, the only value that" in found["body.space.job.cross_entropy"]
    # A document with a declaration of its own does not get round the owner.
    own = {"cross_entropy": {"search": ["te"], "kind": "word", "values": ["te"]}}
    assert "the only value" in refused(api, document("narrow", own))["body.space.job.cross_entropy"]


def test_one_of_several_workers_is_enough(api: Api) -> None:
    api.register("o1", cluster="several", **declared(knobs={"chunk": CHUNK}))
    api.register("o2", cluster="several", **declared())
    api.post("/plans", document("several", {"chunk": [8, 64]}))
    assert (
        "has no such knob"
        in refused(api, document("several", {"fused": [True]}))["body.space.job.fused"]
    )


def test_a_condition_that_no_legal_layout_meets_is_one_sentence(api: Api) -> None:
    api.register("c1", cluster="never", **declared(knobs={"fused": FUSED}))
    asked = document("never", {"fused": [False, True]}, space={"tp": 1})
    message = refused(api, asked)["body.space.job.fused"]
    assert message.startswith("no legal layout can have true, which the trainer has only where tp")
    api.post("/plans", document("never", {"fused": [False, True]}, space={"tp": [1, 2]}))


def test_a_value_that_no_legal_layout_can_have_is_a_warning_where_others_are_left(api: Api) -> None:
    graphs = {"kind": "word", "values": ["none", "attn", "whole"], "default": "none"}
    graphs |= {"needs": [{"value": "whole", "when": "tp > 8"}], "arguments": ["--graphs"]}
    api.register("w1", cluster="warned", **declared(knobs={"graphs": graphs}))
    asked = document("warned", {"graphs": ["none", "attn", "whole"]})
    words = "no legal layout can have graphs whole (only where tp > 8)"
    assert words in api.post("/plans", asked)["warnings"]
    assert words in api.post("/campaigns", asked, status=201)["spec"]["warnings"]
    clone = api.post("/campaigns/warned/clone", {}, status=201)
    assert clone["spec"]["warnings"].count(words) == 1


def test_a_document_does_not_declare_knobs_itself(api: Api) -> None:
    own = {"search": [False, True], "kind": "switch", "default": False}
    for trainer in ({}, {"probe": {"trainer": "embedded"}}):
        asked = {**document("own", {"magic": own, "compile": {**own, "when": "tp > 1"}}), **trainer}
        asked["model"] = "tiny-llama"
        if not trainer:
            del asked["probe"]
        assert refused(api, asked).keys() == {"body.space.job.magic"}
        del asked["space"]["job"]["magic"]
        spec = api.post("/campaigns", {**asked, "name": f"o{len(trainer)}"}, status=201)["spec"]
        assert spec["space"]["job"]["compile"]["when"] == "family == llama"
    clone = {"probe": {"trainer": "megatron-lm"}}
    answer = api.post("/campaigns/o0/clone", clone, status=422)
    assert "megatron-lm has no such knob" in answer["errors"][0]["message"]


def test_a_baseline_may_set_a_declared_knob_that_is_not_searched(api: Api) -> None:
    api.register("b1", cluster="based", **declared(knobs={"fused": FUSED, "chunk": CHUNK}))
    baseline = {"tp": 2, "job": {"fused": True}}
    made = document("based", {"chunk": [8, 64]}, baseline=baseline)
    api.post("/campaigns", made, status=201)
    read = api.get("/campaigns/based")["spec"]["baseline"]
    assert read["job"] == {"fused": True}
    alone = document("based", {}, baseline=baseline, name="alone")
    del alone["space"]["job"]
    spec = api.post("/campaigns", alone, status=201)["spec"]
    assert spec["baseline"]["job"] == {"fused": True}


def test_a_trainer_is_read_by_its_name(api: Api) -> None:
    assert client_of(api).trainer("megatron-lm") == TrainerRead.of_adapter(MEGATRON_LM)
    listed = client_of(api).trainers().trainers
    assert "megatron-lm" in [each.name for each in listed]


def test_a_misspelt_trainer_is_answered_with_the_nearest(api: Api) -> None:
    problem = api.get("/trainers/megatron-ml", status=404)
    assert "did you mean 'megatron-lm'?" in problem["detail"]


def test_a_trainer_that_a_worker_declares_is_read(api: Api) -> None:
    api.register("t1", cluster="told", **declared(knobs={"chunk": CHUNK}))
    told = client_of(api).trainer("ours")
    assert told.target_version == "0.16.1"
    assert [each.name for each in told.knobs] == ["chunk"]


def test_the_needs_of_a_declared_value_are_one_condition(api: Api) -> None:
    needs = [{"value": True, "when": each} for each in ("tp > 1", "pp > 1 or ep > 1")]
    api.register("t2", cluster="told", **declared(knobs={"chunk": CHUNK}))  # the newest counts
    api.register("t3", cluster="told", **declared(knobs={"fused": {**FUSED, "needs": needs}}))
    (fused,) = client_of(api).trainer("ours").knobs
    assert fused.needs == {"true": "tp > 1 and (pp > 1 or ep > 1)"}


def test_the_page_of_a_trainer_has_its_knobs_and_effects(api: Api) -> None:
    page = api.http.get("/trainers/megatron-lm").text
    assert [knob for knob in MEGATRON_LM.job_knobs if f"<b>{knob}</b>" not in page] == []
    assert "0.62 times (0.42 to 0.91 times) what is exposed of ep" in page


def test_an_unknown_trainer_has_no_page(api: Api) -> None:
    assert api.http.get("/trainers/nobody").status_code == 404


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"x": {"kind": "switch", "when": "__import__('os')"}}, "x.when"),
        ({"x": {"kind": "word", "values": ["a b"]}}, "x.values"),
        ({"x": {"kind": "switch", "shell": "rm"}}, "x"),
        ({f"k{n}": {"kind": "switch"} for n in range(65)}, ""),
    ],
)
def test_a_malformed_declaration_is_refused(api: Api, knobs: Any, field: str) -> None:
    body = {"name": "m", "host": "h", "cluster": "c", "num_nodes": 1, "devices_per_node": 1}
    body |= {"device": "cpu", "trainers": {"ours": "1"}, "trainer_knobs": {"ours": knobs}}
    answer = api.post("/workers", body, status=422)
    assert any("trainer_knobs.ours" in each["field"] for each in answer["errors"])
    assert any(field in each["field"] for each in answer["errors"])


def test_the_form_of_a_campaign_links_to_the_knobs_of_trainers(api: Api) -> None:
    assert '/trainers/megatron-lm">' in api.http.get("/submit").text
