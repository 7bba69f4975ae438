"""Commands that show the service's view of nodes: a real service, and a worker played by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.kit.services import ServeProcess
from workers.slurm.commands import allocation


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    process = ServeProcess(tmp_path_factory.mktemp("served") / "data")
    for cluster in ("ours", "theirs"):
        _register(process, cluster)
    yield process
    process.end()


def _register(process: ServeProcess, cluster: str) -> None:
    names = ["n1", f"{cluster}-2"]
    body = {
        "name": f"{cluster}-4711",
        "host": "n1",
        "cluster": cluster,
        "num_nodes": 2,
        "devices_per_node": 8,
        "device": "AMD MI250X GCD",
        "allocation": {"scheduler": "slurm", "job_id": "4711", "launcher": "ray", "ends_in_s": 4e3},
        "nodes": [{"name": name, "num_devices": 8} for name in names],
    }
    worker = process.post("/workers", body)["worker_id"]
    states: list[dict[str, Any]] = [
        {"name": "n1", "state": "busy", "doing": "trial 3", "free_devices": 6},
        {"name": f"{cluster}-2", "state": "lost", "reason": "its agent ended", "free_devices": 0},
    ]
    process.post(f"/workers/{worker}/heartbeats", {"trials": [], "status": {"nodes": states}})


def call(process: ServeProcess, *arguments: str) -> Result:
    where = ["--url", process.service["url"], "--token-file", str(process.data_dir / "token")]
    return CliRunner().invoke(allocation, [*arguments, *where])


def test_show_tells_of_each_node_and_of_the_time_that_is_left(serve: ServeProcess) -> None:
    shown = call(serve, "show", "ours-4711").stdout
    described = "job 4711, 2 nodes of 8 devices of ours, launcher ray"
    assert f"ours-4711 ({described}): working, 1 h 06" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["n1", "busy", "6/8", "trial", "3"] in lines
    assert ["ours-2", "lost", "0/8", "its", "agent", "ended"] in lines
    assert "node-hours: 0 " in shown
    assert "theirs" not in shown


def test_show_without_a_name_shows_every_allocation_and_json_all_of_it(serve: ServeProcess) -> None:
    shown = call(serve, "show").stdout
    assert "ours-4711" in shown
    assert "theirs-4711" in shown
    documents = json.loads(call(serve, "show", "--json").stdout)
    assert {document["cluster"] for document in documents} == {"ours", "theirs"}
    assert json.loads(call(serve, "show", "ours-4711", "--json").stdout)["job_id"] == "4711"


def test_an_allocation_is_found_by_its_jobs_number(serve: ServeProcess) -> None:
    assert "4711" in call(serve, "show", "4711").stdout
    unknown = call(serve, "show", "4712")
    assert unknown.exit_code == 1
    assert "knows no allocation '4712'" in unknown.output


def test_a_node_is_set_aside_and_released_by_its_name(serve: ServeProcess) -> None:
    said = call(serve, "quarantine", "ours-2", "--reason", "slow link")
    assert said.exit_code == 0, said.output
    nodes = {node["name"]: node for node in serve.get("/nodes?cluster=ours")["nodes"]}
    assert nodes["ours-2"]["quarantine"]["reason"] == "slow link"
    assert call(serve, "release", "ours-2").exit_code == 0
    again = call(serve, "release", "ours-2")
    assert again.exit_code == 1
    assert "not in quarantine" in again.output


def test_a_name_that_two_clusters_have_needs_its_cluster(serve: ServeProcess) -> None:
    ambiguous = call(serve, "quarantine", "n1")
    assert ambiguous.exit_code == 1
    assert "ours and theirs each have a node 'n1': say which with --cluster" in ambiguous.output
    assert call(serve, "quarantine", "n1", "--cluster", "theirs").exit_code == 0
    assert call(serve, "release", "n1", "--cluster", "theirs").exit_code == 0
    assert "knows no node 'n9'" in call(serve, "release", "n9").output


def test_a_service_away_or_refusing_is_one_sentence(serve: ServeProcess, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("wrong")
    runner = CliRunner()
    url = serve.service["url"]
    refused = runner.invoke(allocation, ["show", "--url", url, "--token-file", str(token)])
    assert refused.exit_code == 1
    assert "check the token file" in refused.output
    away = ["show", "--url", "http://127.0.0.1:9", "--token-file", str(token)]
    assert "does not answer" in runner.invoke(allocation, away).output
    for name in ("show", "list"):
        missing = runner.invoke(allocation, [name, "--url", url, "--token-file", "/none"])
        assert missing.exit_code != 0
