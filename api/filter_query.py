"""Filters of trials as a URL states them: `?tp=1&tp=2&max_peak_memory_bytes=...`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from results_db.trial_filter import TrialFilter

SINGULAR: Final = {"numbers": "number", "states": "state", "reasons": "reason", "nodes": "node"}
"""In a URL a value stands alone, and the name is repeated for several."""


def filter_query(wanted: TrialFilter) -> Mapping[str, Any]:
    """The query that `api.filters` reads a filter from."""
    query: dict[str, Any] = {}
    for field in fields(wanted):
        value = getattr(wanted, field.name)
        if value not in ((), None):
            name = SINGULAR.get(field.name, field.name)
            query[name] = list(value) if isinstance(value, tuple) else value
    return query
