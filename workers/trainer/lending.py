"""Tensors that are lent to a collective: when the transport has given them back.

A thread of gloo's keeps its work, and the tensors in it, for some microseconds after it has said
that the work is done; on a busy core for milliseconds. Nobody minds, except while live tensors are
counted to the byte: what the thread still holds counts for what is made meanwhile. So there, and
only there, waiting for a collective includes waiting for its thread to let go.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import _get_current_dispatch_mode

from workers.trainer.memory import LogicalPeak

_LET_GO_WITHIN_S: Final = 1.0
"""What is held for longer than that is really held, and is counted."""
_POLL_S: Final = 2e-5


def start_lending(collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Work:
    """Starts a collective over these tensors."""
    counting = _get_current_dispatch_mode()
    if not isinstance(counting, LogicalPeak):
        work: Work = collective(*tensors, async_op=True, **options)
        return work
    # The transport gets tensors of its own over the same memory: they end when it lets go.
    lent = [tensor.detach() for tensor in tensors]
    work = collective(*lent, async_op=True, **options)
    return _Lending(work, lent, counting)


class _Lending(Work):
    """A collective that has ended when nobody else holds its tensors any more."""

    def __init__(self, work: Work, lent: list[Tensor], counting: LogicalPeak) -> None:
        super().__init__()
        self._work: Work | None = work
        self._held: list[weakref.ref[Any]] = [weakref.ref(tensor) for tensor in lent]
        self._counting = counting

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the collective, and until its tensors are given back."""
        if self._work is None:
            return True
        before = list(self._counting.storages.values())
        self._work.wait(timeout)
        self._work = None
        # The copy that gloo's reduce-scatter works on comes to light as its result is cut from it.
        known = {id(storage) for storage in before}
        storages = self._counting.storages.values()
        self._held += [storage for storage in storages if id(storage) not in known]
        given_up = time.monotonic() + _LET_GO_WITHIN_S
        while any(held() is not None for held in self._held) and time.monotonic() < given_up:
            time.sleep(_POLL_S)
        return True
