"""Plot data with the colours of the light theme, for plots outside of pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

_LIGHT: Final = re.compile(r"(?m)^:root \{([^}]*)\}")
_VARIABLE: Final = re.compile(r"(--[\w-]+):\s*([^;]+);")


@cache
def _colours() -> Mapping[str, str]:
    """The variables of the style sheet."""
    file = resources.files("layout_tuner.api.html") / "static" / "dashboard.css"
    return dict(_VARIABLE.findall("".join(_LIGHT.findall(file.read_text(encoding="utf-8")))))


def coloured(value: Any) -> Any:
    """A copy of plot data in which names of the style sheet's variables are their values."""
    if isinstance(value, str):
        return _colours().get(value, value)
    if isinstance(value, Mapping):
        return {name: coloured(each) for name, each in value.items()}
    return [*map(coloured, value)] if isinstance(value, list | tuple) else value
