"""Filters of trials in a URL: `?tp=1&tp=2&max_peak_memory_bytes=...`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from results_db.trials.filter import TrialFilter

SINGULAR: Final = {"numbers": "number", "states": "state", "reasons": "reason", "nodes": "node"}
"""Names of fields in a URL, where a list repeats the name with one value each time."""


def filter_query(wanted: TrialFilter) -> Mapping[str, Any]:
    """The query of a filter, which `api.http.query_parameters` reads."""
    return {
        SINGULAR.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in wanted.stated.items()
    }
