"""The site: settings of a Slurm machine, in the section `site` of a cluster's file.

A site has code that runs on nodes (modules, lines of shell, variables). So it comes from a file of
the user or from a preset, and never from the service: the cluster of a campaign has no such field,
and `cluster put` leaves the section out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from ipaddress import ip_address, ip_network
from itertools import product
from math import prod
from typing import Any, Final, Self
from urllib.parse import urlsplit

from layout_tuner.documents.dataclass_documents import within
from layout_tuner.documents.duration import MAX_DURATION_S, MaxTimes, read_walltime_s
from layout_tuner.documents.hosts import is_loopback_host
from layout_tuner.documents.reading import (
    is_line,
    is_name,
    is_positive_number,
    nearest,
    read_choice,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)
from layout_tuner.errors import SiteInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.physical_ranges import Range

LAUNCHERS: Final = ("ray", "srun")
SITE_PRESETS: Final = ("frontier", "perlmutter")
"""Sites that come with the program (`workers/slurm/sites`), named like their cluster presets."""
_DRAIN_S: Final = Range(1e-3, MAX_DURATION_S, "s")
_CORES: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NODES: Final = re.compile(
    r"([A-Za-z0-9._-]+)|\[((?:[0-9]{1,9}(?:-[0-9]{1,9})?,?)+)(?<!,)\]"  # a text, or ranges
)
_MAX_NODES: Final = 100_000
_MODULE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
OPTION: Final = re.compile(r"--[a-z][a-z-]*(?:=[^\s'\"\\]+)?")
"""A long option of Slurm's commands that needs no quotes in a line `#SBATCH`."""
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9._:-]|\{name\}|\{index\})+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """How jobs are submitted and nodes set up at a Slurm site; SiteInvalidError if impossible."""

    modules: tuple[str, ...] = ()
    """Modules that the batch host loads in this order; steps inherit the environment."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run after the modules are loaded."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process; `$NAME` in a value is replaced by another variable."""
    environment_of_several_nodes: Mapping[str, str] = field(default_factory=dict)
    """Additional variables of jobs with more than one node."""
    sbatch: tuple[str, ...] = ()
    """Options of every job, such as "--constraint=nvme"."""
    srun: tuple[str, ...] = ()
    """Options of every step."""
    devices_option: str = "--gpus-per-node={devices}"
    """The option that requests all devices of a node; empty: none. It is not used for CPU cores."""
    needs_account: bool = False
    max_time: MaxTimes = field(default_factory=dict)
    """Longest wall times in seconds by number of nodes; empty: only Slurm checks the limit."""
    max_time_by_partition: Mapping[str, MaxTimes] = field(default_factory=dict)
    """The same for partitions with their own limits."""
    max_time_by_qos: Mapping[str, MaxTimes] = field(default_factory=dict)
    """The same for qualities of service; they take precedence over those of a partition."""
    launcher: str = "ray"
    """The default launcher of probes: "ray" or "srun"."""
    share_nodes: bool | None = None
    """Whether small probes run side by side on a node; None: only if its devices are not CPU
    cores."""
    drain_s: float = 90.0
    """The worker stops this many seconds before the end of the job."""
    node_address: str = "{name}"
    """Address of a node: {name} is its name, {index} its position in the job from 0."""
    cores_per_node: int | None = None
    """Cores that a step may request on a node; None: all that Slurm counts."""
    device_cores: tuple[tuple[int, ...], ...] = ()
    """Ids of the cores that are nearest to each device; empty: equal contiguous shares."""
    node_local_dir: str = "/tmp"  # noqa: S108 - of the node, below it a directory of the job's own
    """A directory on a disk of the node; `$NAME` is replaced by a variable."""
    levels: tuple[str, ...] = ()
    """Names of the levels of Slurm's topology, the lowest first; a level of the cluster has the
    same name. The worker asks Slurm which nodes lie together at each. Empty: it does not ask."""
    topology: str = ""
    """The path of Slurm's topology.yaml on the batch host; empty: `scontrol show topology`."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the nodes below each switch, in place of Slurm's topology. Probes of several nodes
    get nodes of one switch where they can; empty: nodes whose positions in the job are
    neighbours."""
    http_proxy: str = ""
    """The proxy through which the worker reaches a service outside; empty: none."""
    no_proxy: tuple[str, ...] = ()
    """Hosts that are reached without the proxy: names, "*.example.org", or networks
    "10.0.0.0/8"."""

    def __post_init__(self) -> None:
        for name in ("environment", "environment_of_several_nodes"):
            for variable, value in getattr(self, name).items():
                _refuse_unless(_VARIABLE.fullmatch(variable), name, variable, "a variable's name")
                _refuse_unless(is_line(value), f"{name}.{variable}", value, "one line of text")
        option = "a long option as --constraint=nvme, without spaces or quotes"
        address = "an address made of {name}, {index}, letters, digits, dots, colons and dashes"
        for name, texts, is_right, what in (
            ("modules", self.modules, _MODULE.fullmatch, "the name of a module"),
            ("sbatch", self.sbatch, OPTION.fullmatch, option),
            ("srun", self.srun, OPTION.fullmatch, option),
            ("setup", self.setup, is_line, "one line of shell"),
            ("levels", self.levels, is_name, "the name of a level, at most 64 characters long"),
            ("node_address", (self.node_address,), _ADDRESS.fullmatch, address),
        ):
            for text in texts:
                _refuse_unless(is_right(text), name, text, what)
        example = self.devices_option.replace("{devices}", "8")
        if self.devices_option:
            what = "a long option as --gres=gpu:{devices}"
            _refuse_unless(OPTION.fullmatch(example), "devices_option", self.devices_option, what)
        _refuse_unless(
            is_line(self.node_local_dir) and self.node_local_dir.startswith(("/", "$")),
            "node_local_dir",
            self.node_local_dir,
            "an absolute path",
        )
        if len(set(self.levels)) < len(self.levels):
            raise SiteInvalidError("a name is there twice", field="levels")
        absolute = not self.topology or (is_line(self.topology) and self.topology.startswith("/"))
        _refuse_unless(absolute, "topology", self.topology, "an absolute path")
        read_choice(self.launcher, LAUNCHERS, SiteInvalidError, field="launcher")
        if problem := _DRAIN_S.problem(self.drain_s):
            raise SiteInvalidError(problem, field="drain_s")
        cores = self.cores_per_node
        if cores is not None and (problem := whole_number_problem(cores)):
            raise SiteInvalidError(problem, field="cores_per_node")

    @classmethod
    def from_mapping(cls, described: object) -> Self:
        """Builds a site from a document's fields; SiteInvalidError if one is unknown or wrong."""
        values = read_mapping(described, SiteInvalidError, "the site")
        known = tuple(f.name for f in fields(cls))
        refuse_unknown(values, known, SiteInvalidError, "site field")
        return cls(**{name: _READERS[name](value, name) for name, value in values.items()})

    def address(self, name: str, index: int) -> str:
        """The address of the node with this name and position in the job."""
        return self.node_address.replace("{name}", name).replace("{index}", str(index))

    def devices_options(self, cluster: Cluster) -> list[str]:
        """The options that request all devices of a node; none for CPU cores."""
        if cluster.has_cpu_devices or not self.devices_option:
            return []
        return [self.devices_option.replace("{devices}", str(cluster.devices_per_node))]

    def proxied(self, url: str) -> bool:
        """Whether the site's nodes reach this address through the proxy."""
        host = urlsplit(url).hostname or ""
        if is_loopback_host(host):
            return False
        return bool(self.http_proxy) and not any(_covers(rule, host) for rule in self.no_proxy)

    def max_times(self, *, partition: str | None, qos: str | None) -> MaxTimes:
        """The limits of a job in this partition and quality of service."""
        if qos is not None and qos in self.max_time_by_qos:
            return self.max_time_by_qos[qos]
        if partition is not None and partition in self.max_time_by_partition:
            return self.max_time_by_partition[partition]
        return self.max_time


def _covers(rule: str, host: str) -> bool:
    """Whether an entry of `no_proxy` (a name, a pattern or a network) matches this host."""
    try:
        return ip_address(host) in ip_network(rule)
    except ValueError:  # one of them is a name
        return fnmatch(host, rule)


def cluster_part(described: Any) -> Any:
    """A cluster's file without its section `site`; SiteInvalidError if that is invalid."""
    if not isinstance(described, Mapping):
        return described
    if "site" in described:
        within("site", refuse_unreadable_site, described["site"])
    return {name: value for name, value in described.items() if name != "site"}


def refuse_unreadable_site(described: object) -> None:
    """Raises SiteInvalidError for a section `site` with an unknown name or impossible value."""
    if isinstance(described, str):
        described = {"preset": described}
    values = read_mapping(described, SiteInvalidError, "the site")
    if "preset" in values:
        refuse_unknown_site(values.pop("preset"))
    Site.from_mapping(values)


def refuse_unknown_site(name: object) -> None:
    """Raises SiteInvalidError, with all presets, for a name that is none of them."""
    if name not in SITE_PRESETS:
        raise SiteInvalidError(f"unknown site {shown(name)}{nearest(name, SITE_PRESETS)}")


def _refuse_unless(holds: object, name: str, value: object, what: str) -> None:
    if not holds:
        raise SiteInvalidError(f"{shown(value)} is not {what}", field=name)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    _refuse_unless(is_list, name, value, "a list of texts")
    return tuple(value)


def _variables(value: Any, name: str) -> dict[str, str]:
    values = read_mapping(value, SiteInvalidError, name)
    for variable, text in values.items():
        what = "a text; put it in quotes"
        _refuse_unless(isinstance(text, str), f"{name}.{variable}", text, what)
    return values


def _text(value: Any, name: str) -> str:
    _refuse_unless(isinstance(value, str), name, value, "a text")
    return str(value)


def _truth(value: Any, name: str) -> bool:
    _refuse_unless(isinstance(value, bool), name, value, "true or false")
    return bool(value)


def _number(value: Any, name: str) -> float:
    _refuse_unless(is_positive_number(value), name, value, "a number over 0")
    return float(value)


def _max_times(value: Any, name: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SiteInvalidError(
            f"{shown(value)} is not a mapping from most nodes to longest times, as {{91: 2h}}",
            field=name,
        )
    limits = {}
    for key, time in value.items():
        # The batch script has the file as JSON, whose keys are always texts.
        nodes = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,9}", key) else key
        if problem := whole_number_problem(nodes):
            raise SiteInvalidError(f"the number of nodes {problem}", field=name)
        limits[nodes] = read_walltime_s(time, field=f"{name}[{nodes}]")
    return limits


def _max_times_by_name(value: Any, name: str) -> dict[str, dict[int, float]]:
    values = read_mapping(value, SiteInvalidError, name)
    return {key: _max_times(limits, f"{name}.{key}") for key, limits in values.items()}


def _device_cores(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise SiteInvalidError(
            f'{shown(value)} is not a list of ranges, as ["0-7", "8-15"]', field=name
        )
    devices = tuple(_cores(item, name) for item in value)
    cores = [core for device in devices for core in device]
    if len(set(cores)) != len(cores):
        raise SiteInvalidError("a core stands at two devices", field=name)
    if len({len(device) for device in devices}) > 1:
        raise SiteInvalidError("devices have unequal numbers of cores", field=name)
    return devices


def _cores(value: Any, name: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in str(value).split(","):
        match = _CORES.fullmatch(part.strip())
        if match is None:
            raise SiteInvalidError(f'{shown(value)} is not a range of cores as "49-55"', field=name)
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    _refuse_unless(cores, name, value, "a range of cores with a core in it")
    return tuple(cores)


def _switches(value: Any, name: str) -> dict[str, tuple[str, ...]]:
    values = read_mapping(value, SiteInvalidError, name)
    switches = {
        switch: tuple(node_list(nodes, f"{name}.{switch}")) for switch, nodes in values.items()
    }
    named = [node for nodes in switches.values() for node in nodes]
    twice = next((node for node, count in Counter(named).items() if count > 1), None)
    if twice is not None:
        raise SiteInvalidError(f"{shown(twice)} is below two switches, or twice", field=name)
    return switches


def node_list(value: Any, name: str) -> Iterator[str]:
    """The names in a list of nodes as Slurm writes it, such as "n[001-003,7],r[1-2]n[0-8],login".

    Raises:
        SiteInvalidError: it is not such a list; `name` is the field that has it.
    """
    what = 'a list of nodes as "node[001-016],node40"'
    for part in re.split(r",(?![^\[]*\])", value if isinstance(value, str) else ""):
        pieces = [*_NODES.finditer(part)]
        is_whole = pieces and pieces[0][1] and "".join(piece[0] for piece in pieces) == part
        _refuse_unless(is_whole, name, value, what)
        choices = [[piece[1]] if piece[1] else _numbers(piece[2]) for piece in pieces]
        _refuse_unless(0 < prod(map(len, choices)) <= _MAX_NODES, name, value, what)
        yield from map("".join, product(*choices))


def _numbers(ranges: str) -> Sequence[str]:
    """The numbers of ranges as "001-003,7"; none where there are too many or a range is empty."""
    found: list[str] = []
    for first, _, last in (item.partition("-") for item in ranges.split(",")):
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= _MAX_NODES:
            return ()
        found += [f"{number:0{len(first)}}" for number in numbers]
    return found


_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "modules": _texts,
    "setup": _texts,
    "environment": _variables,
    "environment_of_several_nodes": _variables,
    "sbatch": _texts,
    "srun": _texts,
    "devices_option": _text,
    "needs_account": _truth,
    "max_time": _max_times,
    "max_time_by_partition": _max_times_by_name,
    "max_time_by_qos": _max_times_by_name,
    "launcher": _text,
    "share_nodes": lambda value, name: None if value is None else _truth(value, name),
    "drain_s": _number,
    "node_address": _text,
    "cores_per_node": lambda value, _: value,
    "device_cores": _device_cores,
    "node_local_dir": _text,
    "levels": _texts,
    "topology": _text,
    "switches": _switches,
    "http_proxy": _text,
    "no_proxy": _texts,
}
"""The reader of each field, called with the value and the name of the field."""
