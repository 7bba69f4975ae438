"""A found job as a layout of a model: what the file leaves open is derived, or asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from layout_tuner.documents.reading import whole_number_problem
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import (
    BATCH_FIELDS,
    JOB,
    MODEL,
    FoundJob,
    JobFileInvalidError,
)
from layout_tuner.trainers.found_jobs.knob_settings import settings_in_effect
from layout_tuner.trainers.registry import ADAPTERS

_DEGREES_BESIDE_DP: Final = ("tp", "tp_columns", "cp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletedJob:
    """A found job with a whole model and a whole layout."""

    found: FoundJob
    model: ModelShape
    layout: Layout

    @property
    def stated_layout(self) -> dict[str, Any]:
        """The knobs of the layout as a campaign's baseline, without those at their defaults."""
        return self.layout.to_mapping()


def completed(
    found: FoundJob,
    *,
    model: ModelShape | None = None,
    num_nodes: int | None = None,
    devices_per_node: int | None = None,
) -> CompletedJob:
    """The job with all of its fields.

    `dp` and `num_microbatches` follow from the devices and the global batch.

    Args:
        found: what the file says, with what the user states.
        model: its shape where the file does not state it; None: the file's own.
        num_nodes: nodes that the job runs on; None: as the file says.
        devices_per_node: devices of each; None: as the file says.

    Raises:
        JobFileInvalidError: a field is missing or open, or values contradict each other; the
            message names all such fields, and how each is stated.
    """
    values = found.values
    if model is None:
        _refuse_no_model(found)
    open_fields = {
        name: each for name, each in found.open_fields.items() if not _is_moot(name, values, model)
    }
    if open_fields:
        said = listed(
            [f"{name} ({each.said}: {each.why})" for name, each in open_fields.items()], 5
        )
        raise JobFileInvalidError(
            f"{found.file}: not understood: {said}; state each with --set FIELD=VALUE"
            + (", or the model with --model" if any(map(_is_of_model, open_fields)) else "")
        )
    shape = model or _model(found)
    layout = _layout(found, values, num_nodes, devices_per_node)
    knobs = ADAPTERS[found.trainer].knobs if found.trainer in ADAPTERS else ()
    job = settings_in_effect(layout.job, knobs, layout, shape)
    return CompletedJob(found=found, model=shape, layout=replace(layout, job=job))


ONLY_WITH: Final = {
    "vpp": "pp",
    "pipeline_split": "pp",
    "pipeline_layout": "pp",
    "sequence_parallel": "tp",
    "cp_comm_type": "cp",
}
"""Fields without effect where another one is 1."""


def _is_moot(name: str, values: Mapping[str, Any], model: ModelShape | None) -> bool:
    """Whether an open field does not matter: the model is given, or has nothing that it is of."""
    if name in ("ep", "etp") and not (model is None and f"{MODEL}num_layers" not in values):
        return not (values.get(f"{MODEL}num_experts") if model is None else model.num_experts)
    if _is_of_model(name):
        return model is not None
    return name in ONLY_WITH and values.get(ONLY_WITH[name]) == 1


def _is_of_model(name: str) -> bool:
    return name.startswith(MODEL)


def _refuse_no_model(found: FoundJob) -> None:
    if sum(map(_is_of_model, found.values)) < 2:
        raise JobFileInvalidError(
            f"{found.file} does not state the shape of the model; give its config.json, a file or a "
            "preset with --model"
        )


def _model(found: FoundJob) -> ModelShape:
    fields = {
        name.removeprefix(MODEL): value
        for name, value in found.values.items()
        if _is_of_model(name)
    }
    try:
        return ModelShape.from_mapping(fields)
    except SearchSpaceError as error:
        raise JobFileInvalidError(f"the model of {found.file}: {error}") from error


def _layout(
    found: FoundJob,
    values: Mapping[str, Any],
    num_nodes: int | None,
    devices_per_node: int | None,
) -> Layout:
    knobs = {name: values[name] for name in LAYOUT_FIELDS if values.get(name) is not None}
    problems = {name: KNOBS[name].problem(each) for name, each in knobs.items()} | {
        name: whole_number_problem(values[name]) for name in BATCH_FIELDS if name in values
    }
    for name, problem in problems.items():
        if problem:
            raise JobFileInvalidError(f"the layout of {found.file}: {name}={problem}")
    beside_dp = prod(knobs.get(name, 1) for name in _DEGREES_BESIDE_DP)
    nodes = num_nodes or knobs.get("num_nodes")
    per_node = devices_per_node or values.get("devices_per_node")
    devices = values.get("num_devices")
    if num_nodes or devices is None:
        devices = nodes * per_node if nodes and per_node else None
    if devices is None and knobs.get("dp"):
        devices = beside_dp * knobs["dp"]
    if devices is None:
        missing = "nodes" if not nodes else "devices of a node"
        raise JobFileInvalidError(
            f"{found.file} does not say on how many {missing} the job runs; state it with "
            f"{'--nodes' if not nodes else '--set devices_per_node=N'}"
        )
    if devices % beside_dp:
        raise JobFileInvalidError(
            f"tp*cp*pp={beside_dp} does not divide the {devices} devices of the job; state other "
            "nodes with --nodes"
        )
    dp = devices // beside_dp
    if knobs.get("dp") not in (None, dp):
        raise JobFileInvalidError(
            f"{found.file} says dp={knobs['dp']}, and {devices} devices over tp*cp*pp={beside_dp} "
            f"are dp={dp}; state the nodes with --nodes"
        )
    knobs["dp"] = dp
    if "zero_replicas" not in knobs and (group := values.get("zero_group_size")):
        knobs["zero_replicas"] = _zero_replicas(found, dp * knobs.get("cp", 1), group)
    _leave_out_zero(knobs)
    knobs["num_nodes"] = nodes or (-(-devices // per_node) if per_node else 1)
    knobs["micro_batch_size"] = _micro_batch_size(found, values, dp)
    knobs["num_microbatches"] = _num_microbatches(found, {**values, **knobs}, dp)
    settings = {
        name.removeprefix(JOB): value for name, value in values.items() if name.startswith(JOB)
    }
    try:
        return Layout(**knobs, job=JobSettings(settings))
    except SearchSpaceError as error:
        raise JobFileInvalidError(f"the layout of {found.file}: {error}") from error


def _zero_replicas(found: FoundJob, ranks: int, group: int) -> int:
    if ranks > group and ranks % group:
        raise JobFileInvalidError(
            f"{found.file}: zero_group_size={group} does not divide dp*cp={ranks}; state other nodes "
            "with --nodes"
        )
    return max(ranks // group, 1)


def _micro_batch_size(found: FoundJob, values: Mapping[str, Any], dp: int) -> int:
    """Stated, or what the other two of the batch leave: DeepSpeed has any two of the three."""
    if size := values.get("micro_batch_size"):
        return int(size)
    batch, number = values.get("global_batch_size"), values.get("num_microbatches")
    if batch is None or number is None:
        raise JobFileInvalidError(
            f"{found.file} does not say the micro-batch of a device; state it with "
            "--set micro_batch_size=N"
        )
    if batch % (dp * number):
        raise JobFileInvalidError(
            f"global_batch_size={batch} is not divisible by dp*num_microbatches={dp * number}; "
            "state other nodes with --nodes"
        )
    return int(batch // (dp * number))


def _leave_out_zero(knobs: dict[str, Any]) -> None:
    """ZeRO over one rank shards nothing, and is no value of its own here."""
    num_ranks = knobs["dp"] * knobs.get("cp", 1)
    if knobs.get("ep", 1) == 1 and knobs.get("zero_replicas", 1) == num_ranks:
        knobs.update(zero_stage=0, zero_replicas=1)


def _num_microbatches(found: FoundJob, values: Mapping[str, Any], dp: int) -> int:
    at_once = dp * values["micro_batch_size"]
    batch, stated = values.get("global_batch_size"), values.get("num_microbatches")
    if batch is None:
        if stated is None:
            raise JobFileInvalidError(
                f"{found.file} does not say the batch; state it with --set global_batch_size=N"
            )
        return int(stated)
    if batch % at_once:
        raise JobFileInvalidError(
            f"global_batch_size={batch} is not divisible by dp*micro_batch_size={at_once}; state "
            "other nodes with --nodes"
        )
    found_number: int = batch // at_once
    if stated not in (None, found_number):
        raise JobFileInvalidError(
            f"num_microbatches={stated} of {dp} replicas is not global_batch_size={batch}; state one "
            "of them with --set"
        )
    return found_number
