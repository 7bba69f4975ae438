"""The options of commands about a training job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from layout_tuner.cli.options.command_options import Function, passed_as
from layout_tuner.cli.options.refusals import refusals
from layout_tuner.predictions.statistics.job_duration import JOB_OPTIONS, TrainingJob

FROM: Final = "job_file"
"""The parameter of a job's file, of commands that read one: --nodes are then the nodes of that."""


def _job(**given: Any) -> TrainingJob | None:
    if click.get_current_context().params.get(FROM) is not None:
        del given["nodes"]
    with refusals():
        return TrainingJob.read(**given)


def _added(nodes_text: str) -> Callable[[Function], Function]:
    texts = {name: text for name, (_, text) in JOB_OPTIONS.items()} | {"nodes": nodes_text}
    return passed_as(
        "job",
        _job,
        JOB_OPTIONS,
        *(
            click.option(f"--{name.replace('_', '-')}", name, type=kind, help=texts[name])
            for name, (kind, _) in JOB_OPTIONS.items()
        ),
    )


_NODES: Final = JOB_OPTIONS["nodes"][1]

job_options: Final = _added(_NODES)
"""Adds the options about a training job; passes on a `TrainingJob`, or None."""
job_options_beside_from: Final = _added(
    f"With --from: nodes of the job, where its file does not say them. With --tokens: {_NODES[0].lower()}{_NODES[1:]}"
)
"""The same of a command that has --from."""
