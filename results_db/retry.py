"""Transactions that were undone because another was in their way are run again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar, cast

from results_db.errors import DatabaseConflictError

MOST_TRIES: Final = 5
FIRST_PAUSE_S: Final = 0.02
"""At most so long before the second try, and twice as long before each further one."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def retried(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Runs a method again whose transaction was undone for another's sake.

    For methods that change the database in one transaction and nothing besides. The rows are locked in
    one order everywhere, so that it should never be needed; PostgreSQL reserves the right.
    """

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        for tried in range(1, MOST_TRIES):
            try:
                return method(self, *args, **kwargs)
            except DatabaseConflictError:
                time.sleep(random.uniform(0, FIRST_PAUSE_S * 2**tried))  # noqa: S311 - no secret
        return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[S, P], R]", run)
