"""Errors of allocations."""

from __future__ import annotations

from search_spaces.errors import SearchSpaceError
from workers.errors import WorkerError


class SiteInvalidError(WorkerError, SearchSpaceError):
    """A site's description is impossible; the message names the field."""


class AllocationInvalidError(WorkerError, SearchSpaceError):
    """An allocation that was asked for is impossible at its site; the message names the option."""


class SlurmUnavailableError(WorkerError):
    """There is no Slurm here, or it does not answer."""


class SlurmRefusedError(WorkerError):
    """Slurm refuses what was asked of it."""


class JobNotOursError(WorkerError):
    """The job is not an allocation of this user's that this command line submitted."""
