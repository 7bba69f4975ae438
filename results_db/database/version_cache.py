"""Results of queries over whole campaigns, kept in the process until the campaign changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Final, TypeVar, cast

import numpy as np

MAX_BYTES: Final = 64 << 20
"""Most memory of one cache, in bytes: 80 lists of 100,000 ids."""

_SMALL_BYTES: Final = 256 << 10
"""What a result other than an array is counted as, in bytes."""

_LEAST_BYTES: Final = 1 << 10
"""What a short array is counted as, with its key, in bytes."""

T = TypeVar("T")

_Key = tuple[int, Hashable]
"""The campaign's id, and what was asked for."""


class VersionCache:
    """A bounded cache of results that hold for one version of a campaign; safe between threads.

    A result is exact: it is returned for the version that it was computed for, and for no other
    (`results_db.events.event_log.page_version_of`). The results that were used last are kept.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: OrderedDict[_Key, tuple[str, int, Any]] = OrderedDict()
        self._bytes = 0

    def get(self, campaign_id: int, version: str, asked: Hashable, compute: Callable[[], T]) -> T:
        """The result for a version of a campaign; computed unless it is kept.

        Args:
            campaign_id: the campaign.
            version: of the campaign's pages, read in the transaction in which `compute` reads.
            asked: what the result depends on besides the version.
            compute: computes the result, which nobody may change.
        """
        key = (campaign_id, asked)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0] == version:
                self._kept.move_to_end(key)
                return cast("T", found[2])
        # Without the lock: two threads may compute the same, and none waits for another.
        result = compute()
        num_bytes = _SMALL_BYTES
        if isinstance(result, np.ndarray):
            num_bytes = max(result.nbytes, _LEAST_BYTES)
        if num_bytes <= self._max_bytes:
            with self._lock:
                self._keep(key, version, num_bytes, result)
        return result

    def _keep(self, key: _Key, version: str, num_bytes: int, result: object) -> None:
        replaced = self._kept.pop(key, None)
        self._bytes += num_bytes - (0 if replaced is None else replaced[1])
        self._kept[key] = (version, num_bytes, result)
        while self._bytes > self._max_bytes:
            _, (_, freed, _) = self._kept.popitem(last=False)
            self._bytes -= freed
