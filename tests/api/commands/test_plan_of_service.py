"""Plans and training jobs by the commands of a service."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Command
from tests.kit.campaigns import space_of
from tests.kit.services import ServeProcess
from tests.kit.store import completed, make_worker, run_trial
from tuner.driver.driver import Driver

FULL = [Layout(tp=2, pp=2, num_microbatches=8), Layout(tp=2, dp=2, num_microbatches=4)]
"""Layouts that fill a node of four devices."""


def measured(
    service: ServeProcess, store: Store, name: str, layouts: Sequence[Layout] = FULL
) -> int:
    """A campaign on two nodes with some completed trials; its id."""
    cluster = {**CAMPAIGN["cluster"], "num_nodes": 2}
    service.post("/campaigns", {**CAMPAIGN, "name": name, "cluster": cluster})
    campaign = store.campaigns.by_name(name).id
    worker = make_worker(store, "w1", devices_per_node=4)
    for number, layout in enumerate(layouts, 1):
        outcome = completed(layout, tokens_per_s=1000.0 * number)
        run_trial(store, campaign, layout, outcome, worker=worker.id)
    return campaign


def test_the_leaderboard_has_the_days_of_a_training_job_by_measured_step_times(
    run: Command, service: ServeProcess, store: Store
) -> None:
    measured(service, store, "ranked")
    flags = ("leaderboard", "ranked", "--tokens", "1B", "--mtbf-hours", "1e6")
    page = json.loads(run(*flags, "--json").stdout)
    assert (page["job"]["tokens"], page["job"]["mtbf_hours"]) == (10**9, 1e6)
    for trial, job in zip(page["trials"], page["jobs"], strict=True):
        assert job["step_source"] == "measured"
        assert job["layout_key"] == trial["layout_key"]
        duration = job["duration"]
        steps_s = -(-(10**9) // (8 * 128)) * trial["step_time_s"]
        assert duration["days"] * 86400 == pytest.approx(steps_s / (1 - duration["lost_share"]))
        assert 0 < duration["lost_share"] < 0.001
    assert "jobs" not in json.loads(run("leaderboard", "ranked", "--json").stdout)
    text = " ".join(run(*flags).stdout.split())
    assert "training job: 1B tokens on the layout's nodes" in text
    assert "rank 1 measured " in text
    larger = json.loads(run(*flags, "--nodes", "2", "--json").stdout)["jobs"]
    assert {job["step_source"] for job in larger} == {"measured and extrapolated"}
    assert run(*flags, "--csv").exit_code == 2
    refused = run("leaderboard", "ranked", "--nodes", "2")
    assert refused.exit_code == 2
    assert "say its tokens too" in refused.output


def test_a_dry_run_prints_the_services_plan_and_submits_nothing(
    run: Command, service: ServeProcess, store: Store, tmp_path: Path
) -> None:
    store.campaigns.end(measured(service, store, "before"), "COMPLETED", "budget", "")
    file = tmp_path / "c.yaml"
    document = {**CAMPAIGN, "name": "later", "start_from": ["before"]}
    file.write_text(yaml.safe_dump(document))
    done = run("campaign", "submit", str(file), "--dry-run")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("plan of later: tiny on local-cpu. Every figure")
    assert "the budget pays for 4 probes" in done.stdout
    assert "stored measurements" in done.stdout
    plan = json.loads(run("campaign", "submit", str(file), "--dry-run", "--json").stdout)
    assert plan["knowledge"]["num_measurements"] >= 2
    assert run("campaign", "show", "later").exit_code == 1, "it was not submitted"
    file.write_text(yaml.safe_dump({**document, "model": "gpt-0"}))
    refused = run("campaign", "submit", str(file), "--dry-run")
    assert refused.exit_code == 1
    assert "gpt-0" in refused.output


def test_a_dry_run_waits_for_a_plan_that_the_driver_makes(
    run: Command, store: Store, tmp_path: Path
) -> None:
    upto = {"from": 1, "to": 160}
    space = {
        "global_batch_size": {"min": 1, "max": 1 << 20},
        "tp": [1, 2],
        "micro_batch_size": upto,
        "num_microbatches": dict(upto),  # YAML would write an alias for the same object
        "dp": 1,
    }
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({**CAMPAIGN, "name": "large", "space": space_of(**space)}))
    driver, is_over = Driver(store), threading.Event()

    def drive() -> None:
        while not is_over.wait(0.05):
            driver.step()

    with ThreadPoolExecutor(1) as pool:
        driving = pool.submit(drive)
        try:
            done = run("campaign", "submit", str(file), "--dry-run", "--json")
        finally:
            is_over.set()
        driving.result()
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert (plan["num_legal"], len(plan["layouts"])) == (2 * 160 * 160, 10)
