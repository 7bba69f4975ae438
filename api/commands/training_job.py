"""Options and output of commands about a training job."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from search_spaces.belief.job import JobEstimate
from search_spaces.errors import TrainingJobInvalidError
from search_spaces.statistics.training_job import JOB_OPTIONS, TrainingJob
from search_spaces.terminal.console import terminal_width
from search_spaces.terminal.plan_text import job_lines

Function = TypeVar("Function", bound=Callable[..., Any])


def job_options(function: Function) -> Function:
    """Adds the options about a training job; passes on a `TrainingJob`, or None."""

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in JOB_OPTIONS}
        try:
            job = TrainingJob.read(**given)
        except TrainingJobInvalidError as error:
            raise click.UsageError(str(error)) from error
        return function(*arguments, job=job, **options)

    for name, (kind, text) in reversed(list(JOB_OPTIONS.items())):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command  # type: ignore[return-value]


def print_jobs(job: TrainingJob, jobs: Sequence[tuple[str, JobEstimate]]) -> None:
    """Prints the days of a training job with some layouts."""
    for line in job_lines(job, jobs, terminal_width(sys.stdout)):
        click.echo(line)
