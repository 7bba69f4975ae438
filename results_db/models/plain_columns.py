"""Columns from the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, String, literal
from sqlalchemy.types import TypeEngine

from layout_tuner.protocol.measurement import LONGEST, MOST

_TYPES: Final[Mapping[str, TypeEngine[Any]]] = {
    "float": Double(),
    "int": Integer(),
    "bool": Boolean(),
    "str": String(16),  # one of a few words, unless its field states a length
}
_LARGEST_INTEGER: Final = (1 << 31) - 1


def plain_columns(kind: Any, *, defaults_of: Any = None) -> Iterator[Column[Any]]:
    """A column for each field of a dataclass that is one plain value, NULL where that may be None.

    Defaults are the database's too: a later column needs a value in the rows that there are.
    """
    defaults = {each.name: each.default for each in fields(defaults_of or kind)}
    for each in fields(kind):
        plain = str(each.type).removesuffix(" | None")
        if plain not in _TYPES:
            continue
        of_column, default = _TYPES[plain], defaults[each.name]
        if each.metadata.get(MOST, 0) > _LARGEST_INTEGER:
            of_column = BigInteger()
        if LONGEST in each.metadata:
            of_column = String(each.metadata[LONGEST])
        filled: dict[str, Any] = {}
        if plain == each.type and default is not MISSING:
            in_sql = f"{default:g}" if plain == "float" else literal(default)
            filled = {"default": default, "server_default": in_sql}
        yield Column(each.name, of_column, nullable=plain != each.type, **filled)
