"""The options of commands about a training job."""

from __future__ import annotations

from typing import Any, Final

import click

from layout_tuner.cli.options.command_options import passed_as
from layout_tuner.cli.options.refusals import refusals
from layout_tuner.predictions.statistics.job_duration import JOB_OPTIONS, TrainingJob


def _job(**given: Any) -> TrainingJob | None:
    with refusals():
        return TrainingJob.read(**given)


job_options: Final = passed_as(
    "job",
    _job,
    JOB_OPTIONS,
    *(
        click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)
        for name, (kind, text) in JOB_OPTIONS.items()
    ),
)
"""Adds the options about a training job; passes on a `TrainingJob`, or None."""
