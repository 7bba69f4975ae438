"""Filters of trials in a URL, as routes are given them."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Query
from pydantic import StringConstraints

from api.filter_query import SINGULAR
from results_db.trial_filter import (
    CHOICES,
    LISTED_FIELDS,
    MAX_BOUND,
    MAX_KNOB,
    MAX_VALUES,
    METRICS,
    TEXTS,
    TrialFilter,
)

_DESCRIPTIONS: Final = {
    "numbers": "Only the trials of these numbers in their campaign.",
    "states": "Only these states.",
    "reasons": "Only those that do not count for these reasons: crashed, timeout, ...",
    "nodes": "Only those that went wrong first on these nodes.",
    "num_devices": "Only layouts on so many devices: tp * pp * dp.",
    "global_batch_size": "Only these batches: dp * micro_batch_size * num_microbatches.",
}


def read_trial_filter(**query: Any) -> TrialFilter:
    """The filter that a request's query states.

    Raises:
        TrialFilterInvalidError: its bounds leave nothing between them.
    """
    plural = {singular: name for name, singular in SINGULAR.items()}
    stated: dict[str, Any] = {
        plural.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in query.items()
        if value is not None
    }
    return TrialFilter(**stated)


def _parameters() -> Iterator[Parameter]:
    for name in LISTED_FIELDS:
        description = _DESCRIPTIONS.get(name, "Only layouts with these values.")
        query = Query(description=description, max_length=MAX_VALUES)
        yield _parameter(SINGULAR.get(name, name), list[_type_of(name)] | None, query)  # type: ignore[misc]
    for metric in METRICS:
        kind: type = int if metric.endswith("_bytes") else float
        for end, words in (("min", "at least"), ("max", "at most")):
            query = Query(
                ge=-MAX_BOUND,
                le=MAX_BOUND,
                allow_inf_nan=False if kind is float else None,
                description=f"Only trials that measured {words} this {metric}.",
            )
            yield _parameter(f"{end}_{metric}", kind | None, query)


def _parameter(name: str, kind: Any, query: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, query])


def _type_of(name: str) -> Any:
    if name in CHOICES and name != "sequence_parallel":
        return Literal[CHOICES[name]]
    if name in CHOICES:
        return bool
    if name in TEXTS:
        # Control characters are in no name, and one database takes no NUL.
        pattern = r"^[^\x00-\x1f\x7f]+$"
        return Annotated[str, StringConstraints(max_length=TEXTS[name], pattern=pattern)]
    return Annotated[int, Query(ge=0, le=MAX_KNOB)]


# FastAPI reads a dependency's parameters from its signature: one parameter a field of the filter, so that
# a field is described once, and the OpenAPI document lists them all.
read_trial_filter.__signature__ = Signature(list(_parameters()))  # type: ignore[attr-defined]

TrialFilterDep = Annotated[TrialFilter, Depends(read_trial_filter)]
