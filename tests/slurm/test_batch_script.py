"""The rendered script on real Slurm, with a stand-in for Python that records how it was called."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from layout_tuner.cli.processes.allocation import allocation
from tests.kit.api import ends
from tests.kit.waiting import wait_until
from tests.slurm.site import SlurmSite
from tests.slurm.tuning import cpu_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

# Stands in for workers and Ray nodes: records its arguments and ends at SIGTERM, or as told.
STAND_IN = """#!/bin/bash
case "$*" in
  *"-m layout_tuner "*) who=worker;;
  *) who="ray-$SLURMD_NODENAME";;
esac
printf '%s\\n' "$@" >"$NOTES/$who.arguments"
env >"$NOTES/$who.environment"
trap 'echo told >"$NOTES/$who.told"; [ "$who" = worker ] && [ -e "$NOTES/slow" ] && sleep 2; echo ended >"$NOTES/$who.ended"; exit "${WORKER_CODE:-0}"' TERM
if [ "$who" = worker ] && [ -e "$NOTES/done" ]; then exit "${WORKER_CODE:-0}"; fi
while :; do sleep 0.1; done
"""


@dataclass
class Bench:
    """A directory with a cluster's file, a token, and a virtual environment of the stand-in."""

    site: SlurmSite
    directory: Path
    runner: CliRunner

    def note(self, name: str) -> str:
        path = self.directory / "notes" / name
        return path.read_text() if path.exists() else ""

    def submit(self, *options: str, **site: Any) -> int:
        found = ends(self.call(*self.submission(*options, **site)), 0)
        return int(json.loads(found.stdout)["job_id"])

    def submission(self, *options: str, **site: Any) -> list[str]:
        local = {"node_local_dir": str(self.directory / "local"), "drain_s": 5}
        file = self.directory / "ours.json"
        file.write_text(json.dumps(cpu_cluster("ours", **{**local, **site})))
        return [
            "submit",
            f"--cluster={file}",
            "--nodes=2",
            "--time=5m",
            "--url=http://127.0.0.1:9",
            f"--worker-token-file={self.directory / 'token'}",
            f"--environment={self.directory / 'env'}",
            f"--log={self.directory}/log",
            "--json",
            *options,
        ]

    def call(self, *arguments: str, **environment: str) -> Any:
        env = {**self.site.environment, "NOTES": str(self.directory / "notes"), **environment}
        return self.runner.invoke(allocation, list(arguments), env=env)

    def wait_for(self, name: str) -> str:
        return wait_until(f"there is a note {name}; log: {self.log()}", lambda: self.note(name), 60)

    def log(self) -> str:
        log = self.directory / "log"
        return log.read_text() if log.exists() else "none yet"


@pytest.fixture
def bench(slurm: SlurmSite, tmp_path: Path) -> Bench:
    return make_bench(slurm, tmp_path)


def make_bench(site: SlurmSite, folder: Path) -> Bench:
    for name in ("env/bin", "notes", "local"):
        (folder / name).mkdir(parents=True)
    python = folder / "env" / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (folder / "token").write_text("secret")
    (folder / "token").chmod(0o600)
    return Bench(site, folder, CliRunner())


@dataclass(frozen=True, kw_only=True)
class RayAllocation:
    """What the tasks of an allocation were started with, and its log."""

    job: int
    worker: list[str]
    described: dict[str, Any]
    """The cluster's file that the worker reads."""
    ray: dict[str, list[str]]
    """Arguments by node."""
    environments: dict[str, list[str]]
    """Lines by task."""
    log: str

    @property
    def head(self) -> str:
        return f"127.0.5.10:{20000 + self.job % 10000}"

    def after(self, flag: str) -> str:
        """The worker's argument after a flag."""
        return self.worker[self.worker.index(flag) + 1]


@pytest.fixture(scope="module")
def on_ray(site: SlurmSite, tmp_path_factory: pytest.TempPathFactory) -> RayAllocation:
    bench = make_bench(site, tmp_path_factory.mktemp("ray") / "bench")
    # What the job exports is the script's own environment, whatever it was submitted with.
    variables = {"NOTES": str(bench.directory / "notes"), "SITES": "own"}
    exported = "--sbatch-option=--export=NONE"
    job = bench.submit("--end-when-idle=5m", exported, environment=variables)
    tasks = ("worker", "ray-n1", "ray-n2")
    try:
        arguments = {task: bench.wait_for(f"{task}.arguments").split("\n")[:-1] for task in tasks}
        environments = {task: bench.wait_for(f"{task}.environment").splitlines() for task in tasks}
        worker = arguments["worker"]
        return RayAllocation(
            job=job,
            worker=worker,
            described=json.loads(Path(worker[worker.index("--cluster") + 1]).read_text()),
            ray={node: arguments[f"ray-{node}"] for node in ("n1", "n2")},
            environments=environments,
            log=bench.log(),
        )
    finally:
        site.cancel_everything()


def test_a_ray_allocation_has_a_ray_task_a_node(on_ray: RayAllocation) -> None:
    head = ["--head", on_ray.head, "--address", "127.0.5.10"]
    assert on_ray.ray["n1"][-4:] == head
    assert on_ray.ray["n2"][-2:] == ["--address", "127.0.5.11"]


def test_the_worker_of_a_ray_allocation_joins_its_ray(on_ray: RayAllocation) -> None:
    assert on_ray.after("--ray-address") == on_ray.head
    assert on_ray.after("--launcher") == "ray"


def test_the_worker_of_an_allocation_gets_its_options(on_ray: RayAllocation) -> None:
    assert on_ray.after("--name") == f"ours-{on_ray.job}"
    assert "--end-when-idle=300" in on_ray.worker
    assert on_ray.described["site"]["drain_s"] == 5


def test_tasks_of_a_ray_allocation_share_a_secret_token(on_ray: RayAllocation) -> None:
    variable = "RAY_AUTH_TOKEN="
    tokens = {
        line
        for lines in on_ray.environments.values()
        for line in lines
        if line.startswith(variable)
    }
    assert [len(token) for token in tokens] == [len(variable) + 64]
    assert "RAY_AUTH_TOKEN" not in on_ray.log


def test_tasks_of_a_ray_allocation_have_the_sites_variables(on_ray: RayAllocation) -> None:
    assert "SITES=own" in on_ray.environments["ray-n2"]


def test_the_job_ends_as_its_worker_ends_and_takes_everything_along(bench: Bench) -> None:
    (bench.directory / "notes" / "done").touch()
    job = bench.submit("--setup=export WORKER_CODE=3")
    ended = bench.site.wait_for_end(job)
    assert ended["JobState"] == "FAILED", bench.log()
    assert ended["ExitCode"] == "3:0"
    assert list((bench.directory / "local").iterdir()) == []


def test_a_cancelled_allocation_lets_its_worker_end_first(bench: Bench) -> None:
    (bench.directory / "notes" / "slow").touch()
    job = bench.submit()
    bench.wait_for("worker.arguments")
    bench.wait_for("ray-n2.arguments")
    ends(bench.call("cancel", str(job)), 0, "returns its trials first")
    bench.wait_for("worker.told")
    assert not bench.note("ray-n2.told")
    ended = bench.site.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED", bench.log()
    assert bench.note("worker.ended")
    assert bench.note("ray-n1.ended")
    assert bench.note("ray-n2.ended")
    assert list((bench.directory / "local").iterdir()) == []


def test_the_worker_is_told_before_the_wall_time_is_over(bench: Bench) -> None:
    # Slurm counts limits in minutes, and may be a minute early with the signal.
    job = bench.submit("--time=2m", drain_s=55)
    bench.wait_for("worker.arguments")
    wait_until("the worker is told", lambda: bench.note("worker.told"), 140)
    assert bench.site.wait_for_end(job)["JobState"] == "COMPLETED", bench.log()


def test_a_lost_node_does_not_end_the_allocation(bench: Bench) -> None:
    job = bench.submit()
    bench.wait_for("ray-n2.arguments")
    bench.wait_for("worker.arguments")
    bench.site.lose_node("n2")
    wait_until(
        "slurm has noticed",
        lambda: "down" in bench.site.run("sinfo", "-hn", "n2", "-o", "%t").stdout,
        60,
    )
    assert bench.site.state(job) == "RUNNING"
    assert not bench.note("worker.told")
    assert not bench.note("ray-n1.told")
    bench.site.return_node("n2")


def test_a_packed_environment_is_unpacked_on_every_node_and_removed(bench: Bench) -> None:
    (bench.directory / "notes" / "done").touch()
    packed = bench.directory / "env.tar.gz"
    subprocess.run(["tar", "-czf", packed, "-C", bench.directory / "env", "."], check=True)
    job = bench.submit(f"--environment={packed}", "--launcher=srun")
    assert bench.site.wait_for_end(job)["JobState"] == "COMPLETED", bench.log()
    path = next(
        line for line in bench.note("worker.environment").splitlines() if line.startswith("PATH=")
    )
    assert path.startswith(f"PATH={bench.directory}/local/layout-tuner-{job}/environment/bin:")
    assert list((bench.directory / "local").iterdir()) == []


def test_what_the_site_lacks_is_said_in_the_log(bench: Bench) -> None:
    job = bench.submit(modules=["rocm/7"])
    assert bench.site.wait_for_end(job)["JobState"] == "FAILED"
    assert "there is no module rocm/7" in bench.log()


def test_an_srun_allocation_runs_lines_of_shell_and_then_a_worker_alone(bench: Bench) -> None:
    (bench.directory / "notes" / "done").touch()
    job = bench.submit(
        "--setup=export USERS=$SITES-too",
        "--launcher=srun",
        setup=["export SITES=from-setup"],
        environment={"FROM": "$SITES/$SLURM_JOB_ID"},
        environment_of_several_nodes={"SEVERAL": "yes"},
    )
    assert bench.site.wait_for_end(job)["JobState"] == "COMPLETED", bench.log()
    worker = bench.note("worker.arguments").splitlines()
    assert "--ray-address" not in worker
    assert worker[worker.index("--launcher") + 1] == "srun"
    assert not list((bench.directory / "notes").glob("ray-*"))
    lines = bench.note("worker.environment").splitlines()
    for line in (f"FROM=from-setup/{job}", "USERS=from-setup-too", "SEVERAL=yes"):
        assert line in lines


def test_list_shows_our_allocations_alone_and_cancel_ends_no_other_job(bench: Bench) -> None:
    other = bench.site.submit("--wrap", "sleep 1000", "--comment=not-ours", "-w", "n4")
    running = bench.submit()
    waiting = bench.submit("--nodes=4")
    bench.wait_for("worker.arguments")
    listed = {job["job_id"]: job for job in json.loads(bench.call("list", "--json").stdout)}
    assert set(listed) == {str(running), str(waiting)}
    assert listed[str(running)]["state"] == "RUNNING"
    assert listed[str(running)]["nodes_or_reason"] == "n[1-2]"
    assert listed[str(waiting)]["cluster"] == "ours"
    table = bench.call("list").stdout
    assert str(running) in table
    assert "pending" in table
    for job, says in ((other, "is not an allocation that you submitted"), (1, "there is no job 1")):
        ends(bench.call("cancel", str(job)), 1, says)
    ends(bench.call("cancel", str(waiting)), 0)
    assert bench.site.state(waiting) == "CANCELLED"
    bench.wait_for("ray-n2.arguments")
    ends(bench.call("cancel", str(running), "--now"), 0)
    assert bench.site.wait_for_end(running)["JobState"] == "CANCELLED", "no process is left"
    assert bench.site.state(other) == "RUNNING"


def test_what_slurm_refuses_is_said_in_its_words(bench: Bench) -> None:
    refused = bench.call(*bench.submission("--partition=none"))
    ends(refused, 1, "sbatch refuses", "invalid partition")
