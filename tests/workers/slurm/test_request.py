from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.documents.duration import longest_s, read_walltime_s, slurm_time
from search_spaces.errors import SiteInvalidError
from search_spaces.spec.site import Site
from tests.workers.slurm.requests import frontier_request, make_request
from workers.errors import AllocationInvalidError

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
