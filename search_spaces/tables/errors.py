"""Errors of measurement tables."""

from __future__ import annotations

from search_spaces.errors import SearchSpaceError


class TableInvalidError(SearchSpaceError):
    """A measurement table cannot be read, or contradicts itself; the message names the row."""
