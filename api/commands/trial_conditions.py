"""The option `--where`: conditions that select trials."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import click

from results_db.errors import TrialFilterInvalidError
from results_db.trials.filter import CHOICES, LISTED_FIELDS, SINGULAR, TEXTS, TrialFilter
from search_spaces.documents.numbers import read_number, read_whole
from search_spaces.documents.reading import nearest
from search_spaces.protocol.metrics import METRICS

_CONDITION: Final = re.compile(r"\s*([a-z_]+)\s*(=|>=|<=)\s*(.*?)\s*")
_PLURAL: Final = {singular: name for name, singular in SINGULAR.items()}
_LISTED: Final = tuple(SINGULAR.get(name, name) for name in LISTED_FIELDS)
_BOUNDS: Final = {">=": "min", "<=": "max"}

where_option = click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Only trials with a knob at a value (tp=2, or tp=1,2 for either), in a state (state=FAILED), with a "
    "metric within a bound (mfu>=0.3, peak_memory_bytes<=8e9); may be repeated: all must hold.",
)


def read_conditions(conditions: Sequence[str]) -> TrialFilter:
    """The filter of all conditions.

    Raises:
        click.UsageError: a condition is malformed, or they contradict each other.
    """
    stated: dict[str, Any] = {}
    for condition in conditions:
        name, value = _read(condition)
        if name in stated:
            raise click.UsageError(f"--where {condition!r}: {name} is stated twice")
        stated[name] = value
    try:
        return TrialFilter(**stated)
    except TrialFilterInvalidError as error:
        raise click.UsageError(f"--where: {error}") from error


def _read(condition: str) -> tuple[str, Any]:
    parts = _CONDITION.fullmatch(condition)
    if parts is None:
        raise click.UsageError(
            f"--where {condition!r} is not NAME=VALUE, NAME>=NUMBER or NAME<=NUMBER"
        )
    name, sign, text = parts.groups()
    known: Sequence[str] = _LISTED if sign == "=" else tuple(METRICS)
    if name not in known:
        raise click.UsageError(
            f"--where {condition!r}: {name!r} does not go with {sign}{nearest(name, known)}"
        )
    if sign == "=":
        field = _PLURAL.get(name, name)
        return field, tuple(_value(field, each.strip(), condition) for each in text.split(","))
    return f"{_BOUNDS[sign]}_{name}", _bound(name, text, condition)


def _value(field: str, text: str, condition: str) -> Any:
    if CHOICES.get(field) == (False, True):
        words = {"true": True, "false": False}
        if text.lower() in words:
            return words[text.lower()]
        raise click.UsageError(f"--where {condition!r}: {text!r} is not true or false")
    if field in CHOICES or field in TEXTS:
        return text
    try:
        return read_whole(text)
    except ValueError as error:
        raise click.UsageError(f"--where {condition!r}: {text!r} is not a whole number") from error


def _bound(metric: str, text: str, condition: str) -> float:
    try:
        value = read_number(text)
    except ValueError as error:
        raise click.UsageError(f"--where {condition!r}: {text!r} is not a number") from error
    # 8e9 is accepted as a whole number of bytes.
    return int(value) if METRICS[metric].is_whole and value.is_integer() else value
