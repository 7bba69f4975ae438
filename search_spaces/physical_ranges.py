"""Ranges of physical quantities, which are far wider than any real machine needs.

A number outside of its range usually has the wrong unit. It would overflow a 64-bit integer of the
database or make an estimate infinite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from layout_tuner.documents.reading import is_positive_number, shown

_NO_FLOAT_IN_YAML: Final = re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+")
"""A number with an exponent that YAML 1.1 reads as text, because it has no point or no sign."""


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float
    unit: str = ""
    """The unit, for messages."""

    @property
    def is_whole(self) -> bool:
        """Whether the range has whole numbers only; then its ends are ints."""
        return isinstance(self.low, int)

    def problem(self, value: object) -> str | None:
        """Why `value` is not in the range, or None. A bool is not a number."""
        is_inside = is_positive_number(value) and self.low <= value <= self.high
        if is_inside and (isinstance(value, int) or not self.is_whole):
            return None
        is_float_in_yaml = isinstance(value, str) and _NO_FLOAT_IN_YAML.fullmatch(value)
        hint = "; YAML reads it as text, it needs a point as in 1.0e+13" if is_float_in_yaml else ""
        return f"{shown(value)} is not {self}{hint}"

    def __str__(self) -> str:
        kind = "whole number" if self.is_whole else "number"
        low, high = (str(end) if self.is_whole else f"{end:g}" for end in (self.low, self.high))
        unit = f" {self.unit}" if self.unit else ""
        return f"a {kind} from {low} to {high}{unit}"
