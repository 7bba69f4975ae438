"""The grammar of numbers in texts: ASCII digits with an optional sign, fraction and exponent.

Python's `int` and `float` also read underscores, spaces, digits of other scripts and "infinity";
YAML 1.1 reads 010 as 8 and 1:30 as 90.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_NUMBER: Final = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_WHOLE: Final = r"[-+]?[0-9]+"
_GROUPED: Final = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_NOT_FINITE: Final = re.compile(r"[-+]?(?:nan|inf|infinity)", flags=re.IGNORECASE)


def read_number(text: str) -> float:
    """The number that a text is; ValueError if it is none, or too large for a float."""
    number = float(text) if re.fullmatch(_NUMBER, text) else math.inf
    if math.isinf(number):
        raise ValueError(f"{text[:80]!r} is not a number in plain digits, as 8, 0.25 or 1e3")
    return number


def read_whole(text: str) -> int:
    """The whole number that a text is; ValueError if it is none, or has thousands of digits."""
    if not re.fullmatch(_WHOLE, text):
        raise ValueError(f"{text[:80]!r} is not a whole number in plain digits")
    return int(text)


def read_printed(text: str) -> float:
    """As `read_number`, of what programs print: also 12,345.6, NaN and infinity."""
    text = text.strip(" \t")
    if _NOT_FINITE.fullmatch(text):
        return float(text)
    return read_number(text.replace(",", "") if _GROUPED.match(text) else text)


_TAG: Final = "tag:yaml.org,2002:"
_DIGITS: Final = "-+0123456789"
_YAML_FLOAT: Final = rf"(?:{_NUMBER}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"

CORE_SCHEMA: Final = (
    (_TAG + "null", re.compile(r"(?:~|null|Null|NULL)?\Z"), ["", *"~nN"]),
    (_TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), [*"tTfF"]),
    (_TAG + "int", re.compile(rf"(?:{_WHOLE}|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), [*_DIGITS]),
    (_TAG + "float", re.compile(_YAML_FLOAT), [".", *_DIGITS]),
    (_TAG + "merge", re.compile(r"<<\Z"), ["<"]),
)
"""What plain scalars of YAML are by its version 1.2 (core schema, section 10.3.2), for PyYAML's
`add_implicit_resolver`. `<<` is none there; it is known in order to be refused."""


_BY_FIRST: Final = {
    first: [
        (tag.rpartition(":")[2], pattern) for tag, pattern, firsts in CORE_SCHEMA if first in firsts
    ]
    for _, _, all_firsts in CORE_SCHEMA
    for first in all_firsts
}


def core_value(scalar: str) -> Any:
    """The value of a plain scalar by the core schema of YAML 1.2."""
    for kind, pattern in _BY_FIRST.get(scalar[:1], ()):
        if pattern.match(scalar):
            return _VALUES[kind](scalar)
    return scalar


_VALUES: Final[Mapping[str, Callable[[str], Any]]] = {
    "null": lambda _: None,
    "bool": lambda scalar: scalar[0] in "tT",
    "int": lambda scalar: int(scalar, 0 if scalar[:2] in ("0o", "0x") else 10),
    "float": lambda scalar: float(scalar.replace(".", "") if scalar[-1] in "fFnN" else scalar),
    "merge": str,
}
