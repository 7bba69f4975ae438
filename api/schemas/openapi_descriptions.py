"""Adds the strings under the fields of documents to the OpenAPI document, when it is requested.

pydantic would read the source of every class at the start of the service, which takes a tenth of
the start, and most processes never serve their OpenAPI document.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

from layout_tuner.api.schemas.campaigns_and_trials import Document
from layout_tuner.predictions.belief import job, plan
from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.predictions.statistics import job_duration
from layout_tuner.protocol import measurement, outcome, worker_messages
from layout_tuner.results_db import records, service_records
from layout_tuner.results_db.leaderboard import leaderboard_records
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.spaces.search_space import Exclusion
from layout_tuner.trainers.exports import exported


def _classes_of(module: ModuleType) -> Iterator[type]:
    for each in vars(module).values():
        if isinstance(each, type) and each.__module__ == module.__name__:
            yield each


_VALUES: Final[tuple[type, ...]] = (
    *_classes_of(exported),
    *_classes_of(worker_messages),
    *_classes_of(measurement),
    *_classes_of(outcome),
    *_classes_of(records),
    *_classes_of(leaderboard_records),
    *_classes_of(service_records),
    *_classes_of(plan),
    *_classes_of(job),
    *_classes_of(job_duration),
    CheapProbe,
    DecidingProperty,
    Exclusion,
    Layout,
    Prediction,
)
"""Dataclasses of other packages that documents contain."""

_DIRECTIONS: Final = ("-Input", "-Output")
"""Suffixes of the names of schemas that differ between requests and responses."""


def describe_fields(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Adds the strings under fields to the schemas of an OpenAPI document.

    What a class's docstring says of Python's exceptions is left out: no client sees them.
    """
    classes: dict[str, type] = {each.__name__: each for each in (*_VALUES, *_below(Document))}
    for name, schema in schemas.items():
        if "description" in schema:
            schema["description"] = schema["description"].partition("\n\nRaises:")[0]
        for end in _DIRECTIONS:
            name = name.removesuffix(end)
        if name in classes:
            _describe(schema.get("properties", {}), classes[name])


def _below(document: type[Document]) -> Iterator[type[Document]]:
    for each in document.__subclasses__():
        yield each
        yield from _below(each)


def _describe(properties: dict[str, dict[str, Any]], described: type) -> None:
    for base in described.__mro__:
        if base in _VALUES or issubclass(base, Document):
            for name, text in _strings_under_fields(base).items():
                properties[name].setdefault("description", text)


def _strings_under_fields(described: type) -> Mapping[str, str]:
    strings = {}
    for field, below in pairwise(_definitions(described.__module__)[described.__name__].body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                strings[name] = inspect.cleandoc(text)
    return strings


@lru_cache
def _definitions(module: str) -> Mapping[str, ast.ClassDef]:
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in parsed.body if isinstance(each, ast.ClassDef)}
