"""The options of commands that read a job from its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.cli.options.command_options import passed_as
from layout_tuner.cli.options.prediction_options import FILE, written_out
from layout_tuner.cli.options.refusals import refusals

if TYPE_CHECKING:
    from layout_tuner.predictions.job_plan import JobAsked

log_option: Final = click.option(
    "--log",
    type=FILE,
    metavar="LOG",
    help="What its trainer printed: the measured step calibrates the predictions.",
)


def _asked(
    model: str | None,
    seq_length: int | None,
    stated: tuple[str, ...],
    job_name: str,
    nodes: int | None = None,
) -> JobAsked:
    from layout_tuner.predictions.job_plan import JobAsked
    from layout_tuner.trainers.found_jobs.stated_fields import read_stated

    with refusals():
        return JobAsked(
            num_nodes=nodes,
            model=model,
            seq_length=seq_length,
            stated=read_stated(stated),
            job=job_name,
        )


def on_cluster(asked: JobAsked, cluster: str | None, data_dir: Path | None) -> JobAsked:
    """The same on a cluster, whose name may be a preset's, the service's or a file's."""
    from dataclasses import replace

    named: Any = cluster if cluster is None else written_out(cluster, data_dir)
    return replace(asked, cluster=named)


_STATED: Final = (
    click.option(
        "--model",
        metavar="MODEL",
        help="Its model, where its file does not state the shape: a preset, or a file such as "
        "config.json.",
    ),
    click.option(
        "--seq-length",
        type=click.IntRange(min=1),
        help="Tokens of a sequence, over those of its file and of the model.",
    ),
    click.option(
        "--set",
        "stated",
        multiple=True,
        metavar="FIELD=VALUE",
        help="A field of the job over its file's, such as recompute=full; may be repeated.",
    ),
    click.option("--job", "job_name", default="", help="Which job, where the file has several."),
)
_NAMES: Final = ("model", "seq_length", "stated", "job_name")

found_job_options: Final = passed_as(
    "asked",
    lambda **named: _asked(**named, nodes=click.get_current_context().params["nodes"]),
    _NAMES,
    *_STATED,
)
"""Adds what is stated beside a job's file; passes on a `JobAsked` without its cluster. The command
has an option --nodes of its own."""
found_job_options_and_nodes: Final = passed_as(
    "asked",
    _asked,
    ("nodes", *_NAMES),
    click.option(
        "--nodes",
        type=click.IntRange(min=1),
        help="Nodes of the job, over those of its file.",
    ),
    *_STATED,
)
"""The same with that option."""
