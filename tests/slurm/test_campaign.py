"""Campaigns on real Slurm: they run to their end inside allocations, and outlive them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.slurm.site import SlurmSite
from tests.slurm.tuning import Tuning, cpu_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture
def tuning(slurm: SlurmSite, tmp_path: Path) -> Iterator[Tuning]:
    with closing(Tuning(slurm, tmp_path)) as tuning:
        yield tuning


def assert_each_trial_was_run_once(tuning: Tuning, campaign: str, number: int) -> None:
    """Every trial of the budget completed, on one node and on two; no layout was proposed twice."""
    trials = tuning.trials(campaign)
    assert {trial["layout"]["num_nodes"] for trial in trials} == {1, 2}
    assert Counter(trial["state"] for trial in trials) == {"COMPLETED": number}
    layouts = Counter(str(sorted(trial["layout"].items())) for trial in trials)
    assert set(layouts.values()) == {1}
    for attempts in tuning.attempts(campaign):  # one that was ended early may have been before it
        assert attempts[-1]["ending"] == "reported"
        assert len(attempts) <= 2


@pytest.mark.parametrize("launcher", ["ray", "srun"])
def test_a_campaign_outlives_a_cancelled_allocation(tuning: Tuning, launcher: str) -> None:
    cluster = cpu_cluster(f"of-{launcher}")
    campaign = tuning.campaign(cluster)
    first = tuning.allocate(cluster, f"--launcher={launcher}")
    tuning.wait_for_completed(campaign, 1, first)
    tuning.site.run("scancel", str(first))
    tuning.site.wait_for_end(first, 60)
    larger = ("--nodes=4", "--end-when-idle=5s") if launcher == "srun" else ()
    second = tuning.allocate(cluster, f"--launcher={launcher}", *larger)
    assert tuning.wait_for_end(campaign, second)["state"] == "COMPLETED", tuning.log(second)
    assert_each_trial_was_run_once(tuning, campaign, 4)
    if launcher == "ray":
        shown = tuning.show(second)
        # Nodes of Ray are listed in the order in which they joined.
        assert len(shown["nodes"]) == 2
        assert shown["job_id"] == str(second)
        assert shown["seconds_left"] < 600
        assert shown["cost"]["iterations"] > 0
        tuning.cancel(second)
    assert tuning.site.wait_for_end(second, 120)["JobState"] == "COMPLETED", tuning.log(second)


def test_a_campaign_outlives_the_wall_time_of_its_allocation(tuning: Tuning) -> None:
    cluster = cpu_cluster("timed")
    # A probe that starts after the first 30 s may not end in time: only one round ever fits.
    campaign = tuning.campaign(cluster, probe={"warmup": 2, "iterations": 60, "deadline": "90s"})
    first = tuning.allocate(cluster, "--launcher=srun", "--time=2m")
    assert tuning.site.wait_for_end(first, 240)["JobState"] == "COMPLETED", tuning.log(first)
    assert tuning.get(f"/campaigns/{campaign}")["state"] == "RUNNING"
    assert not tuning.trials(campaign, "RUNNING")
    second = tuning.allocate(cluster, "--launcher=srun")
    assert tuning.wait_for_end(campaign, second)["state"] == "COMPLETED", tuning.log(second)
    assert_each_trial_was_run_once(tuning, campaign, 4)


def test_allocations_of_two_clusters_run_trials_of_their_own(tuning: Tuning) -> None:
    east = cpu_cluster("east", node_address="127.0.5.2{index}")
    west = cpu_cluster("west", node_address="127.0.5.3{index}")
    campaigns = {cluster["name"]: tuning.campaign(cluster) for cluster in (east, west)}
    jobs = {
        cluster["name"]: tuning.allocate(cluster, "--launcher=srun") for cluster in (east, west)
    }
    for name, campaign in campaigns.items():
        ended = tuning.wait_for_end(campaign, jobs[name])
        assert ended["state"] == "COMPLETED", tuning.log(jobs[name])
        workers = {attempt["worker_name"] for (attempt,) in tuning.attempts(campaign)}
        assert workers == {f"{name}-{jobs[name]}"}
