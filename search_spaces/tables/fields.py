"""One text row as values: whole numbers, figures, booleans and words; errors name the column."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from layout_tuner.documents.numbers import read_number
from layout_tuner.documents.reading import MAX_TEXT_LENGTH, is_line, nearest, shown
from layout_tuner.errors import TableInvalidError

_FORMULA: Final = re.compile(r"[=@].|[+-].*[^0-9.eE%+-]", re.DOTALL)
"""What a spreadsheet that opens the table may run. A lone sign is none, nor is a number."""

_TRUTHS: Final[Mapping[str, bool]] = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True)
class Fields:
    """The text of one row by column; an empty field counts as missing."""

    text: Mapping[str, str]

    def has(self, column: str) -> bool:
        return bool(self.text.get(column, "").strip())

    def word(self, column: str, choices: Collection[str] = ()) -> str:
        """A line of text; one of `choices`, if given."""
        value = self._stated(column)
        if not is_line(value):
            raise TableInvalidError(
                f"{column}={shown(value)} is not a line of printable text, at most "
                f"{MAX_TEXT_LENGTH} characters long"
            )
        if choices and value not in choices:
            raise TableInvalidError(f"{column}={shown(value)} is unknown{nearest(value, choices)}")
        self.refuse_formula(column)
        return value

    def refuse_formula(self, column: str) -> None:
        """Raises TableInvalidError for text that a spreadsheet would run as a formula."""
        value = self.text.get(column, "").strip()
        # Spreadsheets take wide forms of signs and digits for the usual ones.
        if _FORMULA.match(unicodedata.normalize("NFKC", value)):
            raise TableInvalidError(
                f"{column}={shown(value)} reads as a formula; write it without {value[0]!r} in front"
            )

    def truth(self, column: str) -> bool:
        """1 or 0, or true or false."""
        value = self._stated(column)
        # "1.0" is what pandas makes of a column with gaps.
        known = _TRUTHS.get(value.lower().removesuffix(".0"))
        if known is None:
            raise TableInvalidError(f"{column}={shown(value)} is not 1 or 0")
        return known

    def whole(self, column: str, low: int = 1) -> int:
        """A whole number; "8.0" is one, as pandas writes a column with gaps."""
        number = self.number(column)
        if number != int(number) or number < low:
            raise TableInvalidError(
                f"{column}={shown(self._stated(column))} is not a whole number of at least {low}"
            )
        return int(number)

    def figure(self, column: str) -> float:
        """A finite number over 0."""
        number = self.number(column)
        if number <= 0:
            raise TableInvalidError(
                f"{column}={shown(self._stated(column))} is not a number over 0"
            )
        return number

    def number(self, column: str) -> float:
        """A finite number."""
        value = self._stated(column)
        try:
            return read_number(value)
        except ValueError as error:
            raise TableInvalidError(
                f"{column}={shown(value)} is not a finite number in plain digits, as 8 or 0.25"
            ) from error

    def _stated(self, column: str) -> str:
        value = self.text.get(column, "").strip()
        if not value:
            raise TableInvalidError(f"{column} is empty")
        return value
