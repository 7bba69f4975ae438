"""The options of commands about a training job, for commands of the API and of a machine alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from layout_tuner.errors import TrainingJobInvalidError
from layout_tuner.predictions.statistics.job_duration import JOB_OPTIONS, TrainingJob

Function = TypeVar("Function", bound=Callable[..., Any])


def with_job_options(
    function: Function, *, option: Callable[..., Any], refuse: Callable[[str], NoReturn]
) -> Function:
    """Adds the options about a training job; passes on a `TrainingJob`, or None."""

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in JOB_OPTIONS}
        try:
            job = TrainingJob.read(**given)
        except TrainingJobInvalidError as error:
            refuse(str(error))
        return function(*arguments, job=job, **options)

    for name, (kind, text) in reversed(list(JOB_OPTIONS.items())):
        command = option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command  # type: ignore[return-value]
