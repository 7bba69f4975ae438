"""A filter of trials for pages that are asked for often, and mostly without one.

FastAPI looks for each of a route's parameters in every request: for the 35 of a filter that takes longer
than to read the page. Here they are looked at where the query has one of them.
"""

from __future__ import annotations

from inspect import signature
from typing import Annotated, Any, Final, get_args, get_origin

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError, create_model

from api.filters import read_trial_filter
from results_db.standing import EVERY_TRIAL
from results_db.trial_filter import TrialFilter

_ANNOTATIONS: Final[dict[str, Any]] = {
    name: parameter.annotation
    for name, parameter in signature(read_trial_filter).parameters.items()
}

FILTER_NAMES: Final = frozenset(_ANNOTATIONS)
"""Names of a filter's parameters in a URL."""

_FIELDS: Final[dict[str, Any]] = {name: (each, None) for name, each in _ANNOTATIONS.items()}

_Query: Final[type[BaseModel]] = create_model("_Query", **_FIELDS)


async def stated_filter(request: Request) -> TrialFilter:
    """The filter that a request's query states.

    Raises:
        RequestValidationError: a value is none that its parameter can have.
        TrialFilterInvalidError: its bounds leave nothing between them.
    """
    stated = request.query_params.keys() & FILTER_NAMES
    if not stated:
        return EVERY_TRIAL
    values = {name: _value(request, name) for name in stated}
    try:
        query = _Query.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(
            [{**each, "loc": ("query", *each["loc"])} for each in error.errors()]
        ) from error
    return read_trial_filter(**query.model_dump())


def _value(request: Request, name: str) -> str | list[str]:
    several = request.query_params.getlist(name)
    return several if _is_list(_ANNOTATIONS[name]) else several[-1]


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(each) for each in get_args(annotation))


StatedFilterDep = Annotated[TrialFilter, Depends(stated_filter)]


def describe_filters(document: dict[str, Any], path: str, like: str) -> None:
    """Puts the filter's parameters into the OpenAPI document of a route that states a filter.

    Args:
        document: the OpenAPI document.
        path: of the route.
        like: path of a route whose parameters FastAPI has described, the filter's among them.
    """
    described = document["paths"][like]["get"]["parameters"]
    document["paths"][path]["get"]["parameters"] += [
        parameter for parameter in described if parameter["name"] in FILTER_NAMES
    ]
