"""Checks format, version and field names of a job's documents. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from layout_tuner.workers.trainer.errors import TrainerError, TrainJobInvalidError


def fields_of_version(
    mapping: Mapping[str, Any], kind: str, version: int, error: type[TrainerError]
) -> dict[str, Any]:
    """The document's fields except format and version; raises `error` if these two differ."""
    values = dict(mapping)
    found = (values.pop("format", None), values.pop("version", None))
    if found != (kind, version):
        raise error(f"format={found[0]!r} version={found[1]!r} is not {kind!r} version {version}")
    return values


def refuse_unknown_fields(given: Collection[str], kind: type[Any], what: str) -> None:
    """TrainJobInvalidError for a name that is no field of a dataclass; lists the fields."""
    known = tuple(field.name for field in fields(kind))
    if unknown := sorted(set(given) - set(known)):
        raise TrainJobInvalidError(
            f"unknown {what} {unknown[0]!r}; the fields are {', '.join(known)}"
        )
