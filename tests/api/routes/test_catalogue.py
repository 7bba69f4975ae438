"""Models and clusters by name: presets, one's own, and clusters whose constants were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from layout_tuner.api.settings import Settings
from layout_tuner.search_spaces.clusters.calibration_file import (
    MeasuredConstants,
    constants_file,
    write_constants,
)
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from tests.kit.api import CAMPAIGN, CLUSTER, MACHINE, MODEL, TOKEN, Api, answered
from tests.kit.campaigns import space_of


def put(api: Api, path: str, body: Any, status: int = 201) -> Any:
    return answered(api.http.put(f"/v1{path}", json=body), status).json()


def delete(api: Api, path: str) -> None:
    assert api.http.delete(f"/v1{path}").status_code == 204


def test_presets_are_listed_and_can_be_submitted_as_they_are_read(api: Api) -> None:
    models = [each for each in api.get("/models")["models"] if each["preset"]]
    assert [each["name"] for each in models] == list(MODEL_PRESETS)
    clusters = [each for each in api.get("/clusters")["clusters"] if each["preset"]]
    assert [each["name"] for each in clusters] == ["local-cpu", *CLUSTER_PRESETS]
    tiny = api.get("/models/tiny")
    assert tiny["num_parameters"] == MODEL_PRESETS["tiny"].num_parameters
    frontier = api.get("/clusters/frontier")["description"]
    spec = api.submit(name="presets", model=tiny["description"], cluster=frontier)["spec"]
    assert (spec["model"], spec["cluster"]) == (tiny["description"], frontier)


def test_a_model_is_put_read_replaced_and_deleted(api: Api) -> None:
    made = put(api, "/models/mine", MODEL)
    assert (made["name"], made["preset"], bool(made["created_by"])) == ("mine", False, True)
    assert made["description"]["ffn_hidden_size"] == 256
    again = put(api, "/models/mine", {"preset": "tiny", "num_layers": 8}, status=200)
    changed = {"name": "mine", "num_layers": 8}
    assert again["description"] == MODEL_PRESETS["tiny"].to_mapping() | changed
    assert again["created_at"] == made["created_at"]
    assert api.get("/models/mine") == again
    assert again in api.get("/models")["models"]
    delete(api, "/models/mine")
    assert "no model named 'mine'" in api.get("/models/mine", status=404)["detail"]


@pytest.mark.parametrize(
    "preset", ["tiny-mla", "deepseek-v3", "qwen3-next-80b-a3b", "nemotron-3-super-120b-a12b"]
)
def test_models_with_layers_of_several_kinds_are_stored(api: Api, preset: str) -> None:
    shape = MODEL_PRESETS[preset]
    name = f"own-{preset}"
    described = {**shape.to_mapping(), "name": name}
    made = put(api, f"/models/{name}", described)
    assert made["description"] == described
    assert made["num_parameters"] == shape.num_parameters
    assert api.get(f"/models/{name}") == made
    assert made in api.get("/models")["models"]
    fewer = put(api, "/models/fewer", {"preset": name, "vocab_size": 512})["description"]
    assert fewer == {**made["description"], "name": "fewer", "vocab_size": 512}
    delete(api, "/models/fewer")


def test_a_campaign_of_a_hybrid_is_stored_with_its_layers(api: Api) -> None:
    kinds = ["mamba2", {"full": 1}, {"dense": 2}]
    sizes = {"num_heads": 4, "head_dim": 16, "state_dim": 8, "num_groups": 2}
    hybrid = MODEL | {"family": "llama", "layer_kinds": kinds, "num_layers": 4}
    hybrid["ffn_hidden_size"] = 128
    hybrid |= {f"mamba_{size}": number for size, number in sizes.items()}
    spec = api.submit(name="hybrid", model=hybrid, probe={"trainer": "megatron-lm"})["spec"]
    assert spec["model"]["layer_kinds"] == ["mamba2", "full", {"dense": 2}]
    assert api.get("/campaigns/hybrid")["spec"] == spec
    wrong = {**CAMPAIGN, "name": "wrong", "model": {**hybrid, "layer_kinds": ["mamba3"]}}
    refused = api.post("/campaigns", wrong, status=422)
    assert "'mamba3' is not a kind of layer (did you mean 'mamba2'?)" in refused["detail"]


def test_a_cluster_is_put_as_yaml_and_says_what_was_guessed(api: Api) -> None:
    text = "device: X1\nnum_nodes: 2\ndevices_per_node: 4\ndevice_memory_gb: 16\n"
    headers = {"Content-Type": "application/yaml"}
    made = answered(api.http.put("/v1/clusters/guessed", content=text, headers=headers), 201).json()
    assert (made["num_devices"], made["description"]["device_memory_bytes"]) == (8, 16 << 30)
    assert "memory_bandwidth_bytes_per_s" in made["warning"]
    assert api.get("/clusters/guessed")["warning"] == made["warning"]


def test_a_campaign_stores_the_whole_description_of_a_user_model(api: Api) -> None:
    put(api, "/models/stored", MODEL)
    put(api, "/clusters/stored", {**MACHINE, "num_nodes": 2})
    spec = api.submit(name="stores", model="stored", cluster="stored")["spec"]
    assert (spec["model"]["name"], spec["model"]["hidden_size"]) == ("stored", 64)
    assert (spec["cluster"]["name"], spec["cluster"]["num_nodes"]) == ("stored", 2)
    put(api, "/models/stored", {**MODEL, "hidden_size": 128}, status=200)
    delete(api, "/clusters/stored")
    assert api.get("/campaigns/stores")["spec"] == spec
    again = api.post("/campaigns", {**spec, "name": "again"}, status=201)
    assert again["spec"] == {**spec, "name": "again"}


@pytest.fixture(scope="module")
def named(api: Api) -> Api:
    """With a model `base` and a cluster `desk`."""
    put(api, "/models/base", MODEL)
    put(api, "/clusters/desk", MACHINE)
    return api


def test_user_models_and_clusters_serve_as_presets(named: Api) -> None:
    def spec(name: str, **changes: Any) -> Any:
        return named.submit(name=name, **changes)["spec"]

    model, cluster = {"preset": "base", "num_layers": 4}, {"preset": "desk", "num_nodes": 3}
    changed = spec("changed", model=model, cluster=cluster)
    assert (changed["model"]["name"], changed["model"]["num_layers"]) == ("base-custom", 4)
    assert (changed["cluster"]["name"], changed["cluster"]["num_nodes"]) == ("desk", 3)
    desk = named.get("/clusters/desk")["description"]
    assert spec("named", cluster={"name": "desk"})["cluster"] == desk
    described = spec("described", cluster={**CLUSTER, "name": "desk", "num_nodes": 7})
    assert described["cluster"]["num_nodes"] == 7


def test_models_and_clusters_are_made_from_those_that_users_have_put(named: Api) -> None:
    den = {"preset": "desk", "device_memory_gb": 2}
    other = put(named, "/clusters/den", den)["description"]
    desk = named.get("/clusters/desk")["description"]
    assert other == {**desk, "name": "den", "device_memory_bytes": 2 << 30}
    assert put(named, "/models/alias", "base")["description"]["hidden_size"] == 64


def test_a_name_that_is_not_known_is_refused_with_those_that_are_like_it(named: Api) -> None:
    refused = named.post("/campaigns", {**CAMPAIGN, "model": "bsae"}, status=422)
    assert "did you mean 'base'" in refused["detail"]
    assert "gpt-22b" in refused["detail"]
    refused = named.post("/campaigns", {**CAMPAIGN, "cluster": {"preset": "deks"}}, status=422)
    assert "desk" in refused["detail"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The service's settings, with the data directory in which constants may lie."""
    return Settings(token=TOKEN, data_dir=tmp_path)


@pytest.fixture
def served_url(sqlite_url: str) -> str:
    """Constants lie in files."""
    return sqlite_url


def test_a_campaign_on_a_preset_starts_from_what_was_measured_unless_it_is_written_out(
    http: TestClient, tmp_path: Path
) -> None:
    api = Api(http)
    measured = MeasuredConstants(
        cluster="local-cpu",
        host="box",
        measured_at="2026-03-01T12:00:00+00:00",
        constants={"intra_node_latency_s": 4.2e-5},
    )
    write_constants(tmp_path, measured)
    space = space_of(global_batch_size=8, micro_batch_size=[1, 2])
    cluster = api.submit(cluster="local-cpu", space=space)["spec"]["cluster"]
    assert (cluster["intra_node_latency_s"], cluster["source"]) == (4.2e-5, measured.source)
    cluster = api.submit(name="second", cluster=CLUSTER)["spec"]["cluster"]
    assert cluster["intra_node_latency_s"] != 4.2e-5


def test_an_unreadable_file_of_constants_refuses_the_campaign_and_an_impossible_name_has_no_file(
    http: TestClient, tmp_path: Path
) -> None:
    api = Api(http)
    path = constants_file(tmp_path, "local-cpu")
    path.parent.mkdir()
    path.write_text("nonsense")
    refused = api.post("/campaigns", {**CAMPAIGN, "cluster": "local-cpu"}, status=422)
    assert f"{path} is not a readable file of measured constants" in refused["detail"]
    assert api.get("/campaigns")["campaigns"] == []

    name = "\N{SLICE OF PIZZA}" * 64  # 256 bytes, and five more: no file has such a name
    cluster = {**CLUSTER, "name": name}
    for described in (cluster, {"name": name}, {**cluster, "source": "x"}):
        answer = api.http.post("/v1/campaigns", json={**CAMPAIGN, "cluster": described})
        assert str(tmp_path) not in answer.text
        assert answer.status_code in (201, 409, 422)
