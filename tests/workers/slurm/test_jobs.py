"""Slurm's programs where users have set SLURM_CLUSTERS, SQUEUE_* and SCANCEL_*.

Stand-ins print what the programs print: squeue of Slurm 19.05, with a line for the cluster even
with -h, and of 20.02 and later, where -h suppresses it (src/squeue/squeue.c of both).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from layout_tuner.workers.errors import JobNotOursError, SlurmUnavailableError
from layout_tuner.workers.slurm.jobs import call, cancel, current_allocation, ends_in_s, list_jobs

STAND_IN: Final = """#!{python}
import json, os, sys
program, words = os.path.basename(sys.argv[0]), sys.argv[1:]
asked = {{name: words[place + 1] for place, name in enumerate(words[:-1]) if name[:1] == "-"}}
named = asked.get("-M") or os.environ.get("SLURM_CLUSTERS", "")
clusters = [each for each in named.split(",") if each]
hidden = [name for name in os.environ if name.startswith(("SQUEUE_", "SCANCEL_"))]
if hidden:
    sys.exit(f"{{hidden}} have an effect")
if program == "scontrol":
    if len(clusters) > 1:
        sys.exit("scontrol: fatal: Only one cluster can be used at a time with scontrol")
    print("n1\\nn2")
    sys.exit()
if "gone" in clusters:
    sys.exit(f"{{program}}: error: There is a problem talking to the database: No error.")
if program == "scancel":
    with open({called!r}, "a") as file:
        file.write(" ".join(words) + "\\n")
    sys.exit()
jobs, code = json.loads({jobs!r}), 0
is_quiet = "-h" in words or "--noheader" in words
for place, cluster in enumerate(clusters or ["local"]):
    if clusters and not ({is_new!r} and is_quiet):
        print(("\\n" if place else "") + "CLUSTER: " + cluster)
    if "-j" in asked and asked["-j"] not in jobs.get(cluster, ()):
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        code = 1
        continue
    if not is_quiet:
        print("TIME_LEFT" if asked["-o"] == "%L" else "JOBID|USER|STATE|TIME|TIME_LEFT|...")
    for job in jobs.get(cluster, ()):
        if asked.get("-j", job) == job:
            row = f"{{job}}|{{os.getuid()}}|RUNNING|5:00|55:00|1:00:00|4|layout-tuner:our|lt|n[1-4]"
            print("55:00" if asked["-o"] == "%L" else row)
sys.exit(code)
"""

Install = Callable[..., Path]


@pytest.fixture(params=["19.05", "20.02"])
def install(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Install:
    """Puts programs of one version on the path, with these jobs by cluster; returns their folder.

    The file `called` there has the arguments of scancel.
    """

    def put(**jobs: list[str]) -> Path:
        values = {"python": sys.executable, "jobs": json.dumps(jobs)}
        values |= {"called": str(tmp_path / "called"), "is_new": request.param != "19.05"}
        for program in ("squeue", "scancel", "scontrol"):
            (tmp_path / program).write_text(STAND_IN.format(**values))
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path

    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    return put


@pytest.mark.parametrize("clusters", [None, "cm9", "cm9,cm10"])
def test_allocations_are_listed_and_cancelled_on_the_cluster_where_they_are(
    install: Install, clusters: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "cm9" if clusters else "local"
    folder = install(**{place: ["4711", "4712"], "cm10": ["31"]})
    if clusters:
        monkeypatch.setenv("SLURM_CLUSTERS", clusters)
    others = [("31", "cm10")] if clusters == "cm9,cm10" else []
    at = "cm9" if clusters else ""
    listed = [(job.job_id, job.slurm_cluster) for job in list_jobs()]
    assert listed == [("4711", at), ("4712", at), *others]
    assert cancel("4711").slurm_cluster == at
    cancel("4712", now=True)
    there = "-M cm9 " if others else ""
    called = (folder / "called").read_text().splitlines()
    assert called == [f"{there}--batch --signal=TERM 4711", f"{there}4712"]
    with pytest.raises(JobNotOursError, match="there is no job 5 in the queue"):
        cancel("5")


def test_a_number_that_two_clusters_have_is_not_cancelled(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install(cm9=["7"], cm10=["7"])
    monkeypatch.setenv("SLURM_CLUSTERS", "cm9,cm10")
    with pytest.raises(
        JobNotOursError, match="several clusters of SLURM_CLUSTERS have a job 7: set"
    ):
        cancel("7")
    assert not (folder / "called").exists()
    monkeypatch.setenv("SLURM_CLUSTERS", "cm10")
    assert cancel("7").slurm_cluster == "cm10"


@pytest.mark.parametrize("clusters", ["", "cm9", "cm9,cm10"])
def test_inside_a_job_its_nodes_and_its_end_are_those_of_the_local_cluster(
    install: Install, clusters: str
) -> None:
    install(local=["4711"])
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CLUSTERS": clusters}
    environ = {**os.environ, **job}
    found = current_allocation(environ)
    assert found is not None
    assert found.node_names == ("n1", "n2")
    assert ends_in_s("4711", environ) == 55 * 60


@pytest.mark.parametrize(
    ("printed", "left"), [("CLUSTER: c\\n5:00\\n", 300.0), ("CLUSTER: c", None)]
)
def test_a_line_for_the_cluster_is_not_the_time_that_is_left(
    tmp_path: Path, printed: str, left: float | None
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    (tmp_path / "squeue").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CLUSTERS": "c"}
    assert ends_in_s("4711", environ) == left


def test_filters_of_the_user_hide_no_job_and_spare_none(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(local=["4711"])
    for name in ("SQUEUE_STATES", "SQUEUE_FORMAT2", "SCANCEL_INTERACTIVE", "SCANCEL_NAME"):
        monkeypatch.setenv(name, "x")
    assert [job.job_id for job in list_jobs()] == ["4711"]
    cancel("4711")
    assert ends_in_s("4711", os.environ) == 55 * 60


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
    ],
)
def test_a_controller_with_too_much_work_is_to_be_asked_again_later(
    tmp_path: Path, said: str
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(SlurmUnavailableError, match="try again later"):
        call("sbatch", environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def test_a_cluster_that_the_database_does_not_know_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setenv("SLURM_CLUSTERS", "gone")
    with pytest.raises(SlurmUnavailableError, match=r"SLURM_CLUSTERS=gone: .*; unset it, or name"):
        list_jobs()
