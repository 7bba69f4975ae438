"""The batch script of an allocation: variables of the request and of the site, then a fixed body.

Values of users and sites are quoted for the shell. Lines `#SBATCH` have no quotes; the request has
checked the characters of their values.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

from layout_tuner.documents.duration import slurm_time
from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.workers.slurm.request import NAMED_OPTIONS, AllocationRequest, comment, plain_name

_EARLY_S: Final = 60.0
_LEAST_S: Final = 30.0
"""Time of the script after the signal, to end its steps and to remove its directories."""
_ESCAPED: Final = re.compile(r'[\\"`]|\$(?![A-Za-z_]|\{[A-Za-z_][A-Za-z0-9_]*\})')


def render(request: AllocationRequest) -> str:
    """The script, for sbatch."""
    body = resources.files(__package__).joinpath("batch_body.sh").read_text()
    sections = (
        ["#!/bin/bash", *(f"#SBATCH {option}" for option in sbatch_options(request))],
        [
            "# Of the shell that this was submitted from, and not for jobs.",
            f"unset {' '.join(sorted(PRIVATE_VARIABLES))}",
        ],
        ["# An allocation of layout-tuner: what was asked for.", *_asked_for(request)],
        ["# What the site needs.", *_site(request)],
        [body],
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def sbatch_options(request: AllocationRequest) -> list[str]:
    """Options of the job, in order: Slurm uses the later of two options of the same name."""
    site = request.site
    options = [
        f"--job-name={request.job_name}",
        f"--comment={comment(request.cluster.name)}",
        f"--nodes={request.num_nodes}",
        f"--time={slurm_time(request.time_s)}",
        f"--output={request.log}",
        "--exclusive",
        "--no-requeue",
        "--no-kill",  # the worker handles lost nodes
        f"--signal=B:TERM@{_signal_s(site)}",
        *site.devices_options(request.cluster),
        *site.sbatch,
    ]
    given = {name: getattr(request, name) for name in NAMED_OPTIONS}
    named = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*options, *named, *request.sbatch_options]


def _signal_s(site: Site) -> int:
    """Seconds before the end at which Slurm signals the script.

    Slurm may be a minute early. The worker stops before the end by itself; the signal is for a
    worker that has not stopped, and must not come before that.
    """
    return int(max(site.drain_s - _EARLY_S, min(site.drain_s, _LEAST_S)))


def expandable(text: str) -> str:
    """Text in double quotes in which only `$NAME` and `${NAME}` are special."""
    return '"' + _ESCAPED.sub(lambda found: "\\" + found[0], text) + '"'


def _asked_for(request: AllocationRequest) -> Iterator[str]:
    described = request.described
    document = "" if isinstance(described, str) else json.dumps(described)
    values = {
        "cluster": described if isinstance(described, str) else "",
        "cluster_document": document,
        "launcher": request.launcher,
        "url": request.url,
        "token_file": str(request.token_file),
        "worker_name": plain_name(request.cluster.name),
        "archive": str(request.archive or ""),
        "python": str(request.python),
        "node_address": request.site.node_address,
        "cores_per_node": str(request.site.cores_per_node or ""),
    }
    for name, value in values.items():
        yield f"{name}={shlex.quote(value)}"
    yield f"node_local_dir={expandable(request.site.node_local_dir)}"
    yield f"step_options={_array([*request.site.devices_options(request.cluster), *request.site.srun])}"
    yield f"worker_options={_array(_worker_options(request))}"
    yield f"worker_environment={_array(_worker_environment(request))}"


def _worker_options(request: AllocationRequest) -> Iterator[str]:
    if request.certificate is not None:
        yield f"--certificate={request.certificate}"
    if request.end_when_idle_s is not None:
        yield f"--end-when-idle={request.end_when_idle_s:g}"
    if request.trainers_file is not None:
        yield f"--trainers={request.trainers_file}"
    if request.share_nodes is not None:
        yield "--share-nodes" if request.share_nodes else "--no-share-nodes"


def _worker_environment(request: AllocationRequest) -> Iterator[str]:
    """Arguments of env. The user's proxies are those of the login node, so they are unset."""
    for name in ("all_proxy", "http_proxy", "https_proxy", "no_proxy"):
        yield from ("-u", name, "-u", name.upper())
    if request.site.proxied(request.url):
        yield from (f"{name}={request.site.http_proxy}" for name in ("http_proxy", "https_proxy"))


def _site(request: AllocationRequest) -> Iterator[str]:
    site = request.site
    yield "site_environment() {"
    for module in site.modules:
        yield f"  module load {shlex.quote(module)} || give_up {shlex.quote(f'there is no module {module}')}"
    yield from site.setup  # unchanged
    for name, value in site.environment.items():
        yield f"  export {name}={expandable(value)}"
    if site.environment_of_several_nodes:
        yield '  if [ "${#node_names[@]}" -gt 1 ]; then'
        for name, value in site.environment_of_several_nodes.items():
            yield f"    export {name}={expandable(value)}"
        yield "  fi"
    yield from request.setup
    yield "  return 0"
    yield "}"


def _array(words: Sequence[str] | Iterator[str]) -> str:
    return f"({' '.join(map(shlex.quote, words))})"
