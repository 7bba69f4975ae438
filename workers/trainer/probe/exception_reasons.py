"""Why a rank failed: from the exception to the failure reason of the outcome."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import distributed as dist

from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.protocol.outcome import FailureReason
from layout_tuner.trainers.failure_texts import OUT_OF_MEMORY, PEER_ENDED, mentions
from layout_tuner.workers.trainer.errors import (
    CompilerMissingError,
    LayoutUnsupportedError,
    LossDivergedError,
    MemoryLimitExceededError,
    PeerLostError,
    ResultImplausibleError,
)


def classify(error: BaseException) -> FailureReason:
    """The reason of a failure: first by the types of the errors, then by the allocators' messages.

    Types are not enough: ROCm reports "HIP out of memory", and the CPU's allocator raises a plain
    RuntimeError.
    """
    for cause in _chain(error):
        if isinstance(cause, (MemoryLimitExceededError, torch.OutOfMemoryError, MemoryError)):
            return "out_of_memory"
        if isinstance(cause, LossDivergedError):
            return "diverged"
        if isinstance(cause, (ResultImplausibleError, OutcomeInvalidError)):
            return "implausible"
        if isinstance(cause, (LayoutUnsupportedError, CompilerMissingError)):
            return "unsupported"
        if isinstance(cause, (RuntimeError, OSError)) and mentions(str(cause), OUT_OF_MEMORY):
            return "out_of_memory"
    return "crashed"


def is_transport_error(error: BaseException) -> bool:
    """Whether the error only reports that a peer has died, and is not the first cause."""
    if classify(error) != "crashed":
        return False
    return any(
        isinstance(
            cause, (PeerLostError, ConnectionError, dist.DistNetworkError, dist.DistStoreError)
        )
        or (isinstance(cause, RuntimeError) and mentions(str(cause), PEER_ENDED))
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
