"""`layout-tuner export --into`: a layout in a copy of the user's own launch script or file."""

from __future__ import annotations

import codecs
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import click

from layout_tuner.cli.options.refusals import refusals, refuse, writing
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.exports.exported import ExportRead
from layout_tuner.trainers.found_jobs.into.rewritten_file import rewritten
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.found_jobs.stated_fields import read_stated

ANY_PROGRAM: Final = COMMAND.name
"""The format in which the layout is asked for: it refuses none. The user's file may say what the
files of an export cannot."""


def write_into(
    path: Path,
    exported: Callable[[str, str], tuple[ExportRead, str]],
    *,
    job_name: str,
    stated: Iterable[str],
    out: Path | None,
    force: bool,
) -> None:
    """Writes a layout into a copy of a file, and prints the difference.

    Args:
        path: the user's launch script or configuration.
        exported: gives the layout for a trainer, written in a format, and a phrase that names it.
        job_name: which job of the file, where it has several.
        stated: fields that the user states of the file, as FIELD=VALUE.
        out: folder of the copy; None: beside the file, under another name.
        force: whether a file that is there is overwritten.
    """
    with refusals():
        file = JobFile.open(path)
        fields = read_stated(stated)
        bundle, what = exported(read_job(file, job_name).trainer, ANY_PROGRAM)
        if not bundle.layout:
            refuse("the service is too old for --into: it does not say the layout of an export")
        job = TrainerJob(
            model=ModelShape.from_mapping(bundle.model), layout=Layout.from_mapping(bundle.layout)
        )
        result = rewritten(file, job, name=job_name, stated=fields)
    target = path.with_stem(f"{path.stem}-tuned") if out is None else out / path.name
    if os.path.lexists(target) and not force:
        raise click.ClickException(f"{target} exists; choose another --out, or --force")
    with writing(target, "written to"):
        _write(path, target, result.file.text)
    click.echo(result.diff(target.name), nl=False)
    is_other = f"{what}, in place of the layout of {path.name}"
    click.echo(is_other if result.is_changed else f"{path.name} has this layout already: {what}")
    click.echo(f"  {target}")
    # What is about files for any program is left out: none is written here.
    kept = (each.partition(f"; this file is for {ANY_PROGRAM}")[0] for each in bundle.notes)
    for note in [*(each for each in kept if each not in COMMAND.notes(job)), *result.notes]:
        click.echo(f"note: {note}")


def _write(path: Path, target: Path, text: str) -> None:
    """Writes the copy, with the marks and rights of the original."""
    content = text.encode()
    with path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            content = codecs.BOM_UTF8 + content
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(content)
    shutil.copymode(path, partial)
    partial.replace(target)
