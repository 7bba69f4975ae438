from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from layout_tuner.errors import ClusterInvalidError, SiteInvalidError
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.clusters.site import SITE_PRESETS, Site, cluster_part, node_list
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY
from layout_tuner.workers.slurm import site_lookup
from layout_tuner.workers.slurm.jobs import SlurmAllocation
from layout_tuner.workers.slurm.site_lookup import site_of
from layout_tuner.workers.slurm.topology import topology_of
from layout_tuner.workers.worker.run_worker import _machine
from tests.kit.campaigns import spec_of
from tests.workers.slurm.requests import make_cluster

CLUSTER: dict[str, Any] = {
    "name": "ours",
    "device": "NVIDIA H100",
    "num_nodes": 16,
    "devices_per_node": 4,
    "device_memory_gb": 80,
}


@pytest.mark.parametrize("name", SITE_PRESETS)
def test_every_site_that_comes_along_is_a_clusters_and_fits_its_devices(name: str) -> None:
    site, cluster = site_of(name), CLUSTER_PRESETS[name]
    assert len(site.device_cores) == cluster.devices_per_node
    assert max(site.max_time) == cluster.num_nodes
    assert site.needs_account


def test_every_file_of_a_site_is_a_preset() -> None:
    files = Path(site_lookup.__file__).parent.glob("sites/*.yaml")
    assert sorted(file.stem for file in files) == sorted(SITE_PRESETS)


def test_frontiers_devices_have_the_cores_that_are_next_to_them() -> None:
    site = site_of("frontier")
    assert site.device_cores[0] == (49, 50, 51, 52, 53, 54, 55)
    assert site.device_cores[4] == (1, 2, 3, 4, 5, 6, 7)
    assert {core % 8 for cores in site.device_cores for core in cores} == set(range(1, 8))


def test_a_users_file_is_a_cluster_with_a_site_beside_it() -> None:
    text = (
        "site: {modules: [rocm/6.2], srun: [--mpi=none], device_cores: [0-1, '2,3'], drain_s: 30}"
    )
    described = CLUSTER | yaml.safe_load(text)
    site = site_of(described)
    listed = {"modules": ("rocm/6.2",), "srun": ("--mpi=none",), "device_cores": ((0, 1), (2, 3))}
    assert site == Site(drain_s=30, **listed)
    assert resolve_cluster(cluster_part(described))[0].name == "ours"


def test_a_worker_drains_as_early_as_its_site_says_in_a_job_of_slurm_alone() -> None:
    machine = _machine(CLUSTER | {"site": {"drain_s": 7}}, "local", None, None, RANK_ENTRY, {})
    in_a_job = replace(machine, allocation=SlurmAllocation(job_id="4711", node_names=("n1",)))
    assert (in_a_job.drain_s, machine.drain_s, replace(in_a_job, site=None).drain_s) == (7, 30, 30)


def test_a_site_may_start_from_a_preset_and_a_clusters_preset_brings_its_own() -> None:
    changed = site_of(CLUSTER | {"site": {"preset": "frontier", "modules": ["rocm/9"]}})
    assert changed.modules == ("rocm/9",)
    assert changed.needs_account
    assert site_of(CLUSTER | {"site": "frontier"}) == site_of("frontier")
    assert site_of({"preset": "frontier", "num_nodes": 16}) == site_of("frontier")
    assert site_of(CLUSTER) is None
    assert site_of("local-cpu") is None


def test_a_site_of_an_unknown_name_lists_those_that_there_are() -> None:
    with pytest.raises(SiteInvalidError, match=r"site: unknown site 'fronteir' \(did you mean 'f"):
        site_of(CLUSTER | {"site": "fronteir"})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("module", ["rocm"], "unknown site field 'module' (did you mean 'modules'?)"),
        ("modules", "rocm", "modules: 'rocm' is not a list of texts"),
        ("modules", ["rocm; rm -rf /"], "is not the name of a module"),
        ("environment", {"A": 1}, "environment.A: 1 is not a text; put it in quotes"),
        ("environment", {"A B": "1"}, "is not a variable's name"),
        ("environment", {"A": "1\nrm"}, "environment.A: '1\\nrm' is not one line"),
        ("setup", ["a\nb"], "is not one line of shell"),
        ("sbatch", ["-A x"], "is not a long option"),
        ("sbatch", ["--a=b c"], "is not a long option"),
        ("srun", ["--a='b'"], "is not a long option"),
        ("needs_account", "yes please", "is not true or false"),
        ("max_time", {91: 7200}, "7200 is not a time: write it as 2:00:00"),
        ("max_time", {"many": "2h"}, "'many' is not a whole number"),
        ("max_time", "2h", "is not a mapping from most nodes"),
        ("max_time_by_qos", {"debug": "2h"}, "max_time_by_qos.debug: '2h' is not a mapping"),
        ("launcher", "mpirun", "launcher: 'mpirun' is unknown (did you mean 'srun'?); choose"),
        ("share_nodes", 1, "is not true or false"),
        ("drain_s", 0, "drain_s: 0 is not a number over 0"),
        ("node_address", "$(id)", "is not an address made of"),
        ("node_address", "{node}", "is not an address made of"),
        ("cores_per_node", 0, "cores_per_node: 0 is not a whole number"),
        ("device_cores", ["0-3", "3-6"], "a core stands at two devices"),
        ("device_cores", ["0-3", "4-6"], "unequal numbers of cores"),
        ("device_cores", ["3-0"], "is not a range of cores with a core in it"),
        ("device_cores", ["all"], "is not a range of cores"),
        ("node_local_dir", "tmp", "is not an absolute path"),
        ("http_proxy", 3128, "http_proxy: 3128 is not a text"),
    ],
)
def test_an_unknown_or_wrong_field_is_named(field: str, value: object, says: str) -> None:
    with pytest.raises(SiteInvalidError) as refused:
        site_of(CLUSTER | {"site": {field: value}})
    assert "site" in str(refused.value)
    assert says in str(refused.value)


def test_addresses_follow_from_name_and_position() -> None:
    assert Site().address("frontier00042", 3) == "frontier00042"
    assert Site(node_address="127.0.1.1{index}").address("n4", 3) == "127.0.1.13"
    assert Site(node_address="{name}-hsn0").address("n4", 3) == "n4-hsn0"


def test_a_campaign_cannot_bring_a_site_to_a_worker() -> None:
    described = CLUSTER | {"site": {"setup": ["curl https://example.org/x | sh"]}}
    with pytest.raises(ClusterInvalidError, match="unknown cluster field 'site'"):
        spec_of(cluster=described)
    assert "site" not in str(spec_of(cluster=cluster_part(described)).to_mapping())


def test_the_example_of_a_site_has_every_field_and_is_a_cluster() -> None:
    example = Path(__file__).parents[3] / "examples" / "our-cluster.yaml"
    described = yaml.safe_load(example.read_text())
    assert resolve_cluster(cluster_part(described))[1] is None
    missing = {field.name for field in fields(Site)} - set(described["site"])
    assert missing == {"environment_of_several_nodes", "max_time_by_qos"}
    assert site_of(described) is not None
    # As the batch script carries it to the worker.
    assert site_of(json.loads(json.dumps(described))) == site_of(described)


@pytest.mark.parametrize(
    ("url", "is_proxied"),
    [
        ("http://127.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("http://localhost:8000", False),
        ("http://service.localhost:8000", False),
        ("http://127.example.org", True),
        ("http://service.example.org", True),
        ("http://10.1.2.3", False),
    ],
)
def test_the_proxy_is_not_used_for_loopback_and_excluded_hosts(url: str, is_proxied: bool) -> None:
    site = Site(http_proxy="http://proxy:3128", no_proxy=("10.0.0.0/8",))
    assert site.proxied(url) is is_proxied


def test_switches_name_nodes_as_slurm_does() -> None:
    site = Site.from_mapping({"switches": {"leaf1": "gpu[08-10,12],login", "leaf2": "gpu13"}})
    assert site.switches == {
        "leaf1": ("gpu08", "gpu09", "gpu10", "gpu12", "login"),
        "leaf2": ("gpu13",),
    }
    assert topology_of(site, make_cluster(), {}).known["gpu10"] == ("leaf1",)


@pytest.mark.parametrize(
    "nodes", ["", "gpu[1-", "gpu[3-1]", "gpu[1,]", "gpu 1", 7, "gpu[0-999999]", "gpu[a]"]
)
def test_a_list_of_nodes_that_slurm_would_not_write_is_refused(nodes: object) -> None:
    with pytest.raises(SiteInvalidError, match=r"switches\.leaf1: .* is not a list of nodes as"):
        Site.from_mapping({"switches": {"leaf1": nodes}})


def test_a_list_of_nodes_may_have_several_ranges() -> None:
    assert list(node_list("r[1-2]n[08-09],x", "nodes")) == ["r1n08", "r1n09", "r2n08", "r2n09", "x"]
    with pytest.raises(SiteInvalidError):
        list(node_list("r[1-400]n[1-400]", "nodes"))


def test_levels_are_named_once_and_the_topology_is_a_path() -> None:
    site = Site.from_mapping({"levels": ["leaf", "spine"], "topology": "/etc/slurm/topology.yaml"})
    assert site.levels == ("leaf", "spine")
    with pytest.raises(SiteInvalidError, match="levels: a name is there twice"):
        Site.from_mapping({"levels": ["leaf", "leaf"]})
    with pytest.raises(SiteInvalidError, match=r"levels: '' is not the name of a level"):
        Site.from_mapping({"levels": [""]})
    with pytest.raises(
        SiteInvalidError, match=r"topology: 'topology.yaml' is not an absolute path"
    ):
        Site.from_mapping({"topology": "topology.yaml"})


def test_a_node_is_below_one_switch() -> None:
    with pytest.raises(SiteInvalidError, match="'gpu2' is below two switches, or twice"):
        Site.from_mapping({"switches": {"leaf1": "gpu[1-2]", "leaf2": "gpu2"}})
