"""The strings under the fields of documents, read when somebody asks for the API's description.

pydantic would read every class's source while the service starts, which takes a tenth of the start; few
processes ever hand out their OpenAPI document.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from api.schemas import Document
from results_db.cost import Cost
from results_db.records import AttemptRecord, MeasurementRecord, WorkerRecord
from search_spaces.layout import Layout
from search_spaces.outcome import Breakdown, Environment, Iteration, Measurement, Outcome

_VALUES: Final = (
    AttemptRecord,
    Breakdown,
    Cost,
    Environment,
    Iteration,
    Layout,
    Measurement,
    MeasurementRecord,
    Outcome,
    WorkerRecord,
)
"""Classes of others that documents are made of."""

_DIRECTIONS: Final = ("-Input", "-Output")
"""Ends of the names of what differs between requests and answers."""


def describe_fields(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Puts the strings under fields into the schemas of an OpenAPI document.

    Args:
        schemas: by the names of their classes.
    """
    classes: dict[str, type] = {each.__name__: each for each in (*_VALUES, *_below(Document))}
    for name, schema in schemas.items():
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
