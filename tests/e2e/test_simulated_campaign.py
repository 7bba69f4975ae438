"""Simulated campaigns through the whole product: two simulated workers, HTTP, driver and pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layout_tuner.trainers.simulator import simulator_trainer
from tests.e2e.conftest import Service, started
from tests.kit.api import answered
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]

MARK = "simulated, not measured (simulator 2, seed 3)"
CAMPAIGN: dict[str, Any] = {
    "name": "rehearsal",
    "model": "gpt-22b",
    "cluster": "frontier",
    "objective": "tokens_per_s_per_device",
    "strategy": "guided",
    "simulated": {"seed": 3},
    "budget": {"trials": 8},
    "probe": {},
    "space": {
        "global_batch_size": 128,
        "num_nodes": 4,
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4],
        "micro_batch_size": [1, 2],
        "zero_stage": 1,
        "precision": "bf16",
    },
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose two workers simulate eight nodes of Frontier each, and an ended campaign."""
    options = ("--simulate", "frontier", "--nodes", "8", "--workers", "2")
    with started(Service(tmp_path_factory.mktemp("up") / "data", *options)) as service:
        service.submit(**CAMPAIGN)
        service.wait_for_end("rehearsal")
        yield service


def test_a_campaign_runs_to_its_end_in_simulated_time(simulated: Service) -> None:
    campaign, trials = simulated.get("/campaigns/rehearsal"), simulated.trials("rehearsal")
    assert (campaign["state"], campaign["reason"]) == ("COMPLETED", "budget")
    assert len(trials) == 8
    completed = [each for each in trials if each["state"] == "COMPLETED"]
    assert len(completed) >= 4
    shortest_s = 20.0  # a simulated probe is up after as many seconds
    assert min(each["node_seconds"] for each in trials) >= 4 * shortest_s
    assert campaign["node_seconds"] > 10 * campaign["wall_time_s"]
    details = [simulated.get(f"/trials/{each['id']}") for each in trials]
    assert len({each["attempts"][0]["worker_name"] for each in details}) == 2


def test_documents_say_that_a_campaign_is_simulated(simulated: Service) -> None:
    campaign = simulated.get("/campaigns/rehearsal")
    assert campaign["simulated"] == {"seed": 3, "version": 2}
    assert campaign["trainer"] == simulator_trainer()
    trials = simulated.trials("rehearsal")
    assert all(each["simulated"] for each in trials)
    page = simulated.get("/campaigns/rehearsal/leaderboard")
    assert page["simulated"] == campaign["simulated"]
    assert {each["measurement"]["trainer"] for each in page["trials"]} == {simulator_trainer()}


def test_commands_and_exports_say_that_a_campaign_is_simulated(simulated: Service) -> None:
    shown = simulated.run("campaign", "show", "rehearsal").stdout
    assert MARK in shown
    ranked = simulated.run("leaderboard", "rehearsal").stdout
    assert f"simulated by {simulator_trainer()}, not measured" in ranked
    assert "simulated" in simulated.run("campaign", "list").stdout
    export = simulated.get("/campaigns/rehearsal/exports", format="megatron-lm")
    assert all(MARK in file["content"] for file in export["files"])


def test_the_table_of_a_simulated_campaign_says_so_and_calibrates_nothing(
    simulated: Service,
) -> None:
    table = simulated.run("campaign", "table", "rehearsal").stdout
    rows = table.splitlines()[1:]
    source = f'"simulated by {simulator_trainer()}, seed 3: layout-tuner campaign rehearsal"'
    assert rows
    assert all(row.startswith(source) for row in rows)
    path = simulated.data_dir.parent / "table.csv"
    path.write_text(table)
    layout = ("--tp", "8", "--pp", "4", "--global-batch-size", "128")
    estimate = ("estimate", "--model", "gpt-22b", "--cluster", "frontier", *layout)
    refused = simulated.run(*estimate, "--calibrate-from", str(path))
    assert refused.returncode == 2
    assert "are simulated, and would stand for measurements" in refused.stderr
    simulated.done("campaign", "import", str(path), "--name", "again")
    changes = {"name": "fourth", "simulated": None, "start_from": ["again"]}
    refused = simulated.http.post("/campaigns", json={**CAMPAIGN, **changes})
    answered(refused, 422, "the imported table of campaign 'again' is simulated")


def test_a_measured_campaign_gets_no_simulated_worker_and_knows_no_simulated_trial(
    simulated: Service,
) -> None:
    changes = {"name": "measured", "simulated": None, "budget": {"trials": 2}}
    simulated.submit(**{**CAMPAIGN, **changes})
    try:
        wait_until("a trial waits", lambda: simulated.trials("measured", state="PENDING"), 30)
        campaign = simulated.get("/campaigns/measured")
        assert campaign["simulated"] is None
        assert campaign["starts_from"] == 0
        assert "no worker of cluster frontier is there" in campaign["progress"]["waiting_reason"]
    finally:
        simulated.http.post("/campaigns/measured/cancel")
