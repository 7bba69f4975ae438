"""A found job on the machine and of the model that its user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from layout_tuner.documents.reading import shown, word_of
from layout_tuner.search_spaces.campaigns.campaign_of_job import campaign_name
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import counted, listed
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob, completed
from layout_tuner.trainers.found_jobs.found_job import MODEL, FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.known_models import known_model

SEQ_LENGTH: Final = f"{MODEL}seq_length"

ModelOfLength = Callable[[int | None], ModelShape]
"""Gives the model that a user names; it gets the tokens of a sequence, None where nobody says
them."""


def job_on_cluster(
    found: FoundJob,
    machine: Cluster | None,
    model: ModelOfLength | None,
    num_nodes: int | None,
) -> tuple[CompletedJob, tuple[str, ...]]:
    """The job with all fields, and remarks on what file and user say differently.

    Args:
        found: what the file says, with what the user states.
        machine: where it runs; None: not known, and the file says the devices of a node.
        model: the user's; None: that of the file.
        num_nodes: the user's; None: as the file says.

    Raises:
        SearchSpaceError: a field is missing or open, or file and machine contradict each other.
    """
    per_node = found.value("devices_per_node")
    has = per_node if machine is None else machine.devices_per_node
    one_node = found.value("num_nodes") in (None, 1) and per_node is not None and per_node <= has
    if machine is not None and per_node not in (None, has) and not one_node:
        raise JobFileInvalidError(
            f"{found.file} runs {per_node} ranks on each node, and a node of {machine.name} has "
            f"{counted(has, 'device')}; give the machine with --cluster FILE ({{preset: "
            f"{machine.name}, devices_per_node: {per_node}}}), or state the ranks with --set "
            f"devices_per_node={has}"
        )
    shape, remarks = model_of(found, model)
    found = found if model is None else _without_model(found)
    job = completed(found, model=shape, num_nodes=num_nodes, devices_per_node=per_node or has)
    if shape is None and found.value(f"{MODEL}name") is None:  # no file of a trainer names it
        job = replace(job, model=replace(job.model, name=campaign_name(found.file)))
    return job, remarks


def model_of(
    found: FoundJob, model: ModelOfLength | None
) -> tuple[ModelShape | None, tuple[str, ...]]:
    """The shape that the user or the file names, and remarks; None: the file states its own."""
    if model is not None:
        shape = _of_length(model, found)
        return shape, tuple(_differences(found, shape))
    if (known := _known(found)) is None:
        return None, ()
    length = found.value(SEQ_LENGTH)
    said = f"{found.file} names the model {found.model_name}: its published shape counts"
    return replace(known, seq_length=length), (said,)


def _known(found: FoundJob) -> ModelShape | None:
    """The published shape that the file names without stating one; None: it states its own."""
    states = any(each.startswith(MODEL) and each != SEQ_LENGTH for each in found.open_fields)
    if states or not found.model_name or found.value(f"{MODEL}num_layers") is not None:
        return None
    known = known_model(found.model_name)
    if known is not None and found.value(SEQ_LENGTH) is None:
        raise JobFileInvalidError(
            f"{found.file} does not say the length of its sequences; state it with --seq-length"
        )
    return known


def _of_length(model: ModelOfLength, found: FoundJob) -> ModelShape:
    """The user's model, with the sequence length of the job."""
    if (is_open := found.open_fields.get(SEQ_LENGTH)) is not None:
        raise JobFileInvalidError(
            f"{found.file} does not say the length of its sequences ({is_open.said}: {is_open.why}); "
            "state it with --seq-length"
        )
    length = found.value(SEQ_LENGTH)
    shape = model(length)
    return shape if length in (None, shape.seq_length) else replace(shape, seq_length=length)


def _without_model(found: FoundJob) -> FoundJob:
    """The job without the fields of a model that is not the planned one."""

    def is_kept(name: str) -> bool:
        return not name.startswith(MODEL) or name == SEQ_LENGTH

    return replace(
        found,
        read=tuple(each for each in found.read if is_kept(each.field)),
        assumed=tuple(each for each in found.assumed if is_kept(each.field)),
        not_understood=tuple(each for each in found.not_understood if is_kept(each.field)),
    )


def _differences(found: FoundJob, model: ModelShape) -> Iterable[str]:
    """A remark on the fields of the model that the file states otherwise."""
    of_model = model.to_mapping()
    other = [
        f"{name}={word_of(value)}"
        for name, value in found.values.items()
        if name.startswith(MODEL)
        and (known := name.removeprefix(MODEL)) in of_model
        and of_model[known] != value
        and known != "name"
    ]
    if other:
        yield (
            f"the model {shown(model.name)} counts, and {found.file} says {listed(other, 5)}: is it "
            "the model of this job?"
        )
