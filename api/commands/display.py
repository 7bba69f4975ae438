"""How commands print what the service answers: as JSON, or as labels and values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from api.formatting import figure, unit
from search_spaces.terminal.console import terminal_width
from search_spaces.terminal.job_options import with_job_options

if TYPE_CHECKING:
    from pydantic import BaseModel

    from api.schemas.campaigns_and_trials import CampaignRead
    from search_spaces.belief.job import JobEstimate  # it imports numpy
    from search_spaces.statistics.job_duration import TrainingJob

Function = TypeVar("Function", bound=Callable[..., Any])

_LABEL_WIDTH: Final = 14

EXISTING_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def answers(show: Callable[[Any], None]) -> Callable[[Function], Function]:
    """Adds --json to a command that returns a document, which is printed so or by `show`."""

    def with_json(function: Function) -> Function:
        @json_option
        @functools.wraps(function)
        def command(*arguments: Any, as_json: bool, **options: Any) -> None:
            document = function(*arguments, **options)
            (print_json if as_json else show)(document)

        return command  # type: ignore[return-value]

    return with_json


def print_json(document: BaseModel) -> None:
    click.echo(document.model_dump_json(indent=2))


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints labels and values; the further lines of a value are indented like the first."""
    for label, value in facts:
        click.echo(f"{label:<{_LABEL_WIDTH}}{value}".replace("\n", f"\n{'':<{_LABEL_WIDTH}}"))


def best_words(campaign: CampaignRead) -> str:
    """The best value so far with its unit, and whether it is disturbed."""
    words = f"{figure(campaign.progress.best)} {unit(campaign.objective)}"
    return f"{words}, disturbed" if campaign.progress.best_disturbed else words


def job_options(function: Function) -> Function:
    """See `with_job_options`."""
    return with_job_options(function, option=click.option, refuse=refuse)


def refuse(sentence: str) -> NoReturn:
    raise click.UsageError(sentence)


def print_jobs(job: TrainingJob, jobs: Sequence[tuple[str, JobEstimate]]) -> None:
    """Prints the days of a training job with some layouts."""
    from search_spaces.belief.plan_text import job_lines

    for line in job_lines(job, jobs, terminal_width(sys.stdout)):
        click.echo(line)
