"""`layout-tuner trainer`: trainers, and the job knobs that campaigns can search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from layout_tuner.api.schemas.trainer_documents import TrainerKnobRead, TrainerPage, TrainerRead
from layout_tuner.cli.options.command_input import trainers_of
from layout_tuner.cli.options.refusals import refuse
from layout_tuner.cli.options.shared_options import trainers_option
from layout_tuner.cli.service.service_connection import (
    answers,
    service_when_called,
    without_service,
)
from layout_tuner.documents.reading import nearest, word_of
from layout_tuner.terminal.text_table import print_table
from layout_tuner.trainers.registry import ADAPTERS, adapter_named

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client


def _print_list(page: TrainerPage) -> None:
    rows = [
        (each.name, each.target_version, ", ".join(knob.name for knob in each.knobs) or "-")
        for each in page.trainers
    ]
    print_table(("trainer", "written for", "job knobs"), rows)


@click.command("list")
@answers(_print_list)
@service_when_called
def list_trainers(service: Callable[[], Client]) -> TrainerPage:
    """List trainers, those of the service's workers too, with the names of their job knobs."""
    return without_service(lambda: _all_of(service()), TrainerPage.of_adapters)


def _all_of(client: Client) -> TrainerPage:
    listed = client.trainers().trainers
    named = {name for worker in client.workers().workers for name in worker.trainers}
    others = sorted(named - {each.name for each in listed})
    return TrainerPage(trainers=[*listed, *map(client.trainer, others)])


def _print_trainer(trainer: TrainerRead) -> None:
    click.echo(f"{trainer.name}, {trainer.target_version}")
    if not trainer.knobs:
        click.echo("it has no job knobs")
        return
    print_table(
        ("knob", "values", "default", "only where", "losses"),
        [
            (
                each.name,
                _words(each.values)
                + (f" (any from {each.minimum})" if each.minimum != each.maximum else ""),
                "-" if each.default is None else word_of(each.default),
                each.when or "-",
                each.losses,
            )
            for each in trainer.knobs
        ],
    )
    for each in trainer.knobs:
        _print_knob(each)


def _print_knob(knob: TrainerKnobRead) -> None:
    click.echo(f"\n{knob.name}: {knob.help}" if knob.help else f"\n{knob.name}")
    for value, condition in knob.needs.items():
        click.echo(f"  {value} only where {condition}")
    for effect in knob.effects:
        source = f" [{effect.source}]" if effect.source else ""
        click.echo(f"  {word_of(effect.value)}: {effect.words}{source}")
    for line in knob.written:
        click.echo(f"  written as {line}")
    if knob.source:
        click.echo(f"  from {knob.source}")


def _words(values: list[bool | int | str]) -> str:
    return ", ".join(map(word_of, values))


@click.command("show")
@click.argument("name")
@trainers_option
@answers(_print_trainer)
@service_when_called
def show_trainer(
    name: str, trainers_file: Path | None, service: Callable[[], Client]
) -> TrainerRead:
    """Show the job knobs of a trainer: values, conditions, expected effects, how they are written.

    An effect is a factor on the named parts of a step, as far as they are exposed, with the two
    factors between which it is with 80 %. --trainers shows a program as its owner lets campaigns
    set its knobs. Of a trainer that a worker of the service has, the worker's knobs are shown.
    """
    if trainers_file is not None:
        programs = trainers_of(trainers_file)
        if name not in programs:
            refuse(f"{trainers_file} has no trainer {name}; it has {', '.join(programs)}")
        return TrainerRead.of_adapter(programs[name].named)
    return without_service(lambda: service().trainer(name), lambda: _of_this_version(name))


def _of_this_version(name: str) -> TrainerRead:
    adapter = adapter_named(name)
    if adapter is None:
        refuse(f"this version has no trainer {name}{nearest(name, ADAPTERS)}")
    return TrainerRead.of_adapter(adapter)
