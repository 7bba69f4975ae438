"""The campaign of a job that was found in a file: its layout is the baseline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, Final

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import (
    CP_COMM_TYPES,
    LAYOUT_FIELDS,
    ZERO_STAGES,
    Layout,
)
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES
from layout_tuner.search_spaces.spaces.search_space import DERIVABLE
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob
from layout_tuner.trainers.megatron_lm import CONNECTIONS, MEGATRON_LM, SHARDING_STRATEGIES
from layout_tuner.trainers.registry import ADAPTERS

DEFAULT_TRIALS: Final = 16
"""Budget of the campaign, for its owner to change."""
DEADLINE: Final = "30m"
"""Deadline of a probe: large jobs take minutes to start."""
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


def campaign_of_job(job: CompletedJob, cluster: Any) -> dict[str, Any]:
    """The document of a campaign with the job as its baseline.

    The space has every sensible layout on the job's nodes with its global batch and precision, but
    for values of knobs that its trainer lacks, and keeps the job's settings as they are.

    Args:
        job: the job.
        cluster: its description, as in a campaign's file.
    """
    layout = job.layout
    space: dict[str, Any] = {
        "global_batch_size": layout.global_batch_size,
        "num_nodes": layout.num_nodes,
        "precision": layout.precision,
    }
    if layout.tp * layout.tp_columns > -(-layout.num_devices // layout.num_nodes):
        space["allow_tp_across_nodes"] = True
    space |= _possible(job)
    if layout.job:
        space["job"] = {knob: [value] for knob, value in layout.job.items()}
    return {
        "name": campaign_name(job.found.file),
        "model": job.model.to_mapping(),
        "cluster": cluster,
        "space": space,
        # Every knob: what is left out would be that of the space where it leaves no choice.
        "baseline": layout.to_mapping(every_knob=True),
        "budget": {"trials": DEFAULT_TRIALS},
        "probe": {"trainer": job.found.trainer, "deadline": DEADLINE},
    }


def campaign_on_machine(
    job: CompletedJob, cluster: Any, machine: Cluster | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The campaign of a job on the devices that it uses, and remarks on them.

    The machine of a job on a part of each node has no other devices. The space has the values of
    the baseline that a default space lacks.

    Args:
        job: the job.
        cluster: its description, as in a campaign's file.
        machine: the same, read; None: it is not named yet.
    """
    remarks: tuple[str, ...] = ()
    if machine is not None and (part := _part_of_node(job, machine)) is not None:
        remarks = (
            f"the job uses {part.devices_per_node} of the {machine.devices_per_node} devices of a node of "
            f"{machine.name}: it is planned on {part.name}, which has no others; give the worker "
            "that cluster",
        )
        cluster, machine = part.to_mapping(), part
    document = campaign_of_job(job, cluster)
    if machine is not None:
        # A document that cannot be read stays as it is: whoever plans or submits it is refused.
        with suppress(SearchSpaceError):
            _add_baseline(document["space"], {**document, "cluster": machine.to_mapping()})
    return document, remarks


def _part_of_node(job: CompletedJob, machine: Cluster) -> Cluster | None:
    """The machine with as many devices of a node as the job uses; None: it uses whole nodes."""
    per_node, rest = divmod(job.layout.num_devices, job.layout.num_nodes)
    if rest or per_node >= machine.devices_per_node:
        return None
    return replace(machine.with_devices_per_node(per_node), name=f"{machine.name}-{per_node}")


def _add_baseline(space: dict[str, Any], document: Mapping[str, Any]) -> None:
    """Adds to a campaign's space the values of its baseline that it lacks."""
    spec = CampaignSpec.from_document(document)
    for knob in LAYOUT_FIELDS if spec.baseline is not None else ():
        choices, value = spec.space.values(knob), getattr(spec.baseline, knob)
        if knob not in DERIVABLE and value not in choices:
            space[knob] = [*choices, value]


_CHOICES: Final[Mapping[str, Sequence[Any]]] = {
    "vpp": (1, 2, 4),
    "cp": (1, 2),
    "cp_comm_type": CP_COMM_TYPES,
    "zero_stage": ZERO_STAGES,
    "recompute": RECOMPUTE_MODES,
    "sequence_parallel": (False, True),
}
"""Knobs of which trainers lack values, with the choices of a default space; cp has more there."""
_DEGREES: Final = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Degrees of tp and pp with which a trainer is asked: it may lack a value beside some alone."""


def _possible(job: CompletedJob) -> dict[str, list[Any]]:
    """The choices of knobs of which the job's trainer lacks some in every layout.

    Those of the job itself stay. The choices of other knobs are left to the default space.
    """
    adapter = ADAPTERS[job.found.trainer]
    has = {knob: {getattr(job.layout, knob)} for knob in _CHOICES}
    pinned = (
        job.found.command is not None
        and adapter.name == MEGATRON_LM.name
        and (job.found.command.environment.get(CONNECTIONS) == "1")
    )
    for layout in _layouts(job.layout):
        lacking = adapter.all_lacking(TrainerJob(model=job.model, layout=layout))
        # Megatron-FSDP refuses the one connection that the command has.
        if not lacking.keys() & has.keys() and not (
            pinned and layout.zero_stage in SHARDING_STRATEGIES
        ):
            for knob in has:
                has[knob].add(getattr(layout, knob))
    return {
        knob: [each for each in choices if each in has[knob]]
        for knob, choices in _CHOICES.items()
        if not has[knob].issuperset(choices)
    }


def _layouts(of: Layout) -> Iterator[Layout]:
    """Layouts with all choices; those of a pipeline alone where stages are interleaved."""
    for (tp, pp), *values in product(_DEGREES, *_CHOICES.values()):
        knobs = dict(zip(_CHOICES, values, strict=True))
        if (
            (pp > 1 or knobs["vpp"] == 1)
            and (tp > 1 or not knobs["sequence_parallel"])
            and (knobs["cp"] > 1 or knobs["cp_comm_type"] == CP_COMM_TYPES[0])
        ):
            yield Layout(tp=tp, pp=pp, dp=4, num_microbatches=8, precision=of.precision, **knobs)


def campaign_name(file: str) -> str:
    """A name for the campaign of a file: its own without the ending, in a campaign's letters."""
    stem = file.rpartition(".")[0] or file
    found = _NOT_IN_NAMES.sub("-", stem).strip("._-")[:64]
    return f"job-{found}" if not found or found.isdigit() else found
