"""Which operation a request asks for, known before anything of it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation, and what its path names."""

    operation: str
    path_parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RouteMap:
    """The routes of an application in its own order: the first that fits is the one that answers."""

    _by_method: Mapping[str, Sequence[tuple[re.Pattern[str], str]]]
    operations: frozenset[str] = field(default_factory=frozenset)
    """Every route by name, and what is mounted."""

    @classmethod
    def of(cls, routes: Sequence[BaseRoute]) -> Self:
        """Reads the routes once; they must all be there."""
        by_method: dict[str, list[tuple[re.Pattern[str], str]]] = {}
        operations = set()
        for route in iter_route_contexts(routes):
            name = str(route.name)
            operations.add(name)
            for method in route.methods or ():
                by_method.setdefault(method, []).append((_regex(route), name))
        return cls(by_method, frozenset(operations))

    def find(self, method: str, path: str) -> Asked | None:
        """What answers; None where nothing does, or something that is mounted."""
        for regex, operation in self._by_method.get(method, ()):
            found = regex.match(path)
            if found:
                return Asked(operation, found.groupdict())
        return None

    def methods(self, path: str) -> list[str]:
        """What may be asked of a path, whatever it names."""
        return sorted(method for method in self._by_method if self.find(method, path) is not None)


def _regex(route: Any) -> re.Pattern[str]:
    regex = route.path_regex
    assert isinstance(regex, re.Pattern)
    return regex
