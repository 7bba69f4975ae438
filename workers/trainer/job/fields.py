"""Fields of the mappings that jobs are written in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from workers.trainer.errors import TrainerError


def refuse_unknown_fields(
    given: Collection[str], kind: type[Any], error: type[TrainerError], what: str
) -> None:
    """Refuses names that are no fields of the dataclass `kind`, and lists those that are."""
    known = tuple(field.name for field in fields(kind))
    if unknown := sorted(set(given) - set(known)):
        raise error(f"unknown {what} {unknown[0]!r}; the fields are {', '.join(known)}")
