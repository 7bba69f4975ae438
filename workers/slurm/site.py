"""The site: what a Slurm machine needs beyond the description of its devices.

A site says what runs on a node (modules, lines of shell, variables), so it comes from a file of the
user's or from a preset, and never from the service: the cluster of a campaign has no such field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from importlib import resources
from ipaddress import ip_address, ip_network
from typing import Any, Final, Self
from urllib.parse import urlsplit

from search_spaces.cluster import Cluster
from search_spaces.reading import (
    is_line,
    is_positive_number,
    nearest,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)
from workers.launchers.group_launcher import device_of
from workers.slurm.errors import SiteInvalidError
from workers.slurm.site_reading import READERS, refuse_unless
from workers.slurm.walltime import MaxTimes

LAUNCHERS: Final = ("ray", "srun")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]*")
OPTION: Final = re.compile(r"--[a-z][a-z-]*(?:=[^\s'\"\\]+)?")
"""A long option of Slurm's commands that stands in a line `#SBATCH` without quotes."""
_ADDRESS: Final = re.compile(r"(?:[A-Za-z0-9._:-]|\{name\}|\{index\})+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """How jobs are asked for at a Slurm site, and what its nodes need before anything runs.

    Raises:
        SiteInvalidError: at construction, when a value could not be what it says.
    """

    modules: tuple[str, ...] = ()
    """Loaded in this order by `module load`, on the batch host; steps inherit what they set."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run after the modules, as they stand."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every process; `$NAME` in a value stands for another one."""
    environment_of_several_nodes: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set besides where the job has more than one node."""
    sbatch: tuple[str, ...] = ()
    """Options of every job, as "--constraint=nvme"."""
    srun: tuple[str, ...] = ()
    """Options of every step, likewise."""
    devices_option: str = "--gpus-per-node={devices}"
    """How a job and its steps ask for all devices of a node; empty: nothing is asked for. Never for cores."""
    needs_account: bool = False
    """Whether a job must be charged to a named account."""
    max_time: MaxTimes = field(default_factory=dict)
    """Longest wall times in seconds by the most nodes that each is for; empty: Slurm will tell."""
    max_time_by_partition: Mapping[str, MaxTimes] = field(default_factory=dict)
    """The same for partitions that have limits of their own."""
    max_time_by_qos: Mapping[str, MaxTimes] = field(default_factory=dict)
    """The same for qualities of service; they go before a partition's."""
    launcher: str = "ray"
    """How probes are started where nobody says: "ray" or "srun"."""
    share_nodes: bool | None = None
    """Whether small probes run side by side on a node; None: unless its devices are CPU cores."""
    drain_s: float = 90.0
    """Seconds before the end at which the worker must stop at the latest."""
    node_address: str = "{name}"
    """Where a node is reached by others: {name} is its name, {index} its position in the job from 0."""
    cores_per_node: int | None = None
    """Cores that a step may ask for on a node; None: all that Slurm counts."""
    device_cores: tuple[tuple[int, ...], ...] = ()
    """Ids of the cores that are nearest to each device; empty: equal contiguous shares."""
    node_local_dir: str = "/tmp"  # noqa: S108 - of the node, below it a directory of the job's own
    """A directory on a disk of the node itself; `$NAME` stands for a variable."""
    http_proxy: str = ""
    """Through which the worker reaches a service outside; empty: directly."""
    no_proxy: tuple[str, ...] = ()
    """Hosts that are reached directly all the same: names, "*.example.org", or networks "10.0.0.0/8"."""

    def __post_init__(self) -> None:
        for name in ("environment", "environment_of_several_nodes"):
            for variable, value in getattr(self, name).items():
                refuse_unless(_VARIABLE.fullmatch(variable), name, variable, "a variable's name")
                refuse_unless(is_line(value), f"{name}.{variable}", value, "one line of text")
        for module in self.modules:
            refuse_unless(_MODULE.fullmatch(module), "modules", module, "the name of a module")
        for name in ("sbatch", "srun"):
            for option in getattr(self, name):
                what = "a long option as --constraint=nvme, without spaces or quotes"
                refuse_unless(OPTION.fullmatch(option), name, option, what)
        example = self.devices_option.replace("{devices}", "8")
        if self.devices_option:
            what = "a long option as --gres=gpu:{devices}"
            refuse_unless(OPTION.fullmatch(example), "devices_option", self.devices_option, what)
        for line in self.setup:
            refuse_unless(is_line(line), "setup", line, "one line of shell")
        refuse_unless(
            _ADDRESS.fullmatch(self.node_address),
            "node_address",
            self.node_address,
            "an address made of {name}, {index}, letters, digits, dots, colons and dashes",
        )
        refuse_unless(
            is_line(self.node_local_dir) and self.node_local_dir.startswith(("/", "$")),
            "node_local_dir",
            self.node_local_dir,
            "an absolute path",
        )
        if self.launcher not in LAUNCHERS:
            raise SiteInvalidError(
                f"{shown(self.launcher)} is unknown{nearest(self.launcher, LAUNCHERS)}",
                field="launcher",
            )
        refuse_unless(is_positive_number(self.drain_s), "drain_s", self.drain_s, "a number over 0")
        if self.cores_per_node is not None and (
            problem := whole_number_problem(self.cores_per_node)
        ):
            raise SiteInvalidError(problem, field="cores_per_node")

    @classmethod
    def from_mapping(cls, described: object) -> Self:
        """Builds a site from its fields by name, as YAML or JSON spells them.

        Raises:
            SiteInvalidError: a field is unknown, of the wrong type, or impossible.
        """
        values = read_mapping(described, SiteInvalidError, "the site")
        known = tuple(f.name for f in fields(cls))
        refuse_unknown(values, known, SiteInvalidError, "site field")
        return cls(**{name: READERS[name](value, name) for name, value in values.items()})

    def address(self, name: str, index: int) -> str:
        """Where the job's node of that name and position is reached."""
        return self.node_address.replace("{name}", name).replace("{index}", str(index))

    def devices_options(self, cluster: Cluster) -> list[str]:
        """What a job or a step says to have all devices of its nodes; cores are asked for otherwise."""
        if device_of(cluster) == "cpu" or not self.devices_option:
            return []
        return [self.devices_option.replace("{devices}", str(cluster.devices_per_node))]

    def proxied(self, url: str) -> bool:
        """Whether the site's proxy stands between its nodes and this address."""
        host = urlsplit(url).hostname or ""
        if host == "localhost" or host.startswith("127."):
            return False
        return bool(self.http_proxy) and not any(_covers(rule, host) for rule in self.no_proxy)

    def max_times(self, *, partition: str | None, qos: str | None) -> MaxTimes:
        """The limits that hold for a job of this partition and quality of service."""
        if qos is not None and qos in self.max_time_by_qos:
            return self.max_time_by_qos[qos]
        if partition is not None and partition in self.max_time_by_partition:
            return self.max_time_by_partition[partition]
        return self.max_time


def _covers(rule: str, host: str) -> bool:
    """Whether a name, a pattern or a network of `no_proxy` holds this host."""
    try:
        return ip_address(host) in ip_network(rule)
    except ValueError:  # one of them is a name
        return fnmatch(host, rule)


def site_preset(name: str) -> Site | None:
    """The known site of that name, or None."""
    if name not in known_sites():
        return None
    import yaml

    text = resources.files(__package__).joinpath("sites", f"{name}.yaml").read_text()
    return Site.from_mapping(yaml.safe_load(text))


def known_sites() -> tuple[str, ...]:
    """Names of the sites that come with the package; each is a cluster preset's."""
    directory = resources.files(__package__).joinpath("sites")
    names = (file.name for file in directory.iterdir() if file.name.endswith(".yaml"))
    return tuple(sorted(name.removesuffix(".yaml") for name in names))


def site_of(described: object) -> Site | None:
    """The site of a cluster that the user of this machine described; None: nobody says.

    It stands in the field `site` beside the cluster's own: a preset's name, or fields, which may start
    from a preset. Where that field is missing, a cluster preset brings its own.

    Raises:
        SiteInvalidError: it is unknown or impossible.
    """
    if isinstance(described, str):
        return site_preset(described)
    if not isinstance(described, Mapping):
        return None
    if "site" in described:
        try:
            return _read_site(described["site"])
        except SiteInvalidError as error:
            raise error.within("site") from error
    preset = described.get("preset", described.get("name"))
    return site_preset(preset) if isinstance(preset, str) else None


def cluster_part(described: Any) -> Any:
    """What of a user's description is the cluster itself: all but `site`, which stays on this machine."""
    if not isinstance(described, Mapping):
        return described
    return {name: value for name, value in described.items() if name != "site"}


def _read_site(described: object) -> Site:
    if isinstance(described, str):
        return _preset_or_refuse(described)
    values = read_mapping(described, SiteInvalidError, "the site")
    if "preset" not in values:
        return Site.from_mapping(values)
    base = _preset_or_refuse(values.pop("preset"))
    changes = Site.from_mapping(values)
    return replace(base, **{name: getattr(changes, name) for name in values})


def _preset_or_refuse(name: object) -> Site:
    site = site_preset(name) if isinstance(name, str) else None
    if site is None:
        raise SiteInvalidError(
            f"unknown site {shown(name)}{nearest(str(name)[:80], known_sites())}"
        )
    return site
