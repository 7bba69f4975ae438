"""One seeded fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One mistake."""

    name: str
    """Names the fault in reports and on the command line."""
    function: str
    """Qualified name of the function in its module, such as `Packer._borrow`."""
    before: str
    """Code that occurs exactly once in the function; any whitespace matches any other."""
    after: str
    """What replaces it."""
    what: str
    """The wrong behaviour, in one sentence."""
    also: str = ""
    """Code that tells the function apart from others with the same qualified name."""
