"""A store whose calls a test sees before they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.store import Store


class InterceptedStore:
    """A store that calls `before` with the name of each call, like "trials.add"."""

    def __init__(self, store: Store, before: Callable[[str], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if isinstance(found, StoreSection):
            return _InterceptedSection(found, name, self._before)
        return found


class _InterceptedSection:
    def __init__(self, section: StoreSection, name: str, before: Callable[[str], None]) -> None:
        self._section, self._name, self._before = section, name, before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._section, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self._before(f"{self._name}.{name}")
            return method(*arguments, **named)

        return call
