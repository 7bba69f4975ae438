"""Query parameters of routes: filters of trials, training jobs, and refusals of unknown names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, Literal, get_args

from annotated_types import GroupedMetadata
from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BeforeValidator, StringConstraints, WithJsonSchema
from starlette.datastructures import QueryParams

from layout_tuner.api.errors import QueryUnknownError
from layout_tuner.documents.reading import MAX_COUNT, nearest, shown
from layout_tuner.errors import TrainingJobInvalidError
from layout_tuner.predictions.statistics.job_duration import JOB_OPTIONS, TrainingJob
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.trials.filter import (
    BOUND_FIELDS,
    CHOICES,
    LISTED_FIELDS,
    MAX_BOUND,
    MAX_KNOB,
    MAX_VALUES,
    SINGULAR,
    TEXTS,
    TrialFilter,
    is_job_key,
    job_field,
    job_knob_name,
)
from layout_tuner.search_spaces.layouts.layout import DEGREES, KNOBS

_FIELD_OF: Final = {SINGULAR.get(name, name): name for name in (*LISTED_FIELDS, *BOUND_FIELDS)}
"""By query parameter, the field of the filter."""

FILTER_NAMES: Final = frozenset(_FIELD_OF)
"""The query parameters of a filter."""

_DESCRIPTIONS: Final = {
    "numbers": "Only the trials with these numbers in their campaign.",
    "states": "Only these states.",
    "reasons": "Only trials that do not count for these reasons: crashed, timeout, ...",
    "nodes": "Only trials whose problem occurred first on these nodes.",
    "num_devices": f"Only layouts on this number of devices: {' * '.join(DEGREES)}.",
    "global_batch_size": "Only these batch sizes: dp * micro_batch_size * num_microbatches.",
}


def _annotations() -> Iterator[tuple[str, Any]]:
    for name in LISTED_FIELDS:
        description = _DESCRIPTIONS.get(name, "Only layouts with these values.")
        query = Query(description=description, max_length=MAX_VALUES)
        yield SINGULAR.get(name, name), Annotated[list[_type_of(name)] | None, query]  # type: ignore[misc]
    for metric in METRICS.values():
        kind: type = int if metric.is_whole else float
        for end, words in (("min", "at least"), ("max", "at most")):
            query = Query(
                ge=-MAX_BOUND,
                le=MAX_BOUND,
                allow_inf_nan=False if kind is float else None,
                description=f"Only trials with a measured {metric.name} of {words} this value.",
            )
            yield f"{end}_{metric.name}", Annotated[kind | None, query]


def _type_of(name: str) -> Any:
    if name in CHOICES:
        kind = bool if CHOICES[name] == (False, True) else Literal[CHOICES[name]]
        if name in KNOBS and (parse := KNOBS[name].parse):
            # A plus that a URL does not escape is a space.
            words = BeforeValidator(lambda value: parse(value.replace(" ", "+")))
            return Annotated[kind, words]
        return kind
    if name in TEXTS:
        # No name contains control characters, and PostgreSQL cannot store NUL.
        pattern = r"^[^\x00-\x1f\x7f]+$"
        return Annotated[str, StringConstraints(max_length=TEXTS[name], pattern=pattern)]
    return Annotated[int, Query(ge=0, le=MAX_KNOB)]


def read_trial_filter(request: Request | None = None, **query: Any) -> TrialFilter:
    """The filter of a query.

    Job knobs are read from its other parameters: `job.NAME`, `min_job.NAME` and `max_job.NAME`.

    Raises:
        TrialFilterInvalidError: a lower bound is above its upper one, or a value of a job knob is
            none that a job can have.
    """
    stated: dict[str, Any] = {
        _FIELD_OF[name]: tuple(value) if isinstance(value, list) else value
        for name, value in query.items()
        if value is not None
    }
    texts = QueryParams() if request is None else request.query_params
    for name in filter(job_knob_name, texts):
        stated[name] = job_field(name, texts.getlist(name))
    return TrialFilter(**stated)


# FastAPI reads the parameters of a dependency from its signature: one for each field of the filter.
# So each field is described once, and the OpenAPI document lists them all.
read_trial_filter.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("request", Parameter.POSITIONAL_OR_KEYWORD, annotation=Request),
        *(
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in _annotations()
        ),
    ]
)


@dataclass(frozen=True)
class SortKeyOf(GroupedMetadata):
    """Makes a text of a query a sort key: one of some keys, or that of a job knob."""

    keys: tuple[str, ...]

    def __iter__(self) -> Iterator[Any]:
        choices = [{"enum": list(self.keys)}, {"pattern": r"^job\.[a-z][a-z0-9_]{0,40}$"}]
        yield AfterValidator(self._checked)
        yield WithJsonSchema({"type": "string", "anyOf": choices})

    def _checked(self, value: str) -> str:
        if value in self.keys or is_job_key(value):
            return value
        raise ValueError(f"{shown(value)} is no sort key{nearest(value, self.keys)}")


TrialFilterDep = Annotated[TrialFilter, Depends(read_trial_filter)]


async def refuse_unknown_query(request: Request) -> None:
    """Refuses parameters that the route does not have: a misspelt filter must not list every trial.

    It is a coroutine because FastAPI would call a function in a thread.

    Raises:
        QueryUnknownError: a parameter is unknown; the message lists those of the route.
    """
    _refuse_unknown(request, frozenset())


async def refuse_unknown_query_of_page(request: Request) -> None:
    """The same for a page, which may also have `done`: the code of what the last form did.

    Templates have a sentence for each code that they know, and ignore others.
    """
    _refuse_unknown(request, _OF_EVERY_PAGE)


def _refuse_unknown(request: Request, also: frozenset[str]) -> None:
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    for field in route.dependant.path_params:
        _refuse_lax_number(
            "path", field.alias, request.path_params[field.alias], field.field_info.annotation
        )
    known = dict(_parameters_of(route.dependant)) if request.query_params else {}
    for name, value in request.query_params.multi_items():
        if name in known:
            _refuse_lax_number("query", name, value, known[name])
        elif name not in also and not (job_knob_name(name) and known.keys() >= FILTER_NAMES):
            hint = nearest(name, sorted(known)) if known else "; there is none here"
            raise QueryUnknownError(f"the query parameter {shown(name)} is unknown{hint}")


def _refuse_lax_number(where: str, name: str, value: str, kind: Any) -> None:
    """Refuses a number with underscores or spaces, which pydantic would drop."""
    if ("_" in value or value != value.strip()) and _has_number(kind):
        message = f"{shown(value)} is not a number in plain digits"
        raise RequestValidationError([{"loc": (where, name), "msg": message, "type": "number"}])


def _has_number(kind: Any) -> bool:
    return kind in (int, float) or any(_has_number(each) for each in get_args(kind))


_OF_EVERY_PAGE: Final = frozenset({"done"})


def _parameters_of(dependant: Dependant) -> Iterator[tuple[str, Any]]:
    yield from ((field.alias, field.field_info.annotation) for field in dependant.query_params)
    for below in dependant.dependencies:
        yield from _parameters_of(below)


_TEXTS: Final = {name: text for name, (_, text) in JOB_OPTIONS.items()}
_MOST: Final = 1e12


def _number(name: str) -> object:
    return Query(ge=0, le=_MOST, allow_inf_nan=False, description=_TEXTS[name])


def read_job(
    tokens: Annotated[str | None, Query(max_length=32, description=_TEXTS["tokens"])] = None,
    nodes: Annotated[int | None, Query(ge=1, le=MAX_COUNT, description=_TEXTS["nodes"])] = None,
    mtbf_hours: Annotated[float | None, _number("mtbf_hours")] = None,
    checkpoint_s: Annotated[float | None, _number("checkpoint_s")] = None,
    restart_s: Annotated[float | None, _number("restart_s")] = None,
) -> TrainingJob | None:
    """The training job of a request; None where it describes none.

    Raises:
        RequestValidationError: a parameter is out of range, or is given without tokens.
    """
    try:
        return TrainingJob.read(
            tokens=tokens,
            nodes=nodes,
            mtbf_hours=mtbf_hours,
            checkpoint_s=checkpoint_s,
            restart_s=restart_s,
        )
    except TrainingJobInvalidError as error:
        raise RequestValidationError(
            [
                {"type": "value_error", "loc": ("query", part.field), "msg": part.problem}
                for part in error.parts
            ]
        ) from error


JobDep = Annotated[TrainingJob | None, Depends(read_job)]
