"""`verify`, plans and training jobs; a thread is the driver and the worker."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.driver import Driver
from tests.kit.api import CAMPAIGN, CLUSTER, Api, Command, ends, refused_line
from tests.kit.campaigns import space_of
from tests.kit.store import completed, failed, make_worker, run_trial
from tests.kit.waiting import wait_until

Measure = Callable[..., int]
LAYOUTS = [Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2)]
OURS = list(zip(LAYOUTS, (4000.0, 3000.0, 2000.0, 1000.0), strict=True))


def start_other_trainer(
    store: Store,
    name: str,
    speeds: dict[Layout, float | None],
    disturbed: Mapping[Layout, int] = MappingProxyType({}),
) -> None:
    """Starts a thread that measures what the verification's campaign lists, and ends it.

    `disturbed`: how many runs of a layout are disturbed, the first ones.
    """

    def measure() -> None:
        wait_until(
            "the second campaign is there",
            lambda: any(c.name == name for c in store.campaigns.find()),
        )
        campaign = store.campaigns.by_name(name)
        about = {"devices_per_node": 4, "trainers": {"theirs": "7"}}
        worker = make_worker(store, f"{name}-theirs", **about).id
        spec = CampaignSpec.from_mapping(campaign.spec)
        for layout in spec.layouts:
            speed = speeds[layout]
            for number in range(spec.runs if speed else 1):
                share = 0.42 if number < disturbed.get(layout, 0) else 0.01
                theirs = {"trainer": "theirs", "trainer_version": "7", "others_share": share}
                outcome = completed(layout, tokens_per_s=speed, **theirs) if speed else failed()
                run_trial(store, campaign.id, layout, outcome, worker=worker)
        store.campaigns.end(campaign.id, "COMPLETED", "exhausted", "")

    threading.Thread(target=measure, daemon=True).start()


@pytest.fixture(scope="module")
def agreed(run: Command, measured: Measure, store: Store) -> dict[str, Any]:
    """What `verify` says of four layouts, the last of which crashes on the other trainer."""
    store.campaigns.end(measured("agreed", OURS * 3), "COMPLETED", "budget", "")
    speeds = dict(zip(LAYOUTS, (1900.0, 2000.0, 1000.0, None), strict=True))
    start_other_trainer(store, "agreed-theirs", speeds)
    done = ends(run("verify", "agreed", "--trainer", "theirs", "--runs", "3", "--json"), 0)
    return dict(json.loads(done.stdout))


def test_each_layout_is_compared_with_the_other_trainer(agreed: dict[str, Any]) -> None:
    layouts = agreed["layouts"]
    assert [each["rank"] for each in layouts] == [1, 2, 3, 4]
    assert [each["other_runs"] for each in layouts] == [3, 3, 3, 0]
    *ratios, none = (each["ratio"] for each in layouts)
    assert (ratios, none) == (pytest.approx([0.475, 2 / 3, 0.5]), None)
    assert layouts[3]["failure"].startswith("crashed: ")


def test_the_two_orders_are_compared(agreed: dict[str, Any]) -> None:
    assert agreed["kendall_tau"] == pytest.approx(1 / 3)
    assert agreed["best_of_other"] == LAYOUTS[1].key
    assert agreed["best_of_other_over_our_first"] == pytest.approx(2000 / 1900 - 1)


@pytest.mark.usefixtures("agreed")
def test_a_repeated_verify_goes_on_and_prints_the_comparison(run: Command) -> None:
    again = run("verify", "agreed", "--trainer", "theirs", "--runs", "3")
    assert "Kendall's tau 0.33" in again.stdout, "it goes on with the campaign of before"
    assert "rank 4 was not measured: crashed" in again.stdout
    assert "there it is 5.3% over our first" in again.stdout
    assert "disturbed" not in again.stdout


def test_disturbed_runs_of_both_trainers_are_marked(
    run: Command, measured: Measure, store: Store
) -> None:
    campaign = measured("noisy")
    worker = make_worker(store, "noisy-ours", devices_per_node=4).id
    for place, share in ((0, 0.0), (0, 0.3), (1, 0.3), (2, 0.0), (3, 0.0)):
        layout, speed = OURS[place]
        outcome = completed(layout, tokens_per_s=speed, others_share=share)
        run_trial(store, campaign, layout, outcome, worker=worker)
    store.campaigns.end(campaign, "COMPLETED", "budget", "")
    speeds = dict(zip(LAYOUTS, (1900.0, 1800.0, 1000.0, None), strict=True))
    start_other_trainer(store, "noisy-theirs", speeds, {LAYOUTS[0]: 2, LAYOUTS[2]: 1})
    asked = ("verify", "noisy", "--trainer", "theirs", "--runs", "2")
    found = json.loads(run(*asked, "--json").stdout)["layouts"]
    assert [each["other_runs"] for each in found] == [2, 2, 1, 0]
    marks = [(each["disturbed"], each["other_disturbed"]) for each in found]
    assert marks == [(False, True), (True, False), (False, False), (False, False)]
    printed = run(*asked).stdout
    lines = [re.split(r"  +", line.strip()) for line in printed.replace("also", "").splitlines()]
    (head,) = (line for line in lines if "ratio" in line)
    ours, theirs = (place for place, heading in enumerate(head) if heading == "runs")
    rows = {line[0]: line for line in lines if len(line) == len(head) and line != head}
    assert [rows[rank][ours] for rank in "1234"] == ["1", "1, disturbed", "1", "1"]
    assert [rows[rank][theirs] for rank in "1234"] == ["2, disturbed", "2", "1", "-"]
    assert printed.count("disturbed: others took") == 1


def test_an_order_that_cannot_be_judged_is_not_called_a_disagreement(
    run: Command, measured: Measure, store: Store
) -> None:
    store.campaigns.end(measured("alike", OURS * 3), "COMPLETED", "budget", "")
    # Runs that agree to the digit have narrow intervals: 0.3 % each way.
    speeds = dict(zip(LAYOUTS, (2000.0, 2001.0, 1999.0, 2000.5), strict=True))
    start_other_trainer(store, "alike-theirs", speeds)
    done = ends(run("verify", "alike", "--trainer", "theirs", "--runs", "2"), 0)
    assert "the order cannot be judged: no two layouts are told apart by both" in done.stdout
    assert re.search(r"about \d+ runs of each layout in both would tell half", done.stdout)
    assert "Kendall" not in done.stdout


def test_what_cannot_be_verified_is_refused(run: Command, measured: Measure, store: Store) -> None:
    measured("empty")
    short = run("verify", "empty", "--trainer", "theirs")
    assert refused_line(short) == "Error: campaign empty has 0 ranked layouts; an order needs two"
    same = run("verify", "empty", "--trainer", "embedded")
    assert "was measured with embedded; name another" in same.stderr
    measured("taken", OURS)
    other = run("verify", "taken", "--trainer", "theirs", "--name", "empty")
    assert "another campaign named empty, which differs in strategy, budget, probe" in other.stderr
    wrong = run("verify", "taken", "--trainer", "theirs", "--parameter", "rate")
    assert "--parameter=rate is not NAME=VALUE" in wrong.stderr


@pytest.mark.parametrize(
    ("owner", "changes", "why"),
    [
        ("somebody", {}, "of somebody"),
        ("local", {"runs": 5}, "which differs in runs;"),
        ("local", {"model": "gpt-1.3b"}, "which differs in model;"),
        ("local", {"layouts": [LAYOUTS[0].to_mapping()] * 2}, ""),
        (
            "local",
            {"layouts": [Layout(tp=4, num_microbatches=8).to_mapping()]},
            "which differs in layouts;",
        ),
    ],
)
def test_only_an_own_campaign_with_the_same_content_is_gone_on_with(
    run: Command, measured: Measure, store: Store, owner: str, changes: dict[str, Any], why: str
) -> None:
    name = f"own-{owner}-{'-'.join(changes)}-{bool(why)}"
    store.campaigns.end(source := measured(name, OURS), "COMPLETED", "budget", "")
    before = store.campaigns.get(source).spec
    theirs = {
        **before,
        "name": f"{name}-2",
        "strategy": "exhaustive",
        "budget": {},
        "runs": 2,
        "knowledge": "none",
        "stop": {"early": False, "remeasure": 0},
        "start_from": [],
        "baseline": None,
        "layouts": [layout.to_mapping() for layout in LAYOUTS],
        "probe": {**before["probe"], "trainer": "theirs"},
    }
    spec = CampaignSpec.from_document({**theirs, **changes})
    made = store.by(Actor(name=owner, role="submitter")).campaigns.create(
        spec.to_mapping(), num_legal_layouts=4
    )
    store.campaigns.cancel(made.id)
    done = run("verify", name, "--trainer", "theirs", "--name", f"{name}-2", "--runs", "2")
    gone_on = f"campaign {name}-2 ended and measured none of the layouts"
    other = f"there is another campaign named {name}-2, {why}"
    assert (other if why else gone_on) in refused_line(done)


FULL = [Layout(tp=2, pp=2, num_microbatches=8), Layout(tp=2, dp=2, num_microbatches=4)]
"""Layouts that fill a node of four devices."""
ON_TWO_NODES = {"cluster": {**CLUSTER, "num_nodes": 2}}


JOB = ("--tokens", "1B", "--mtbf-hours", "1e6")


def measure_full(measured: Measure, name: str) -> tuple[str, str]:
    """Measures a campaign of layouts that fill a node; returns the words that rank them."""
    measured(name, zip(FULL, (1000.0, 2000.0), strict=True), **ON_TWO_NODES)
    return "leaderboard", name


def test_the_leaderboard_has_the_days_of_a_training_job_by_measured_step_times(
    run: Command, measured: Measure
) -> None:
    ranked = measure_full(measured, "ranked")
    page = json.loads(run(*ranked, *JOB, "--json").stdout)
    assert (page["job"]["tokens"], page["job"]["mtbf_hours"]) == (10**9, 1e6)
    for trial, job in zip(page["trials"], page["jobs"], strict=True):
        assert job["step_source"] == "measured"
        assert job["layout_key"] == trial["layout_key"]
        duration = job["duration"]
        steps_s = -(-(10**9) // (8 * 128)) * trial["step_time_s"]
        assert duration["days"] * 86400 == pytest.approx(steps_s / (1 - duration["lost_share"]))
        assert 0 < duration["lost_share"] < 0.001
    text = " ".join(run(*ranked, *JOB).stdout.split())
    assert "training job: 1B tokens on the layout's nodes" in text
    assert "rank 1 measured " in text


def test_the_days_of_a_training_job_on_more_nodes_are_extrapolated(
    run: Command, measured: Measure
) -> None:
    ranked = measure_full(measured, "ranked-on-more")
    larger = json.loads(run(*ranked, *JOB, "--nodes", "2", "--json").stdout)["jobs"]
    assert {job["step_source"] for job in larger} == {"measured and extrapolated"}


def test_a_leaderboard_has_no_days_of_a_training_job_whose_tokens_are_not_stated(
    run: Command, measured: Measure
) -> None:
    ranked = measure_full(measured, "ranked-without")
    assert "jobs" not in json.loads(run(*ranked, "--json").stdout)
    ends(run(*ranked, "--nodes", "2"), 2, "say its tokens too")
    assert run(*ranked, *JOB, "--csv").exit_code == 2


def test_a_dry_run_prints_the_services_plan_and_submits_nothing(
    run: Command, measured: Measure, store: Store, tmp_path: Path
) -> None:
    before = measured("before", zip(FULL, (1000.0, 2000.0), strict=True), **ON_TWO_NODES)
    store.campaigns.end(before, "COMPLETED", "budget", "")
    file = tmp_path / "c.yaml"
    document = {**CAMPAIGN, "name": "later", "start_from": ["before"]}
    file.write_text(yaml.safe_dump(document))
    done = ends(run("campaign", "submit", str(file), "--dry-run"), 0)
    assert done.stdout.startswith(
        "plan of later for the embedded trainer: tiny on local-cpu. Every figure"
    )
    assert "the budget pays for 4 probes" in done.stdout
    assert "stored measurements" in done.stdout
    plan = json.loads(run("campaign", "submit", str(file), "--dry-run", "--json").stdout)
    assert plan["knowledge"]["num_measurements"] >= 2
    assert run("campaign", "show", "later").exit_code == 1, "it was not submitted"
    file.write_text(yaml.safe_dump({**document, "model": "gpt-0"}))
    ends(run("campaign", "submit", str(file), "--dry-run"), 2, "gpt-0")


def test_a_dry_run_on_another_cluster_is_the_plan_of_that_cluster(
    run: Command, tmp_path: Path
) -> None:
    file, cluster = tmp_path / "c.yaml", tmp_path / "two.yaml"
    space = {"global_batch_size": 8, "precision": "bf16"}
    file.write_text(yaml.safe_dump({**CAMPAIGN, "name": "elsewhere", "space": space}))
    site = {"modules": ["rocm"]}
    cluster.write_text(
        yaml.safe_dump({"preset": "frontier", "name": "half", "num_nodes": 1, "site": site})
    )
    words = ("campaign", "submit", str(file), "--dry-run", "--json", "--cluster")
    assert json.loads(run(*words, str(cluster)).stdout)["cluster"] == "half"


def test_a_dry_run_waits_for_a_plan_that_the_driver_makes(
    command: Command, api: Api, tmp_path: Path
) -> None:
    """In a service of its own, since the driver takes up every campaign that runs."""
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
    driver, is_over = Driver(api.store), threading.Event()

    def drive() -> None:
        while not is_over.wait(0.05):
            driver.step()

    with ThreadPoolExecutor(1) as pool:
        driving = pool.submit(drive)
        try:
            done = command("campaign", "submit", str(file), "--dry-run", "--json")
        finally:
            is_over.set()
        driving.result()
    plan = json.loads(ends(done, 0).stdout)
    assert (plan["num_legal"], len(plan["layouts"])) == (2 * 160 * 160, 10)
