"""Trainers by name. The embedded one is the default; the others run the users' own training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from search_spaces.trainers.accelerate import ACCELERATE
from search_spaces.trainers.axonn import AXONN
from search_spaces.trainers.base import TrainerAdapter
from search_spaces.trainers.command import COMMAND
from search_spaces.trainers.deepspeed import DEEPSPEED
from search_spaces.trainers.embedded import EMBEDDED
from search_spaces.trainers.megatron_bridge import MEGATRON_BRIDGE
from search_spaces.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from search_spaces.trainers.megatron_lm import MEGATRON_LM
from search_spaces.trainers.nanotron import NANOTRON
from search_spaces.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_0_3, TORCHTITAN_MAIN

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
