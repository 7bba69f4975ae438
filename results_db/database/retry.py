"""Transactions that are run again: after a conflict, or one by one after a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar, cast

from sqlalchemy.exc import IntegrityError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from layout_tuner.results_db.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    ResultsDbError,
    RowRefusedError,
)

MOST_TRIES: Final = 5

LONGEST_FIRST_PAUSE_S: Final = 0.04
"""Longest pause before the second try; it doubles before each further one."""

_AFTER_CONFLICT: Final = Retrying(
    retry=retry_if_exception_type(DatabaseConflictError),
    stop=stop_after_attempt(MOST_TRIES),
    wait=wait_random_exponential(LONGEST_FIRST_PAUSE_S),
    reraise=True,
)

P = ParamSpec("P")

R = TypeVar("R")

S = TypeVar("S")


def retried(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: runs a method again whose transaction was rolled back after a conflict.

    For methods whose only effect is one transaction. Rows are locked in one order everywhere, so
    that conflicts should not occur; PostgreSQL does not guarantee it.
    """

    @wraps(method)
    def run(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        # tenacity's own decorator keeps statistics that all threads would write.
        return _AFTER_CONFLICT.copy()(method, self, *args, **kwargs)

    return cast("Callable[Concatenate[S, P], R]", run)


Ask = TypeVar("Ask")

Answer = TypeVar("Answer")


def one_by_one_if_refused(
    work: Callable[[Sequence[Ask]], list[Answer | ResultsDbError]], asks: Sequence[Ask]
) -> list[Answer | ResultsDbError]:
    """Runs a batch in one transaction; if a member is refused, each in a transaction of its own.

    The work may refuse members without raising.

    Returns:
        The answer of each, or its refusal: one by `work`, or `RowRefusedError`.

    Raises:
        DatabaseUnavailableError: the database failed; transactions of single members that committed
            before stay.
    """
    try:
        return work(asks)
    except (DatabaseUnavailableError, DatabaseConflictError):
        raise
    except (ResultsDbError, IntegrityError) as error:
        if len(asks) > 1:
            return [answer for ask in asks for answer in one_by_one_if_refused(work, [ask])]
        return [error if isinstance(error, ResultsDbError) else _refused(error)]


def _refused(error: IntegrityError) -> RowRefusedError:
    """The refusal as an answer: if it were raised, the other members would fail too."""
    refused = RowRefusedError(
        f"the schema refuses what this would have written: {str(error.orig).splitlines()[0]}"
    )
    refused.__cause__ = error
    return refused
