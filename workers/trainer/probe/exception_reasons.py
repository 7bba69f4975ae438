"""Why a rank failed: from the exception to the failure reason of the outcome."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Final

import torch
from torch import distributed as dist

from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.protocol.outcome import FailureReason
from layout_tuner.trainers.failure_texts import (
    LIBRARY,
    RAISED,
    Resource,
    lacking,
    reason_of,
    row_of,
    says_peer_ended,
)
from layout_tuner.workers.trainer.errors import (
    CompilerMissingError,
    LayoutUnsupportedError,
    LossDivergedError,
    MemoryLimitExceededError,
    PeerLostError,
    ResultImplausibleError,
    TrainerOptionInvalidError,
)

_LAST_FRAMES: Final = 4


def classify(error: BaseException, *, device: str = "cpu") -> FailureReason:
    """The reason of a failure: first by the types of the errors, then by their messages.

    Types are not enough: ROCm reports "HIP out of memory", and the CPU's allocator raises a plain
    RuntimeError. `device` is that of the rank: on the CPU the host's memory is the device's.
    """
    for cause in _chain(error):
        if isinstance(cause, (MemoryLimitExceededError, torch.OutOfMemoryError)):
            return "out_of_memory"
        if isinstance(cause, LossDivergedError):
            return "diverged"
        if isinstance(cause, (ResultImplausibleError, OutcomeInvalidError)):
            return "implausible"
        if isinstance(
            cause, (LayoutUnsupportedError, CompilerMissingError, TrainerOptionInvalidError)
        ):
            return "unsupported"
        if reason := reason_of(_resource(cause), on_cpu=device == "cpu"):
            return reason
    return "crashed"


def host_advice(error: BaseException) -> str:
    """The resource that the host lacks, and the setting to change; empty: it lacks none."""
    for cause in _chain(error):
        resource = _resource(cause)
        if resource is not None and reason_of(resource, on_cpu=False) == "host_resource":
            return lacking(resource)
    return ""


def _resource(cause: BaseException) -> Resource | None:
    """The resource that an error names."""
    if not isinstance(cause, (RuntimeError, OSError, MemoryError)):
        return None
    said = "".join(traceback.format_exception_only(cause))
    frames = "".join(traceback.format_tb(cause.__traceback__)[-_LAST_FRAMES:])
    rows = (row_of(line, RAISED + LIBRARY, frames=frames) for line in said.splitlines())
    return next((row.resource for row in rows if row), None)


def is_transport_error(error: BaseException) -> bool:
    """Whether the error only reports that a peer has died, and is not the first cause."""
    if classify(error) != "crashed":
        return False
    return any(
        isinstance(
            cause, (PeerLostError, ConnectionError, dist.DistNetworkError, dist.DistStoreError)
        )
        or (isinstance(cause, RuntimeError) and says_peer_ended(str(cause)))
        for cause in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes: `raise ... from`, or the error that was being handled."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
