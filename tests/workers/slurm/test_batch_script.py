"""Allocations: what is refused before a submission, and the batch script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.documents.duration import longest_s, read_walltime_s, slurm_time
from layout_tuner.errors import SiteInvalidError
from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.workers.errors import AllocationInvalidError
from layout_tuner.workers.slurm.batch_script import expandable, render
from tests.workers.slurm.requests import frontier_request, make_cluster, make_request

NASTY = """'; touch pwned; $(touch pwned) `touch pwned` "$HOME" \\ ${IFS} & | > pwned #"""


def directives(script: str) -> list[str]:
    """What sbatch reads: options before the first command."""
    lines = script.splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return [line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH ")]


def bash(script: str, directory: Path) -> str:
    """What bash prints, in an empty directory."""
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked_for(script: str) -> str:
    """The part of a script that assigns what was asked for."""
    return script.partition("# What the site needs.")[0]


def test_a_frontier_job_asks_for_what_its_site_needs() -> None:
    script = render(frontier_request())
    options = directives(script)
    for option in (
        "--nodes=16",
        "--time=02:00:00",
        "--account=ABC123",
        "--network=disable_rdzv_get",
        "--constraint=nvme",
        "--gpus-per-node=8",
        "--no-kill",
        "--no-requeue",
        "--signal=B:TERM@60",
        "--comment=layout-tuner:frontier",
    ):
        assert option in options
    modules = [line.split()[2] for line in script.splitlines() if "module load" in line]
    assert modules.index("rocm/7.1.1") < modules.index("rccl-net-plugin")
    assert 'export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH"' in script


def test_what_the_user_says_comes_last_so_that_slurm_takes_it() -> None:
    request = frontier_request(constraint="x", sbatch_options=("--constraint=y",))
    options = directives(render(request))
    constraints = [option for option in options if option.startswith("--constraint")]
    assert constraints == ["--constraint=nvme", "--constraint=x", "--constraint=y"]


def test_switches_and_segments_are_options_of_the_job() -> None:
    """`--segment` is for topology/block of Slurm 23.11 and later, so no test here runs it."""
    options = directives(render(make_request(switches="1@10:00", segment="2")))
    assert options[-2:] == ["--switches=1@10:00", "--segment=2"]


@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"switches": "1 2"}, "--switches", "'1 2' is not a word"),
        ({"segment": "'"}, "--segment", '"\'" is not a word'),
        ({"num_nodes": 3, "segment": "2"}, "--segment", "3 nodes are no multiple of 2"),
        ({"num_nodes": 3, "site": Site(sbatch=("--segment=2",))}, "--segment", "3 nodes are no"),
    ],
)
def test_switches_and_segments_that_slurm_refuses(
    changes: dict[str, Any], field: str, why: str
) -> None:
    with pytest.raises(AllocationInvalidError, match=f"^{field}: {why}"):
        make_request(**changes)


def test_a_job_within_one_segment_may_have_any_number_of_nodes() -> None:
    assert make_request(num_nodes=3, segment="4").segment == "4"


def test_cores_are_not_asked_for_as_gpus() -> None:
    assert not [o for o in directives(render(make_request())) if "gpu" in o]
    gres = Site(devices_option="--gres=gpu:{devices}")
    gpus = make_cluster(device="NVIDIA A100", devices_per_node=4)
    script = render(make_request(cluster=gpus, site=gres))
    assert "--gres=gpu:4" in directives(script)
    assert "step_options=(--gres=gpu:4)" in script


def test_a_network_of_several_nodes_is_set_up_for_several_nodes_only(tmp_path: Path) -> None:
    site = render(frontier_request()).partition("# What the site needs.")[2]
    function = site.partition("# What follows")[0].replace("module load", "true")
    show = "site_environment; echo ${NCCL_NET-none}"
    assert bash(f"node_names=(a b)\n{function}\n{show}", tmp_path) == "OFI\n"
    assert bash(f"node_names=(a)\n{function}\n{show}", tmp_path) == "none\n"


def test_nothing_that_a_user_says_runs_as_shell(tmp_path: Path) -> None:
    cluster = make_cluster(name=f"c {NASTY[:40]}")
    request = make_request(
        cluster=cluster,
        described={"name": cluster.name, "source": NASTY},
        url=f"http://host/{NASTY.replace(' ', '')}",
        token_file=Path(f"/{NASTY}"),
        python=Path(f"/{NASTY}/bin/python"),
        archive=Path(f"/{NASTY}.tar"),
        site=Site(environment={"A": NASTY}, srun=("--x=$(touch${IFS}pwned)",)),
    )
    script = render(request)
    assert all(" " not in option for option in directives(script))
    variables = ("token_file", "python", "archive", "cluster_document", "url")
    show = "\n".join(f'printf "%s\\n" "${name}"' for name in variables)
    printed = bash(f"{asked_for(script)}\n{show}", tmp_path).splitlines()
    assert printed[:3] == [f"/{NASTY}", f"/{NASTY}/bin/python", f"/{NASTY}.tar"]
    assert json.loads(printed[3])["source"] == NASTY
    assert printed[4] == request.url
    assert list(tmp_path.iterdir()) == []


def test_values_may_name_variables_and_nothing_else(tmp_path: Path) -> None:
    def value(text: str) -> str:
        return bash(f"V=7\nprintf %s {expandable(text)}", tmp_path)

    assert value("/tmp/$V-${V}") == "/tmp/7-7"
    others = "${V:-$(touch pwned)} ${V[$(touch pwned)]}"
    assert value(others) == others
    assert value(NASTY.replace("$HOME", "$V").replace("${IFS}", "$V")).count("7") == 2
    assert value("a $ b $1 \\$V") == "a $ b $1 \\7"
    assert list(tmp_path.iterdir()) == []


def test_the_workers_calls_go_through_the_sites_proxy_unless_the_service_is_inside() -> None:
    def words(url: str) -> list[str]:
        lines = render(frontier_request(url=url)).splitlines()
        line = next(line for line in lines if "worker_env" in line)
        return shlex.split(line.partition("=(")[2].removesuffix(")"))

    outside = words("https://tuner.example.org")
    assert "https_proxy=http://proxy.ccs.ornl.gov:3128/" in outside
    for inside in ("http://10.1.2.3:8080", "http://login1.frontier.olcf.ornl.gov:8080"):
        assert not [word for word in words(inside) if "proxy=" in word]
    # a proxy of the user's own shell never counts, and httpx would refuse socks://
    unset = {name for option, name in pairwise(outside) if option == "-u"}
    proxies = {"all_proxy", "http_proxy", "https_proxy", "no_proxy"}
    assert unset == proxies | set(map(str.upper, proxies))


@pytest.mark.parametrize(("drain_s", "signal_s"), [(120, 60), (80, 30), (60, 30), (20, 20)])
def test_slurms_signal_may_come_early_within_the_drain(drain_s: float, signal_s: int) -> None:
    site = Site(drain_s=drain_s)
    assert f"--signal=B:TERM@{signal_s}" in directives(render(make_request(site=site)))
    assert signal_s <= drain_s
    if drain_s >= 90:
        assert signal_s + 60 <= drain_s


def test_a_users_cluster_travels_in_the_script_as_it_was_when_submitted(tmp_path: Path) -> None:
    described = {"name": "ours", "site": {"modules": ["rocm"]}, "source": "it's ours"}
    script = render(make_request(described=described))
    shown = bash(f'{asked_for(script)}\nprintf %s "$cluster_document"', tmp_path)
    assert json.loads(shown) == described
    assert "cluster=frontier" in render(frontier_request()).splitlines()


def test_addresses_in_the_script_are_the_sites(tmp_path: Path) -> None:
    site = Site(node_address="127.0.1.1{index}")
    body = render(make_request(site=site))
    function = body[body.index("address_of() {") :].partition("\n}\n")[0] + "\n}"
    words = f"node_address={shlex.quote(site.node_address)}\n{function}\naddress_of n7 3"
    assert bash(words, tmp_path) == site.address("n7", 3)


@pytest.mark.parametrize("trap", ["link", "wide", "another user's"])
def test_the_jobs_directory_is_refused_where_others_can_use_it(trap: str, tmp_path: Path) -> None:
    job_dir = tmp_path / "layout-tuner-77"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if trap == "link":
        job_dir.symlink_to(elsewhere)
    else:
        job_dir.mkdir()
        job_dir.chmod(0o777 if trap == "wide" else 0o700)
    if trap == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(job_dir, 65534, 65534)
    ended = run_on_one_node(tmp_path)
    assert ended.returncode == 1
    assert f"{job_dir} is another user's, or others can use it: remove it" in ended.stderr
    assert list(elsewhere.iterdir()) == []
    assert job_dir.exists()


def test_the_jobs_directory_is_closed_to_others_and_goes_with_the_job(tmp_path: Path) -> None:
    look = f"stat -c %a {tmp_path}/layout-tuner-77 >&2"
    ended = run_on_one_node(tmp_path, setup=(look,))
    assert ended.stderr.splitlines()[0] == "700"
    assert "there is no /no/python on n1" in ended.stderr
    assert not (tmp_path / "layout-tuner-77").exists()


def test_variables_of_the_submitters_shell_for_slurm_have_no_effect_in_the_job(
    tmp_path: Path,
) -> None:
    names = ("SLURM_CLUSTERS", "SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "SQUEUE_STATES")
    ours = dict.fromkeys((*names, "SCANCEL_NAME"), "theirs")
    look = "env | grep -c =theirs >&2"
    ended = run_on_one_node(tmp_path, setup=(look,), **ours)
    assert ended.stderr.splitlines()[0] == "0"


def run_on_one_node(
    directory: Path, setup: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script where Slurm would, up to the Python that is not there."""
    site = replace(Site(), node_local_dir=str(directory))
    request = make_request(site=site, setup=setup, python=Path("/no/python"))
    programs = directory / "programs"
    programs.mkdir()
    (programs / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (programs / "scontrol").chmod(0o755)
    return subprocess.run(
        ["bash"],
        input=render(request),
        text=True,
        capture_output=True,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_CPUS_ON_NODE": "1",
            **environment,
        },
        check=False,
    )


HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_nodes": 5}, "--nodes: 5 is more than 4"),
        ({"num_nodes": 0}, "--nodes: 0 is not a whole number"),
        ({"time_s": 90.0}, "--time: 00:01:30 leaves no time to work"),
        ({"job_name": "a b"}, "--job-name: 'a b' is not a word"),
        ({"job_name": "a\n#SBATCH --x"}, "--job-name"),
        ({"account": "a;b"}, "--account"),
        ({"partition": "$(id)"}, "--partition"),
        ({"qos": ""}, "--qos"),
        ({"constraint": "a b"}, "--constraint"),
        ({"sbatch_options": ("-A x",)}, "--sbatch-option: '-A x' is not a long option"),
        ({"sbatch_options": ("--mem=0\n#SBATCH --x",)}, "--sbatch-option"),
        (
            {"sbatch_options": ("--nodes=500",)},
            "--sbatch-option: --nodes can't be given here: give",
        ),
        ({"log": "my log"}, "--log"),
        ({"setup": ("a\nb",)}, "--setup"),
        ({"launcher": "mpirun"}, "--launcher: 'mpirun' is unknown"),
        ({"url": "login1:8080"}, "--url: 'login1:8080' is not an address such as http://"),
        ({"url": "http://a b"}, "--url"),
        ({"url": "http://[::"}, "--url: 'http://[::' is not an address such as http://"),
        ({"url": "http://login1:port"}, "--url: 'http://login1:port' is not an address"),
        ({"url": f"http://{'a' * 64}.org"}, "--url"),
        ({"url": "http://xn--a.b"}, "--url"),
        ({"url": "http://me:secret@login1"}, "--url: the address has a password"),
        ({"url": "http://a\nb"}, "--url"),
        ({"token_file": Path("token")}, "token_file: 'token' is not an absolute path"),
        ({"python": Path("/a\nb")}, "python"),
    ],
)
def test_what_slurm_or_a_shell_could_misread_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(AllocationInvalidError) as refused:
        make_request(**changes)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_nodes": 91, "time_s": 3 * HOUR_S}, "03:00:00 is more than 02:00:00, the longest"),
        ({"time_s": 3 * HOUR_S}, "06:00:00 with up to 183"),
        ({"partition": "extended", "num_nodes": 65}, "65 is more than 64, the most nodes"),
        (
            {"sbatch_options": ("--qos=debug",), "num_nodes": 100, "time_s": 3 * HOUR_S},
            "03:00:00 is more than 02:00:00",
        ),
        ({"account": None}, "--account: frontier charges every job"),
    ],
)
def test_a_job_over_its_sites_limits_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(AllocationInvalidError, match=says):
        frontier_request(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": 91},
        {"num_nodes": 92, "time_s": 6 * HOUR_S},
        {"partition": "extended", "num_nodes": 64, "time_s": 24 * HOUR_S},
        {"partition": "extended", "qos": "debug", "num_nodes": 100},
        {"account": None, "sbatch_options": ("--account=ABC123",)},
    ],
)
def test_a_job_may_be_as_large_and_long_as_its_site_allows(changes: dict[str, Any]) -> None:
    frontier_request(**changes)


def test_the_users_options_go_before_the_sites() -> None:
    site = Site(sbatch=("--qos=regular", "--constraint=gpu"))
    request = make_request(site=site, qos="debug", sbatch_options=("--qos=premium",))
    assert request.effective("qos") == "premium"
    assert make_request(site=site, qos="debug").effective("qos") == "debug"
    assert make_request(site=site).effective("qos") == "regular"
    assert make_request(site=site).effective("constraint") == "gpu"
    assert make_request(site=site).effective("partition") is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2:00:00", 7200),
        ("90:00", 5400),
        ("1-12:00", 129_600),
        ("1-00:00:30", 86_430),
        ("2h", 7200),
        ("90m", 5400),
        ("45s", 45),
    ],
)
def test_times_are_read_as_slurm_reads_them_or_with_a_unit(text: str, seconds: float) -> None:
    assert read_walltime_s(text, field="time") == seconds


@pytest.mark.parametrize("value", ["120", 120, "2 hours", "", "1:2:3:4", None, "-1:00:00", "0h"])
def test_a_time_without_a_unit_is_refused_as_slurm_would_read_minutes(value: object) -> None:
    with pytest.raises(SiteInvalidError, match="time"):
        read_walltime_s(value, field="time")


@pytest.mark.parametrize("seconds", [1, 59.2, 60, 3600, 86_399, 86_400, 200_000])
def test_what_is_written_for_slurm_is_read_back(seconds: float) -> None:
    assert 0 <= read_walltime_s(slurm_time(seconds), field="time") - seconds < 1


def test_the_limit_is_that_of_the_smallest_class_that_holds_the_job() -> None:
    limits = {183: 6.0, 91: 2.0, 9856: 12.0}
    assert [longest_s(limits, nodes) for nodes in (1, 91, 92, 184, 9857)] == [2, 2, 6, 12, None]
