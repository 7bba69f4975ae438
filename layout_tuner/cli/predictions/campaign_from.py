"""The command `layout-tuner campaign from`: a campaign whose baseline is a job that runs today."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.cli.options.found_job_options import (
    found_job_options_and_nodes,
    log_option,
    on_cluster,
)
from layout_tuner.cli.options.prediction_options import (
    FILE,
    campaign_cluster_option,
    constants_dir_option,
)
from layout_tuner.cli.options.refusals import fail, refusals, writing
from layout_tuner.documents.numbers import core_value

if TYPE_CHECKING:
    from layout_tuner.predictions.job_plan import JobAsked, JobCampaign
    from layout_tuner.trainers.found_jobs.probing.probe_entry import ProbeEntry

_WIDTH: Final = 98
"""Characters of a comment's text."""


@click.command("from")
@click.argument("file", type=FILE)
@click.option("--out", type=FILE, required=True, help="The campaign's file to write.")
@click.option(
    "--trainers-out",
    type=FILE,
    help="The worker's file of trainers to write.  [default: that of --out with -trainers]",
)
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@found_job_options_and_nodes
@log_option
@campaign_cluster_option
@constants_dir_option
def campaign_from(
    file: Path,
    out: Path,
    trainers_out: Path | None,
    force: bool,
    asked: JobAsked,
    log: Path | None,
    cluster: str | None,
    data_dir: Path | None,
) -> None:
    """Write the campaign of the job in FILE, and the trainer's entry that probes it.

    FILE is a launch script or a trainer's configuration; nothing in it is executed. Its layout is
    the campaign's baseline. The entry is the script's own command with placeholders where it sets
    the layout: give it to `layout-tuner worker --trainers`. With --log, the measured step is
    written as a measurement table beside the campaign, for `campaign import` and --calibrate-from.
    It needs no service.
    """
    from layout_tuner.cli.predictions.job_report import found_lines
    from layout_tuner.predictions.job_plan import job_campaign, probe_entry_of

    trainers_out = trainers_out or out.with_name(f"{out.stem}-trainers.yaml")
    table_out = out.with_name(f"{out.stem}-log.csv")
    for path in (out, trainers_out, *([table_out] if log else [])):
        if path.exists() and not force:
            option = "--trainers-out" if path == trainers_out else "--out"
            fail(f"{path} exists; choose another {option}, or --force")
    with refusals():
        found = job_campaign(file, on_cluster(asked, cluster, data_dir), log=log, data_dir=data_dir)
        entry = probe_entry_of(found, file)
    for line in found_lines(found, None):
        click.echo(line)
    _write(out, _campaign_text(found, entry))
    click.echo(f"wrote the campaign: {out}")
    if isinstance(entry, str):
        click.echo(f"no entry of a trainer: {entry}")
    else:
        comments = [f"The trainer of {out.name}, from {file.name}.", *entry.remarks]
        text = [*_comments(comments), _yaml({"trainers": [entry.entry]})]
        _write(trainers_out, "\n".join(text))
        click.echo(f"wrote the trainer's entry: {trainers_out}")
        for remark in entry.remarks:
            click.echo(f"  {remark}")
    if found.log is not None:
        _write(table_out, found.table)
        click.echo(
            f"wrote the measured step, {found.log.step_time_s:.4g} s over {found.log.num_steps} "
            f"steps{f' of the last of {found.log.num_runs} runs' * (found.log.num_runs > 1)}: {table_out}"
        )


def _campaign_text(found: JobCampaign, entry: ProbeEntry | str) -> str:
    from layout_tuner.trainers.found_jobs.found_job import job_lines

    job = found.job.found
    head = [f"The job of {job.file} is the baseline. What is said of it stands here:"]
    lists = [*job_lines(job), *(f"warning: {each}" for each in found.remarks)]
    document = dict(found.document)
    words = [] if isinstance(entry, str) else entry.entry["command"]
    if not any("{num_layers}" in word for word in words):
        # A probe of fewer layers would run all of them.
        document["probe"] = {**document["probe"], "fidelity": "full"}
    for knob in () if isinstance(entry, str) else entry.fixed:
        document["space"] = {**document["space"], knob: document["baseline"][knob]}
    return "\n".join([*_comments(head), *_comments(lists), _yaml(document)])


def _comments(lines: list[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        yield from (f"# {each}" for each in wrapped)


def _yaml(document: Mapping[str, Any]) -> str:
    """YAML that our reader reads back: it takes 1e-4 for a number, which PyYAML leaves bare."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Dumper, word: str) -> yaml.ScalarNode:
        style = None if core_value(word) == word else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", word, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(
        dict(document), Dumper=Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True
    )


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")
