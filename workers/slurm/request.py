"""A request for an allocation: nodes for some time, with a worker in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from layout_tuner.documents.duration import longest_s, slurm_time
from layout_tuner.documents.reading import is_line, nearest, shown, whole_number_problem
from layout_tuner.protocol.connection.http_connection import refuse_unless_http
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.site import LAUNCHERS, OPTION, Site
from layout_tuner.workers.errors import AllocationInvalidError

MARK: Final = "layout-tuner"
"""Start of the comment of every job that layout-tuner submits."""

NAMED_OPTIONS: Final = ("account", "partition", "qos", "constraint", "switches", "segment")
"""Options of sbatch that are fields of a request."""

_GIVEN_OTHERWISE: Final[Mapping[str, str]] = {
    "--nodes": "give --nodes to submit itself",
    "--time": "give --time to submit itself",
    "--comment": "jobs are found by their comment",
    "--signal": "the site's drain_s sets when the worker is signalled",
}
"""Options of sbatch that are set by other means, and those means."""
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+:,-]{0,127}")
_LOG: Final = re.compile(r"[A-Za-z0-9/._%@+:,=-]{1,500}")
_LEAST_WORK_S: Final = 60.0
"""An allocation with less than a minute before its drain is a mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationRequest:
    """All inputs of an allocation's batch script.

    Raises:
        AllocationInvalidError: at construction, where the site would refuse it, or where Slurm
            could misread a value.
    """

    cluster: Cluster
    described: str | Mapping[str, Any]
    """The user's description of it: a preset's name, or the document of a file with the site."""
    site: Site
    """The site's modules, limits and options."""
    num_nodes: int
    time_s: float
    """Its wall time."""
    url: str
    """Address of the service, as the nodes reach it."""
    token_file: Path
    """Absolute path of a worker's token, on a disk that the nodes see."""
    python: Path
    """The interpreter that has layout-tuner, on a disk that the nodes see; unused with an
    archive."""
    certificate: Path | None = None
    """Absolute path of the service's self-signed certificate, on such a disk; None: it has none."""
    archive: Path | None = None
    """A packed environment that every node unpacks on its own disk."""
    launcher: str = "ray"
    """How probes are started: "ray" or "srun"."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run after those of the site, unchanged."""
    job_name: str = MARK
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    switches: str | None = None
    """Most leaf switches of a tree topology, and how long to wait for them: "2" or "2@60"."""
    segment: str | None = None
    """Nodes of each part of the job that lies in one block of a block topology."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch; they override other options of the same name."""
    log: str = "%x-%j.log"
    """File that the job prints to, as sbatch's --output."""
    end_when_idle_s: float | None = None
    """Seconds without work after which the worker ends, and the job with it."""
    trainers_file: Path | None = None
    """Absolute path of the file of other trainers, on a disk that the nodes see; None: none."""
    share_nodes: bool | None = None
    """Whether small probes run side by side on a node; None: by the site or the devices."""

    def __post_init__(self) -> None:
        for option, problem in chain(
            self._unreadable(), self._odd_places(), self._refused_by_site()
        ):
            raise AllocationInvalidError(problem, field=option)

    def effective(self, name: str) -> str | None:
        """The effective value of an option of sbatch; None: it is not given."""
        given: str | None = getattr(self, name) if name in NAMED_OPTIONS else None
        named = [] if given is None else [f"--{name}={given}"]
        for option in reversed([*self.site.sbatch, *named, *self.sbatch_options]):
            if option.startswith(f"--{name}="):
                return option.partition("=")[2]
        return None

    def _unreadable(self) -> Iterator[tuple[str, str]]:
        """The options whose values Slurm could misread, and why."""
        for name in ("job_name", "account", "partition", "qos", "switches", "segment"):
            value = getattr(self, name)
            if value is not None and not _WORD.fullmatch(value):
                option = f"--{name.replace('_', '-')}"
                yield option, f"{shown(value)} is not a word of letters, digits and ._@+:,-"
        if self.constraint is not None and not OPTION.fullmatch(f"--constraint={self.constraint}"):
            yield "--constraint", f"{shown(self.constraint)} has spaces or quotes"
        for option in self.sbatch_options:
            name = option.partition("=")[0]
            if name in _GIVEN_OTHERWISE:
                yield "--sbatch-option", f"{name} can't be given here: {_GIVEN_OTHERWISE[name]}"
            elif not OPTION.fullmatch(option):
                problem = "is not a long option without spaces or quotes, as --mem=0"
                yield "--sbatch-option", f"{shown(option)} {problem}"
        if not _LOG.fullmatch(self.log):
            yield "--log", f"{shown(self.log)}: a job's log is a path without spaces or quotes"
        for line in self.setup:
            if not is_line(line):
                yield "--setup", f"{shown(line)} is not one line"
        if self.launcher not in LAUNCHERS:
            near = nearest(self.launcher, LAUNCHERS)
            yield "--launcher", f"{shown(self.launcher)} is unknown{near}"

    def _odd_places(self) -> Iterator[tuple[str, str]]:
        """The options with an address or a path that can't be one, and why."""
        try:
            refuse_unless_http(self.url)
            fits = is_line(self.url) and " " not in self.url
            has_password = "@" in urlsplit(self.url).netloc
        except ValueError:
            fits = has_password = False
        if not fits:
            example = "http://login1.example.org:8080"
            yield "--url", f"{shown(self.url)} is not an address such as {example}"
        if has_password:
            yield (
                "--url",
                "the address has a password, which other users could read in the list of processes",
            )
        for name in ("token_file", "certificate", "python", "archive"):
            path = getattr(self, name)
            if path is not None and not (path.is_absolute() and is_line(str(path))):
                yield name, f"{shown(str(path))} is not an absolute path of printable characters"

    def _refused_by_site(self) -> Iterator[tuple[str, str]]:
        """The options that the site would refuse, and why."""
        site, num_nodes = self.site, self.num_nodes
        if problem := whole_number_problem(num_nodes, high=self.cluster.num_nodes):
            yield "--nodes", f"{problem} ({self.cluster.name} has {self.cluster.num_nodes} nodes)"
            return
        if site.needs_account and self.effective("account") is None:
            yield "--account", f"{self.cluster.name} charges every job to an account: name yours"
        segment = self.effective("segment") or ""
        if segment.isdecimal() and 0 < int(segment) < num_nodes and num_nodes % int(segment):
            yield "--segment", f"{num_nodes} nodes are no multiple of {segment}, as Slurm asks"
        asked, least_s = slurm_time(self.time_s), site.drain_s + _LEAST_WORK_S
        if self.time_s < least_s:
            yield (
                "--time",
                f"{asked} leaves no time to work: the worker stops {site.drain_s:g} s before the end "
                f"(the site's drain_s); ask for {slurm_time(least_s)} at least",
            )
        limits = site.max_times(partition=self.effective("partition"), qos=self.effective("qos"))
        longest = longest_s(limits, num_nodes) if limits else self.time_s
        if longest is None:
            yield (
                "--nodes",
                f"{num_nodes} is more than {max(limits)}, the most nodes of a job here",
            )
        elif self.time_s > longest:
            classes = ", ".join(
                f"{slurm_time(seconds)} with up to {nodes}"
                for nodes, seconds in sorted(limits.items())
            )
            yield (
                "--time",
                f"{asked} is more than {slurm_time(longest)}, the longest job of {num_nodes} nodes; "
                f"the site's limits by nodes are {classes}",
            )


def comment(cluster: str) -> str:
    """The comment by which a job is found again; it has the cluster's name in plain characters."""
    return f"{MARK}:{plain_name(cluster)}"


def plain_name(name: str) -> str:
    """A name whose characters neither Slurm nor a shell treats specially."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
