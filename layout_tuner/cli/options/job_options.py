"""The options of commands about a training job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from layout_tuner.cli.options.refusals import refusals
from layout_tuner.predictions.statistics.job_duration import JOB_OPTIONS, TrainingJob

Function = TypeVar("Function", bound=Callable[..., Any])


def job_options(function: Function) -> Function:
    """Adds the options about a training job; passes on a `TrainingJob`, or None."""

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in JOB_OPTIONS}
        with refusals():
            job = TrainingJob.read(**given)
        return function(*arguments, job=job, **options)

    for name, (kind, text) in reversed(list(JOB_OPTIONS.items())):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command  # type: ignore[return-value]
