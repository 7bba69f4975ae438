"""Models and clusters by name: presets, and one's own."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import MODEL_PRESETS
from tests.kit.api import CAMPAIGN, CLUSTER, Api

MODEL = {
    "family": "gpt",
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "seq_length": 64,
    "vocab_size": 128,
}
MACHINE = {key: value for key, value in CLUSTER.items() if key != "name"}


def put(api: Api, path: str, body: Any, status: int = 201) -> Any:
    answer = api.http.put(f"/v1{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def delete(api: Api, path: str, status: int = 204) -> Any:
    answer = api.http.delete(f"/v1{path}")
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


def test_presets_are_listed_and_can_be_submitted_as_they_are_read(api: Api) -> None:
    models = api.get("/models")["models"]
    assert [each["name"] for each in models] == list(MODEL_PRESETS)
    assert all(each["preset"] for each in models)
    clusters = api.get("/clusters")["clusters"]
    assert [each["name"] for each in clusters] == ["local-cpu", *CLUSTER_PRESETS]
    tiny = api.get("/models/tiny")
    assert tiny["num_parameters"] == MODEL_PRESETS["tiny"].num_parameters
    frontier = api.get("/clusters/frontier")["description"]
    api.submit(model=tiny["description"])
    assert api.submit(name="b", cluster=frontier)["spec"]["cluster"] == frontier


def test_a_model_is_put_read_replaced_and_deleted(api: Api) -> None:
    made = put(api, "/models/mine", MODEL)
    assert (made["name"], made["preset"]) == ("mine", False)
    assert made["description"]["ffn_hidden_size"] == 256
    assert made["created_by"]
    again = put(api, "/models/mine", {"preset": "tiny", "num_layers": 8}, status=200)
    assert again["description"] == {
        **MODEL_PRESETS["tiny"].to_mapping(),
        "name": "mine",
        "num_layers": 8,
    }
    assert again["created_at"] == made["created_at"]
    assert api.get("/models/mine") == again
    assert api.get("/models")["models"][-1] == again
    delete(api, "/models/mine")
    assert "no model named 'mine'" in api.get("/models/mine", status=404)["detail"]
    delete(api, "/models/mine", 404)


def test_a_cluster_is_put_as_yaml_and_says_what_was_guessed(http: TestClient, api: Api) -> None:
    text = "device: X1\nnum_nodes: 2\ndevices_per_node: 4\ndevice_memory_gb: 16\n"
    answer = http.put(
        "/v1/clusters/mine", content=text, headers={"Content-Type": "application/yaml"}
    )
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["num_devices"], made["description"]["device_memory_bytes"]) == (8, 16 << 30)
    assert "memory_bandwidth_bytes_per_s" in made["warning"]
    assert api.get("/clusters/mine")["warning"] == made["warning"]


def test_a_campaign_stores_the_whole_description_of_a_user_model(api: Api) -> None:
    put(api, "/models/mine", MODEL)
    put(api, "/clusters/desk", {**MACHINE, "num_nodes": 2})
    spec = api.submit(model="mine", cluster="desk")["spec"]
    assert (spec["model"]["name"], spec["model"]["hidden_size"]) == ("mine", 64)
    assert (spec["cluster"]["name"], spec["cluster"]["num_nodes"]) == ("desk", 2)
    put(api, "/models/mine", {**MODEL, "hidden_size": 128}, status=200)
    delete(api, "/clusters/desk")
    assert api.get("/campaigns/first")["spec"] == spec
    again = api.post("/campaigns", {**spec, "name": "again"}, status=201)
    assert again["spec"] == {**spec, "name": "again"}


def test_user_models_and_clusters_serve_as_presets(api: Api) -> None:
    put(api, "/models/mine", MODEL)
    put(api, "/clusters/desk", MACHINE)
    spec = api.submit(
        model={"preset": "mine", "num_layers": 4}, cluster={"preset": "desk", "num_nodes": 3}
    )["spec"]
    assert (spec["model"]["name"], spec["model"]["num_layers"]) == ("mine-custom", 4)
    assert (spec["cluster"]["name"], spec["cluster"]["num_nodes"]) == ("desk", 3)
    other = put(api, "/clusters/den", {"preset": "desk", "device_memory_gb": 2})
    assert other["description"] == {
        **api.get("/clusters/desk")["description"],
        "name": "den",
        "device_memory_bytes": 2 << 30,
    }
    named = api.submit(name="b", cluster={"name": "desk"})
    assert named["spec"]["cluster"]["device_memory_bytes"] == CLUSTER["device_memory_bytes"]
    assert put(api, "/models/alias", "mine")["description"]["hidden_size"] == 64

    described = api.submit(name="c", cluster={**CLUSTER, "name": "desk", "num_nodes": 7})
    assert described["spec"]["cluster"]["num_nodes"] == 7


def test_an_unknown_name_lists_user_models_too(api: Api) -> None:
    put(api, "/models/my-model", MODEL)
    problem = api.post("/campaigns", {**CAMPAIGN, "model": "my-modle"}, status=422)
    assert "did you mean 'my-model'" in problem["detail"]
    assert "gpt-22b" in problem["detail"]
    problem = api.post("/campaigns", {**CAMPAIGN, "cluster": {"preset": "desk"}}, status=422)
    assert "desk" in problem["detail"]


@pytest.mark.parametrize(
    ("kind", "preset", "body"), [("models", "tiny", MODEL), ("clusters", "frontier", MACHINE)]
)
def test_presets_cannot_be_changed_nor_anything_put_of_another_type_or_size(
    api: Api, kind: str, preset: str, body: Any
) -> None:
    for problem in (
        put(api, f"/{kind}/{preset}", body, status=409),
        delete(api, f"/{kind}/{preset}", 409),
    ):
        assert problem["type"].endswith(":preset-fixed")
        assert f"{preset!r} is a preset" in problem["detail"]
    for content, headers, status in (
        (b"tiny", {"Content-Type": "text/plain"}, 415),
        (b"{", {}, 400),
        (b" " * (257 << 10), {}, 413),
    ):
        answer = api.http.put(f"/v1/{kind}/mine", content=content, headers=headers)
        assert answer.status_code == status
