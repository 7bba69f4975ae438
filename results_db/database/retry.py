"""A batch whose transaction fails for one of its members is done again, each member apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy.exc import IntegrityError

from results_db.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    ResultsDbError,
    RowRefusedError,
)

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


def apart_if_refused(
    work: Callable[[Sequence[Ask]], list[Answer | ResultsDbError]], asks: Sequence[Ask]
) -> list[Answer | ResultsDbError]:
    """Does a batch in one transaction; each in its own where the database refuses something of one.

    Args:
        work: answers a batch in one transaction, and may refuse members without raising.
        asks: the batch.

    Returns:
        The answer of each, or why it is refused: what `work` refuses, `RowRefusedError`.

    Raises:
        DatabaseUnavailableError: nobody can be answered; what was done apart until then is done.
    """
    try:
        return work(asks)
    except (DatabaseUnavailableError, DatabaseConflictError):
        raise
    except (ResultsDbError, IntegrityError) as error:
        if len(asks) > 1:
            return [answer for ask in asks for answer in apart_if_refused(work, [ask])]
        return [error if isinstance(error, ResultsDbError) else _refused(error)]


def _refused(error: IntegrityError) -> RowRefusedError:
    """The database's refusal as an answer: raised, it would be that of the others too."""
    refused = RowRefusedError(
        f"the schema refuses what this would have written: {str(error.orig).splitlines()[0]}"
    )
    refused.__cause__ = error
    return refused
