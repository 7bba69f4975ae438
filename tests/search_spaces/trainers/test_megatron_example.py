from __future__ import annotations

from pathlib import Path

import yaml

from search_spaces.trainers.program import read_trainers
from search_spaces.trainers.registry import ADAPTERS

EXAMPLES = Path(__file__).parents[3] / "examples" / "trainers"


def test_the_entry_of_megatron_lm_is_read_and_states_what_the_arguments_leave_out() -> None:
    document = yaml.safe_load((EXAMPLES / "trainers.yaml").read_text())
    entry = read_trainers(document, str(EXAMPLES))["megatron-lm"]
    assert ADAPTERS[entry.adapter].name == "megatron-lm"
    assert "{arguments}" in entry.command
    for flag in ("--train-iters={steps}", "--lr={learning_rate}", "--mock-data"):
        assert flag in entry.command
