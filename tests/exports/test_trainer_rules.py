"""What an adapter refuses by a rule of its trainer, the trainer's own builder refuses too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS
from layout_tuner.search_spaces.untrained_models import UNTRAINED
from layout_tuner.trainers.adapter import SHAPE_FIELDS, TrainerJob
from layout_tuner.trainers.registry import ADAPTERS
from tests.exports.exported_files import ENVIRONMENTS, LLAMA, READERS, written_job
from tests.exports.trainer_environments import reading

pytestmark = [pytest.mark.exports, pytest.mark.timeout(300)]

BF16: Final = {"precision": "bf16"}
SHAPE: Final = dict.fromkeys(
    SHAPE_FIELDS, "the export writes no such field, and would train another model"
)
ATTENTION: Final = dict.fromkeys(ATTENTION_FIELDS, SHAPE["num_experts"])

Case = tuple[dict[str, Any], dict[str, Any], str]
"""Of a job that breaks a rule: fields of the model, knobs, and a part of the builder's message."""

_FEW: Final = {"pp": 4, "num_microbatches": 3}
_OF_TITAN: Final[dict[str, Case]] = {
    "copies_of_shards": ({}, {"dp": 3, "zero_stage": 3, "zero_replicas": 2}, "WORLD_SIZE(3)"),
    "even_stages": ({"num_layers": 7}, {"pp": 2, "num_microbatches": 2}, "divisible by"),
    "microbatches_of_1f1b": ({}, _FEW, "must be greater than or equal to the number of stages (4)"),
}
BROKEN: Final[dict[str, dict[str, Case]]] = {
    "deepspeed": {
        "zero_in_pipeline": ({}, {"pp": 2, "dp": 2, "zero_stage": 2}, "ZeRO-2 and ZeRO-3"),
        "ep_in_pipeline": ({}, {"pp": 2, "dp": 2, "ep": 2}, "no MoE layers detected"),
    },
    "megatron-lm": {
        "sizes_divide": ({}, {"tp": 5}, "must be a multiple of tensor_model_parallel_size (5)"),
    },
    "torchtitan-0.2": {
        **_OF_TITAN,
        "sequence": ({"seq_length": 254}, {"tp": 2}, "must be divisible by the product of TP"),
    },
    "torchtitan-0.3": {
        **_OF_TITAN,
        "kv_heads": ({}, {"tp": 16}, "(16) must divide n_kv_heads (8)"),
        "sequence": (
            {"seq_length": 511},
            {"tp": 2, "sequence_parallel": True},
            "(511) must be divisible by 2",
        ),
        "tied_embeddings": (
            {"tied_embeddings": True},
            {"pp": 2, "num_microbatches": 2},
            "Weight tying is not supported with Pipeline Parallel",
        ),
    },
    "nanotron": {
        "microbatches_of_1f1b": (
            {"vocab_size": 320},
            {**BF16, "pp": 4, "num_microbatches": 2},
            "Number of microbatches (2) must be at least PP_SIZE-1=3",
        ),
        "stages_with_weights": (
            {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 2048, "vocab_size": 50304},
            {**BF16, "pp": 4, "num_microbatches": 4, "dp": 2},
            "model in PP=3 has no gradient",
        ),
    },
    "axonn": {
        "depth": (
            {"ffn_hidden_size": 99, "hidden_size": 96},
            {"dp": 64, "zero_stage": 3},
            "AssertionError",
        ),
    },
}
"""By adapter and rule, a job that breaks it, as the export would be without the rule."""

NOT_BUILT: Final[dict[str, dict[str, str]]] = {
    "deepspeed": {
        "cp": "the configuration has no key for it: the ranks would be replicas",
        "tp_in_pipeline": "nothing checks it: AutoTP shards the layers of a stage, or none",
        "mics_was_removed": "the key is gone; test_round_trips.py writes it",
        "narrow_precision": "the configuration has no key for it",
    },
    "megatron-lm": {
        "ranks_of_nodes": "the launcher's",
        "rank_order_of_fsdp": "Megatron-Bridge's, which needs Transformer Engine",
        "whole_rotary_base": "the export rounds it, for a flag of whole numbers",
        "unfused_over_cp": "Transformer Engine's, on the device",
        "lacking_fields": "the flags are other models', or fail in a layer, on the device",
        "geglu": "the export writes no flag, and would train another model",
        "modules_of_all_layers": "the export writes no number of layers beside modules",
        "distributed_optimizer": "its program's arguments, which need a device",
    },
    "torchtitan-0.2": {
        **SHAPE,
        **ATTENTION,
        "family": "the export trains llama3",
        "narrow_precision": "the configuration has no such converter",
        "kv_heads": "the first step, on the device",
        "tied_embeddings": "the export writes no such field, and would train another model",
    },
    "torchtitan-0.3": {
        **SHAPE,
        **ATTENTION,
        "family": "the export trains llama3",
        "narrow_precision": "the export writes no such field",
    },
    "nanotron": {
        **SHAPE,
        **ATTENTION,
        "family": "the export trains Llama",
        "cp": "the configuration has no key for it",
        "precision": "flash-attn, on the device",
        "vocabulary": "nanotron pads the vocabulary",
        "kv_heads": "the layer, on the device",
        "rotary_base": "the configuration has no key for it",
    },
    "axonn": {
        **SHAPE,
        **ATTENTION,
        "pp": "the layers have no stages",
        "cp": "the layers have no such axis",
        "narrow_precision": "the script's",
    },
    "embedded": dict.fromkeys((*ATTENTION_FIELDS, *UNTRAINED), "its own tests refuse it"),
    "accelerate": {
        **SHAPE,
        **ATTENTION,
        "narrow_precision": "the plugin does not pass it on",
        "recipe": "there is no key",
    },
    "megatron-deepspeed": {
        **SHAPE,
        "narrow_precision": "the configuration has no key for it",
        "zero_in_pipeline": "DeepSpeed's, as above",
        "flash_precision": "the first step, on the device",
        **dict.fromkeys(
            (
                *("ranks_of_nodes", "sizes_divide", "rank_order_of_fsdp", "whole_rotary_base"),
                *("modules_of_all_layers", "distributed_optimizer"),
            ),
            "Megatron-LM's, as above",
        ),
        **dict.fromkeys(
            ("cp_alone", "two_sequence_parallelisms", "exchanged_heads"),
            "no package index has it; by hand, from a checkout of f4157bea",
        ),
    },
}
"""By adapter and rule, why no builder can be asked here."""


@pytest.mark.parametrize("name", BROKEN)
def test_the_builder_refuses_what_breaks_a_rule(name: str, tmp_path: Path) -> None:
    rules = {rule.name: rule for rule in ADAPTERS[name].rules}
    with reading(ENVIRONMENTS.get(name, name), READERS[name][1]) as ask:
        for broken, (shape, knobs, said) in BROKEN[name].items():
            layout, model = Layout(**knobs), replace(LLAMA, **shape)
            assert rules[broken].broken(layout, model), broken
            job = TrainerJob(model=model, layout=layout)
            answer = ask(written_job(tmp_path / broken, name, job), layout.num_devices)
            assert said in answer.get("refused", ""), (broken, answer)


OF_A_RELATIVE = ("torchtitan-main", "megatron-bridge")
"""Adapters whose rules are another one's."""


@pytest.mark.parametrize(
    "name", [each for each in ADAPTERS if ADAPTERS[each].rules and each not in OF_A_RELATIVE]
)
def test_every_rule_is_built_or_says_why_it_cannot_be(name: str) -> None:
    rules = [rule.name for rule in ADAPTERS[name].rules]
    assert sorted(rules) == sorted([*BROKEN.get(name, {}), *NOT_BUILT[name]])
