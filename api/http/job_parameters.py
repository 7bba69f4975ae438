"""The query parameters of a training job."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Depends, Query
from fastapi.exceptions import RequestValidationError

from search_spaces.documents.reading import MAX_COUNT
from search_spaces.errors import TrainingJobInvalidError
from search_spaces.statistics.job_duration import JOB_OPTIONS, TrainingJob

_TEXTS: Final = {name: text for name, (_, text) in JOB_OPTIONS.items()}
_MOST: Final = 1e12


def _number(name: str) -> object:
    return Query(ge=0, le=_MOST, allow_inf_nan=False, description=_TEXTS[name])


def read_job(
    tokens: Annotated[str | None, Query(max_length=32, description=_TEXTS["tokens"])] = None,
    nodes: Annotated[int | None, Query(ge=1, le=MAX_COUNT, description=_TEXTS["nodes"])] = None,
    mtbf_hours: Annotated[float | None, _number("mtbf_hours")] = None,
    checkpoint_s: Annotated[float | None, _number("checkpoint_s")] = None,
    restart_s: Annotated[float | None, _number("restart_s")] = None,
) -> TrainingJob | None:
    """The training job of a request; None where it describes none.

    Raises:
        RequestValidationError: a parameter is out of range, or is given without tokens.
    """
    try:
        return TrainingJob.read(
            tokens=tokens,
            nodes=nodes,
            mtbf_hours=mtbf_hours,
            checkpoint_s=checkpoint_s,
            restart_s=restart_s,
        )
    except TrainingJobInvalidError as error:
        raise RequestValidationError(
            [
                {"type": "value_error", "loc": ("query", part.field), "msg": part.problem}
                for part in error.parts
            ]
        ) from error


JobDep = Annotated[TrainingJob | None, Depends(read_job)]
