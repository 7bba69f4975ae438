"""What a user asks for: an allocation of some nodes for some time, and a worker in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from search_spaces.cluster import Cluster
from search_spaces.reading import is_line, nearest, shown, whole_number_problem
from workers.errors import UrlInvalidError
from workers.service_http import refuse_unless_http
from workers.slurm.errors import AllocationInvalidError
from workers.slurm.site import LAUNCHERS, OPTION, Site
from workers.slurm.walltime import longest_s, slurm_time

MARK: Final = "layout-tuner"
"""How the comment of every job of ours begins."""

NAMED_OPTIONS: Final = ("account", "partition", "qos", "constraint")
"""Options of sbatch that a request has a field for."""

_GIVEN_OTHERWISE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--nodes": "give --nodes to submit itself",
        "--time": "give --time to submit itself",
        "--comment": "by its comment a job is known again",
        "--signal": "the site's drain_s says when the worker is told",
    }
)
"""Options that a request, its limits or the script's own work rest on."""
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+:,-]{0,127}")
_LOG: Final = re.compile(r"[A-Za-z0-9/._%@+:,=-]{1,500}")
_LEAST_WORK_S: Final = 60.0
"""An allocation with less than a minute before its drain is a mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationRequest:
    """All that the batch script of an allocation follows from.

    Raises:
        AllocationInvalidError: at construction, when the site would not take it, or when a value could
            mean something else to Slurm than it says.
    """

    cluster: Cluster
    """What the nodes are."""
    described: str | Mapping[str, Any]
    """How the user described it: a preset's name, or the document of a file, site included."""
    site: Site
    """What the nodes need."""
    num_nodes: int
    """Nodes of the job."""
    time_s: float
    """Its wall time."""
    url: str
    """Where the worker finds the service."""
    token_file: Path
    """Absolute path of a worker's token, on a disk that the nodes see."""
    python: Path
    """The interpreter that has layout-tuner, as the nodes see it; unused where there is an archive."""
    certificate: Path | None = None
    """Absolute path of the service's certificate, where no authority vouches for it; on such a disk too."""
    archive: Path | None = None
    """A packed environment that every node unpacks on its own disk."""
    launcher: str = "ray"
    """How probes are started: "ray" or "srun"."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run after the site's, as they stand."""
    job_name: str = MARK
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch; they go before all others of their names."""
    log: str = "%x-%j.log"
    """File that the job prints to, as sbatch's --output."""
    end_when_idle_s: float | None = None
    """Seconds without work after which the worker ends, and the job with it."""
    share_nodes: bool | None = None
    """Whether small probes run side by side on a node; None: as the site or the devices have it."""

    def __post_init__(self) -> None:
        self._refuse_what_slurm_could_misread()
        if problem := whole_number_problem(self.num_nodes, high=self.cluster.num_nodes):
            cluster = f"{self.cluster.name} has {self.cluster.num_nodes} nodes"
            raise AllocationInvalidError(f"{problem} ({cluster})", field="--nodes")
        if self.site.needs_account and self.effective("account") is None:
            raise AllocationInvalidError(
                f"{self.cluster.name} charges every job to an account: name yours",
                field="--account",
            )
        self._refuse_too_long()

    def effective(self, name: str) -> str | None:
        """The value of an option of sbatch that counts in the end; None: it is not given."""
        for option in reversed(self.sbatch_options):
            if option.startswith(f"--{name}="):
                return option.partition("=")[2]
        if name in NAMED_OPTIONS:
            given: str | None = getattr(self, name)
            if given is not None:
                return given
        for option in reversed(self.site.sbatch):
            if option.startswith(f"--{name}="):
                return option.partition("=")[2]
        return None

    def _refuse_what_slurm_could_misread(self) -> None:
        for name in ("job_name", "account", "partition", "qos"):
            value = getattr(self, name)
            if value is not None and not _WORD.fullmatch(value):
                raise AllocationInvalidError(
                    f"{shown(value)} is not a word of letters, digits and ._@+:,-",
                    field=f"--{name.replace('_', '-')}",
                )
        if self.constraint is not None and not OPTION.fullmatch(f"--constraint={self.constraint}"):
            raise AllocationInvalidError(
                f"{shown(self.constraint)} has spaces or quotes", field="--constraint"
            )
        for option in self.sbatch_options:
            name = option.partition("=")[0]
            if name in _GIVEN_OTHERWISE:
                raise AllocationInvalidError(
                    f"{name} is not for here: {_GIVEN_OTHERWISE[name]}", field="--sbatch-option"
                )
            if not OPTION.fullmatch(option):
                raise AllocationInvalidError(
                    f"{shown(option)} is not a long option without spaces or quotes, as --mem=0",
                    field="--sbatch-option",
                )
        if not _LOG.fullmatch(self.log):
            raise AllocationInvalidError(
                f"{shown(self.log)}: a job's log is a path without spaces or quotes", field="--log"
            )
        for line in self.setup:
            if not is_line(line):
                raise AllocationInvalidError(f"{shown(line)} is not one line", field="--setup")
        if self.launcher not in LAUNCHERS:
            raise AllocationInvalidError(
                f"{shown(self.launcher)} is unknown{nearest(self.launcher, LAUNCHERS)}",
                field="--launcher",
            )
        self._refuse_odd_places()

    def _refuse_odd_places(self) -> None:
        try:
            refuse_unless_http(self.url)
            fits = is_line(self.url) and " " not in self.url
            has_password = "@" in urlsplit(self.url).netloc
        except (UrlInvalidError, ValueError):
            fits = has_password = False
        if not fits:
            raise AllocationInvalidError(
                f"{shown(self.url)} is not an address as http://login1.example.org:8080",
                field="--url",
            )
        if has_password:
            raise AllocationInvalidError(
                "an address with a password in it stands in lists of processes, which others can read",
                field="--url",
            )
        for name in ("token_file", "certificate", "python", "archive"):
            path = getattr(self, name)
            if path is not None and not (path.is_absolute() and is_line(str(path))):
                raise AllocationInvalidError(
                    f"{shown(str(path))} is not an absolute path of printable characters",
                    field=name,
                )

    def _refuse_too_long(self) -> None:
        least_s = self.site.drain_s + _LEAST_WORK_S
        if self.time_s < least_s:
            raise AllocationInvalidError(
                f"{slurm_time(self.time_s)} leaves no time to work: the worker stops {self.site.drain_s:g} s "
                f"before the end (the site's drain_s); ask for {slurm_time(least_s)} at least",
                field="--time",
            )
        limits = self.site.max_times(
            partition=self.effective("partition"), qos=self.effective("qos")
        )
        if not limits:
            return
        longest = longest_s(limits, self.num_nodes)
        if longest is None:
            raise AllocationInvalidError(
                f"{self.num_nodes} is more than {max(limits)}, the most nodes of a job here",
                field="--nodes",
            )
        if self.time_s > longest:
            classes = ", ".join(
                f"{slurm_time(seconds)} with up to {nodes}"
                for nodes, seconds in sorted(limits.items())
            )
            raise AllocationInvalidError(
                f"{slurm_time(self.time_s)} is more than {slurm_time(longest)}, the longest job of "
                f"{self.num_nodes} nodes; the site's limits by nodes are {classes}",
                field="--time",
            )


def comment(cluster: str) -> str:
    """The comment by which a job of ours is known again, with its cluster's name as far as Slurm takes it."""
    return f"{MARK}:{re.sub(r'[^A-Za-z0-9._-]', '_', cluster)}"
