"""A layout from the knobs that a user states; all others have their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.documents.reading import refuse_unknown, whole_number_problem
from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout

STATED_FIELDS: Final = (*LAYOUT_FIELDS, "global_batch_size", "job")


def stated_layout(stated: Mapping[str, Any], *, precision: str, num_nodes: int = 1) -> Layout:
    """The layout of some knobs, of which those that are None or missing have their defaults.

    `global_batch_size` may stand in place of `num_microbatches`, and `job` has the job's settings.
    `precision` and `num_nodes` hold where the knobs have none.

    Raises:
        LayoutInvalidError: a knob is unknown or out of range, or the batch is missing or
            contradicts itself.
    """
    refuse_unknown(stated, STATED_FIELDS, LayoutInvalidError, "knob")
    given = {name: value for name, value in stated.items() if value is not None}
    batch = given.pop("global_batch_size", None)
    given["job"] = JobSettings.read(given.get("job", {}))
    knobs = {"num_nodes": num_nodes, "precision": precision, **given}
    return Layout(**{**knobs, "num_microbatches": _num_microbatches(knobs, batch)})


def _num_microbatches(knobs: Mapping[str, Any], batch: int | None) -> int:
    """Micro-batches a step, as given or as they follow from the global batch."""
    given: int | None = knobs.get("num_microbatches")
    if batch is None:
        if given is None:
            raise LayoutInvalidError(
                "the batch is missing: give num_microbatches or global_batch_size (the step time "
                "and the pipeline's bubble depend on it)"
            )
        return given
    dp, at_a_time = knobs.get("dp", 1), knobs.get("micro_batch_size", 1)
    parts = {"global_batch_size": batch, "dp": dp, "micro_batch_size": at_a_time}
    for name, value in parts.items():
        if problem := whole_number_problem(value):
            raise LayoutInvalidError(f"{name}={problem}")
    at_once: int = dp * at_a_time
    product = f"dp*micro_batch_size={dp}*{at_a_time}={at_once}"
    if batch % at_once:
        below = batch // at_once * at_once
        nearest = f"{below} or {below + at_once}" if below else str(at_once)
        raise LayoutInvalidError(
            f"global_batch_size={batch} is not divisible by {product}; the nearest that is: {nearest}"
        )
    if given is not None and given != batch // at_once:
        raise LayoutInvalidError(
            f"num_microbatches={given} makes a global batch of {given * at_once} ({product} times "
            f"{given}), not of global_batch_size={batch}; leave one of the two out"
        )
    return batch // at_once
