"""Trainers by name. The embedded one is the default; the others run the users' own training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.trainers.accelerate import ACCELERATE
from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.axonn import AXONN
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from layout_tuner.trainers.nanotron import NANOTRON
from layout_tuner.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_0_3, TORCHTITAN_MAIN

ADAPTERS: Final[Mapping[str, TrainerAdapter]] = {
    adapter.name: adapter
    for adapter in (
        EMBEDDED,
        MEGATRON_LM,
        MEGATRON_DEEPSPEED,
        MEGATRON_BRIDGE,
        DEEPSPEED,
        TORCHTITAN_0_2,
        TORCHTITAN_0_3,
        TORCHTITAN_MAIN,
        NANOTRON,
        ACCELERATE,
        AXONN,
        COMMAND,
    )
}

ALIASES: Final[Mapping[str, str]] = {"trainer": EMBEDDED.name, "torchtitan": TORCHTITAN_0_3.name}
"""Other names of trainers: a former one, and a trainer's for its newest release."""


def full_name(name: str) -> str:
    """The name of a trainer that an alias stands for; any other name as it is."""
    return ALIASES.get(name, name)


def adapter_named(name: str) -> TrainerAdapter | None:
    """The adapter of a trainer's name or alias; None: a program of a worker, a table's source."""
    return ADAPTERS.get(full_name(name))


def knobs_of_software(software: str) -> Mapping[str, JobKnob]:
    """The catalogue of the trainer that a software's name has; empty: of no known trainer.

    The embedded trainer is nameless in tables, or has its own name.
    """
    words = software.lower()
    named = [name for name in ADAPTERS if name in words] or ["torchtitan"] * ("torchtitan" in words)
    # The longest: "megatron-deepspeed" has the name of another trainer in it.
    adapter = adapter_named(max(named, key=len) if named else "" if words else "embedded")
    return {} if adapter is None else adapter.job_knobs
