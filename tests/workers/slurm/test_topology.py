"""The topology of a Slurm site, from texts in the formats of Slurm.

Debian's Slurm (22.05) has trees of switches, which tests/slurm reads for real. Blocks (from 23.11
on), aggregated blocks and topology.yaml (25.05) are here in the form of Slurm's documentation and
source: `_print_topo_record` in src/plugins/topology/block/topology_block.c, topology.yaml(5).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.workers.errors import SlurmRefusedError, TopologyUnusableError
from layout_tuner.workers.launchers.agent import switches_above
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.slurm import topology as module
from layout_tuner.workers.slurm.topology import read_topology, topology_of
from tests.workers.slurm.requests import make_cluster

JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_PARTITION": "batch"}

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
"""

BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2]
BlockName=b2 BlockIndex=1 Nodes=n[3-4]
"""

AGGREGATED = """\
BlockName=b1 BlockIndex=0 Nodes=n1 BlockSize=1
BlockName=b2 BlockIndex=1 Nodes=n2 BlockSize=1
BlockName=b3 BlockIndex=2 Nodes=n3 BlockSize=1
BlockName=b4 BlockIndex=3 Nodes=n4 BlockSize=1
AggregatedBlock=b[1-2] BlockIndex=4 Nodes=n[1-2] BlockSize=2
AggregatedBlock=b[3-4] BlockIndex=5 Nodes=n[3-4] BlockSize=2
"""

YAML = """\
---
- topology: blocks
  cluster_default: false
  block:
    block_sizes: [1, 2]
    blocks:
      - block: b1
        nodes: n1
      - block: b2
        nodes: n2
      - block: b3
        nodes: n3
- topology: tree
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - switch: s1
        nodes: n[1-2]
      - switch: s2
        nodes: n[3-4]
- topology: none
  flat: true
"""


def nodes(*lists: str) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in "".join(lists))


class Scontrol:
    """A Slurm of nodes n1 to n4 that prints a topology; a test may change what it prints."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.topology: str | Exception = TREE
        self.partition = "PartitionName=batch\n   MinNodes=0\n"
        self.nodes: str | Exception = "\n".join(
            f"NodeName=n{number} State=IDLE" for number in range(1, 5)
        )
        self.asked: list[tuple[str, ...]] = []
        self.environ: Mapping[str, str] = {}
        patch.setattr(module, "call", self)

    def __call__(self, *command: str, environ: Mapping[str, str]) -> str:
        self.asked.append(command)
        self.environ = environ
        answer = {"show": self.nodes, "partition": self.partition}.get(command[2], self.topology)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def scontrol(monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    return Scontrol(monkeypatch)


def found(*levels: str, environ: Mapping[str, str] = JOB, **changes: Any) -> Topology:
    site = {
        "levels": levels,
        **{k: changes.pop(k) for k in ("switches", "topology") if k in changes},
    }
    return topology_of(Site(**site), make_cluster(**changes), environ)


def test_a_tree_has_its_leaves_first() -> None:
    leaves, spines = read_topology(TREE)
    assert leaves == {"leaf1": nodes("12"), "leaf2": nodes("34")}
    assert spines == {"spine1": nodes("1234")}


def test_parallel_switches_are_one_group() -> None:
    _, spines = read_topology(TREE + TREE.splitlines()[2].replace("spine1", "spine2"))
    assert list(spines) == ["spine1"]


def test_blocks_of_slurm_24_are_one_level() -> None:
    assert read_topology(BLOCKS) == [{"b1": nodes("12"), "b2": nodes("34")}]


def test_aggregated_blocks_are_levels_by_size() -> None:
    base, pairs = read_topology(AGGREGATED)
    assert list(base) == ["b1", "b2", "b3", "b4"]
    assert pairs == {"b[1-2]": nodes("12"), "b[3-4]": nodes("34")}


def test_a_topology_yaml_has_its_default_tree() -> None:
    leaves, root = read_topology(YAML)
    assert leaves == {"s1": nodes("12"), "s2": nodes("34")}
    assert root == {"root": nodes("1234")}


def test_blocks_of_a_topology_yaml_are_aggregated_in_rows() -> None:
    base, pairs = read_topology(YAML, "blocks")
    assert base == {"b1": nodes("1"), "b2": nodes("2"), "b3": nodes("3")}
    assert pairs == {"b1-b2": nodes("12"), "b3": nodes("3")}


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("", "", "has no switches or blocks"),
        (YAML, "none", "has no switches or blocks"),
        (YAML, "else", "is not as scontrol or topology.yaml.5. has it .KeyError.'else'"),
        ("- 7", "", "is not as scontrol or topology.yaml"),
        ("- topology: [", "", "is not as scontrol or topology.yaml"),
        ("SwitchName=s1 Nodes=n[1-", "", "is not a list of nodes"),
        ("SwitchName=s1 Level=x Nodes=n1", "", "ValueError"),
        (YAML.replace("s[1-2]", "s[1-3]"), "", "KeyError.'s3'"),
        (YAML.replace("s[1-2]", "root"), "", "RecursionError"),
        (YAML.replace("[1, 2]", "[0, 2]"), "blocks", "ZeroDivisionError"),
        ("AggregatedBlock=b1 BlockIndex=0 Nodes=n1 BlockSize=x", "", "ValueError"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, name: str, why: str) -> None:
    with pytest.raises(TopologyUnusableError, match=why):
        read_topology(text, name)


def test_a_site_names_the_levels_that_slurm_numbers(scontrol: Scontrol) -> None:
    topology = found("leaf", "spine")
    assert topology.names == ("leaf", "spine")
    assert topology.known == {
        **dict.fromkeys(("n1", "n2"), ("leaf1", "spine1")),
        **dict.fromkeys(("n3", "n4"), ("leaf2", "spine1")),
    }
    assert found("leaf").known["n3"] == ("leaf2",)


def test_a_site_without_levels_asks_slurm_nothing(scontrol: Scontrol) -> None:
    assert found() == Topology()
    assert not scontrol.asked


def test_outside_of_a_job_slurm_is_not_asked(scontrol: Scontrol) -> None:
    assert found("leaf", environ={}) == Topology(names=("leaf",))
    assert not scontrol.asked


def test_the_topology_is_that_of_the_jobs_partition(scontrol: Scontrol) -> None:
    scontrol.partition += "   TRES=cpu=64 Topology=blocks\n"
    found("leaf")
    assert ("scontrol", "show", "topology", "blocks") in scontrol.asked


def test_a_file_has_the_topology_of_the_jobs_partition(scontrol: Scontrol, tmp_path: Path) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(YAML)
    scontrol.partition += "   Topology=blocks\n"
    assert found("block", "pair", topology=str(file)).known["n2"] == ("b2", "b1-b2")


def test_users_variables_cut_and_redirect_nothing(scontrol: Scontrol) -> None:
    found("leaf", environ={**JOB, "SLURM_TOPO_LEN": "20", "SLURM_CLUSTERS": "a,b"})
    assert set(scontrol.environ) == set(JOB)


def test_a_missing_switch_of_an_uneven_tree_is_the_one_below(scontrol: Scontrol) -> None:
    scontrol.topology = (
        "SwitchName=l1 Level=0 Nodes=n1\nSwitchName=l2 Level=0 Nodes=n2\n"
        "SwitchName=s1 Level=1 Nodes=n1 Switches=l1\n"
        "SwitchName=top Level=2 Nodes=n[1-2] Switches=s1,l2\n"
    )
    assert found("leaf", "spine", "top").known == {
        "n1": ("l1", "s1", "top"),
        "n2": ("l2", "l2", "top"),
    }


@pytest.mark.parametrize(
    ("topology", "levels", "why"),
    [
        (
            TREE.replace("n[3-4]", "n[3-4],n99", 1),
            ("leaf",),
            "leaf2 names n99, not a node of Slurm's",
        ),
        (
            TREE.replace("n[3-4]", "n[2-4]", 1),
            ("leaf",),
            "n2 is in two groups of level leaf, leaf1 and leaf2",
        ),
        (
            BLOCKS,
            ("leaf", "spine"),
            "the site names 2 levels (leaf, spine), and Slurm's topology has 1",
        ),
        (
            TREE.replace("n[3-4]", "n[2-4]").replace("n[1-2]", "n1"),
            ("leaf",),
            "leaf leaf2 has 3 nodes, and the cluster's description says 2",
        ),
        ("", ("leaf",), "has no switches or blocks"),
    ],
)
def test_a_contradiction_is_one_sentence_and_no_topology(
    topology: str,
    levels: tuple[str, ...],
    why: str,
    scontrol: Scontrol,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scontrol.topology = topology
    cluster_levels = [{"name": "node", "devices": 2}, {"name": "leaf", "devices": 4}]
    assert not found(*levels, levels=cluster_levels).known
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("probes are placed as without a topology: ")
    assert why in record.getMessage()


def test_a_file_that_is_not_there_is_a_warning(
    scontrol: Scontrol, caplog: pytest.LogCaptureFixture
) -> None:
    assert not found("leaf", topology="/nowhere/topology.yaml").known
    assert "the site's topology can't be read" in caplog.text


def test_where_slurm_does_not_answer_nodes_say_their_switches(
    scontrol: Scontrol, caplog: pytest.LogCaptureFixture
) -> None:
    scontrol.topology = SlurmRefusedError("scontrol refuses (1): no")
    topology = found("leaf", "spine")
    assert "SLURM_TOPOLOGY_ADDR of the nodes say is the topology: scontrol refuses" in caplog.text
    assert topology.groups("n1", {}, ["leaf1", "spine1", "top"]) == ("leaf1", "spine1")
    assert topology.groups("n1", {}, ["leaf1"]) == ()


def test_switches_of_the_file_take_the_place_of_slurms(scontrol: Scontrol) -> None:
    listed = {"a": ("n1",), "b": ("n2",)}
    assert found(switches=listed).known == {"n1": ("a",), "n2": ("b",)}
    assert found("leaf", switches=listed).names == ("leaf",)
    assert {command[2] for command in scontrol.asked} == {"show"}, "whether the nodes are there"


def test_switches_of_the_file_need_no_answer_of_slurm(scontrol: Scontrol) -> None:
    scontrol.nodes = SlurmRefusedError("scontrol refuses (1): no")
    assert found(switches={"a": ("n1",)}).known == {"n1": ("a",)}


def test_levels_above_the_node_are_the_clusters() -> None:
    levels = [{"name": n, "devices": d} for n, d in (("pair", 1), ("node", 2), ("domain", 4))]
    topology = Topology.of(make_cluster(levels=[*levels, {"name": "all"}]))
    assert (topology.names, dict(topology.most_nodes)) == (("domain",), {"domain": 2})


def test_labels_of_a_node_come_before_what_slurm_says() -> None:
    topology = Topology(names=("domain",), known={"n1": ("d1",)}, reads_addresses=True)
    assert topology.groups("n1", {"domain": "mine", "zone": "z"}, ["s1"]) == ("mine",)
    assert topology.groups("n1", {"zone": "z"}, ["s1"]) == ("d1",)
    assert topology.groups("n2", {}, ["s2"]) == ("s2",)


@pytest.mark.parametrize(
    ("address", "pattern", "switches"),
    [
        ("root.leaf1.n1", "switch.switch.node", ["leaf1", "root"]),
        ("b1.n1", "block.node", ["b1"]),
        ("n1", "node", []),
        ("leaf1.n1.example", "switch.node", []),
        ("", "", []),
    ],
)
def test_a_node_reads_its_switches_from_its_step(
    address: str, pattern: str, switches: list[str]
) -> None:
    named = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert switches_above(named) == switches
