"""Options and output of commands that say how long a training job takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import click

from search_spaces.belief.job import JobEstimate
from search_spaces.belief.plan_text import job_lines
from search_spaces.statistics.job_duration import TrainingJob
from search_spaces.terminal.console import terminal_width
from search_spaces.terminal.job_options import with_job_options

Function = TypeVar("Function", bound=Callable[..., Any])


def job_options(function: Function) -> Function:
    """See `with_job_options`."""
    return with_job_options(function, option=click.option, refuse=_refuse)


def _refuse(sentence: str) -> NoReturn:
    raise click.UsageError(sentence)


def print_jobs(job: TrainingJob, jobs: Sequence[tuple[str, JobEstimate]]) -> None:
    """Prints the days of a training job with some layouts."""
    for line in job_lines(job, jobs, terminal_width(sys.stdout)):
        click.echo(line)
