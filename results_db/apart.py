"""A batch whose transaction fails for one of its members is done again, each member apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy.exc import IntegrityError

from results_db.errors import DatabaseConflictError, DatabaseUnavailableError, ResultsDbError

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


def apart_if_refused(
    work: Callable[[Sequence[Ask]], list[Answer | ResultsDbError]], asks: Sequence[Ask]
) -> list[Answer | ResultsDbError]:
    """Does a batch in one transaction; each in its own where the database refuses something of one.

    Args:
        work: answers a batch in one transaction, and may refuse members without raising.
        asks: the batch.
    """
    try:
        return work(asks)
    except (DatabaseUnavailableError, DatabaseConflictError):
        raise
    except (ResultsDbError, IntegrityError) as error:
        if len(asks) > 1:
            return [answer for ask in asks for answer in apart_if_refused(work, [ask])]
        if isinstance(error, ResultsDbError):
            return [error]
        raise
