"""Values of Python as JSON has them: numbers and arrays of numpy, ranges and tuples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from layout_tuner.errors import DocumentInvalidError


def json_value(value: Any, field: str = "") -> Any:
    """A value of Python as JSON: a mapping, a list, text, a number, a boolean, or None.

    What has a method `tolist`, such as numbers and arrays of numpy, columns of pandas and tensors,
    becomes what that returns; ranges and tuples become lists. `field` is where the value is.

    Raises:
        DocumentInvalidError: JSON has no such value; the message names the field.
    """
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str | int)]:
            raise DocumentInvalidError(f"the key {wrong[0]!r} is not text", field=field)
        inside = f"{field}." if field else ""
        return {key: json_value(each, f"{inside}{key}") for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        return [json_value(each, field) for each in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist(), field)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if value is None or (isinstance(value, str | int | float) and is_finite):
        return value
    raise DocumentInvalidError(
        f"{value!r} ({type(value).__name__}) has no form in JSON: write text, a finite number, a "
        "list or a mapping",
        field=field,
    )
