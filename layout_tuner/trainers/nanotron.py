"""nanotron's run_train.py, as of the release 0.4.

The keys are those of `config/*.py` of the release. The main branch has others: `data_stages` in
place of `data`, the Adam keys in `optimizer.optimizer_factory`, and `parallelism.recompute_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import (
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    kv_heads_rule,
    lacking_knobs,
    shape_rules,
)
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern

_STEPS: Final = 100
_ROTARY_BASE: Final = 10000.0
"""nanotron 0.4 has no key for it."""

ENGINES: Final = {"1f1b": "1f1b", "gpipe": "afab"}
"""The names that nanotron gives to schedules."""

_LOG: Final = LogPatterns(
    variants=(
        StepPattern(
            source="nanotron 0.1 to 0.5 and later",
            pattern=(
                r"iteration: (?P<index>\d+) / \d+ \|"
                r"(?:.*?\| lm_loss: (?P<loss>nan|inf|\d[\d.]*(?:e[-+]?\d+)?)E?(?: \||$))?"
            ),
        ),
    )
)
"""Times and rates are rounded to three digits and get a K or an M: they are not read, nor is a loss
of 1.2K. They are of the last step alone. An infinite loss is printed as infE."""


def _lacking(job: TrainerJob) -> dict[str, str]:
    layout = job.layout
    lacking = lacking_knobs(layout, "nanotron", "vpp", "zero_replicas")
    if sum(layout.counted_ends):
        lacking["pipeline_split"] = (
            "nanotron cuts stages of about equal work, and cannot be told how; without the choice the "
            "first stages have more layers and the last one fewer"
        )
    if layout.zero_stage > 1:
        lacking["zero_stage"] = (
            f"nanotron has ZeRO-1 and no zero_stage={layout.zero_stage}; without it every replica holds "
            "whole weights, gradients and optimizer states, which need more memory"
        )
    if layout.recompute != "none":
        lacking["recompute"] = (
            "nanotron 0.4 has no key for recomputation (its main branch has "
            "parallelism.recompute_layer); without it no activations are recomputed"
        )
    return lacking


def stage_blocks(model: ModelShape, pp: int) -> list[list[str]]:
    """The blocks of each stage, as `build_model` of `models/base.py` cuts them.

    It adds up the matrix elements of layers and head; after a block with which the sum is over the
    stage's share, the next stage begins.
    """
    layer = 4 * model.hidden_size**2 + 3 * model.ffn_hidden_size * model.hidden_size
    head = model.vocab_size * model.hidden_size
    blocks = [("embedding", 0), *[("layer", layer)] * model.num_layers]
    blocks += [("norm", 0), ("head", head), ("loss", 0)]
    stages: list[list[str]] = [[] for _ in range(pp)]
    stage, done, total = 0, 0, sum(cost for _, cost in blocks)
    for name, cost in blocks:
        stages[stage].append(name)
        done += cost
        stage += done > total * ((stage + 1) / pp)
    return stages


def _empty_stages(layout: Layout, model: ModelShape) -> list[int]:
    """The stages without weights, counted from 1."""
    stages = enumerate(stage_blocks(model, layout.pp), 1)
    return [number for number, blocks in stages if set(blocks) <= {"loss"}]


_RULES: Final = (
    TrainerRule(
        name="family",
        source="config/models_config.py, NanotronConfigs",
        broken=lambda _, model: model.family != "llama",
        sentence=lambda _, model: (
            f"family={model.family} has no counterpart in nanotron, which trains Llama and "
            "Starcoder2; search with a model of family llama"
        ),
    ),
    TrainerRule(
        name="cp",
        source="config/parallelism_config.py, ParallelismArgs",
        versions="0.4",
        broken=lambda layout, _: layout.cp > 1,
        sentence=lambda layout, _: (
            f"cp={layout.cp}: nanotron 0.4 has no context parallelism (its main branch has "
            "parallelism.context_parallel_size); export a trial with cp=1"
        ),
    ),
    TrainerRule(
        name="precision",
        source="models/llama.py, CoreAttention: flash_attn_varlen_func",
        broken=lambda layout, _: layout.precision != "bf16",
        sentence=lambda layout, _: (
            f"precision={layout.precision}: nanotron's attention takes 16-bit numbers only, and it "
            "has no loss scaling for fp16; search with precision bf16"
        ),
    ),
    TrainerRule(
        name="vocabulary",
        source="trainer.py, _vocab_size_with_padding",
        broken=lambda layout, model: model.vocab_size % layout.tp != 0,
        sentence=lambda layout, model: (
            f"vocab_size={model.vocab_size} is not divisible by tp={layout.tp}; nanotron would "
            "pad it"
        ),
    ),
    kv_heads_rule("nanotron", "models/llama.py, CausalSelfAttention"),
    TrainerRule(
        name="microbatches_of_1f1b",
        source="parallel/pipeline_parallel/engine.py, OneForwardOneBackwardPipelineEngine",
        broken=lambda layout, _: (
            layout.schedule == "1f1b" and layout.num_microbatches < layout.pp - 1
        ),
        sentence=lambda layout, _: (
            f"num_microbatches={layout.num_microbatches} is less than pp-1={layout.pp - 1}, "
            "which nanotron's 1f1b needs; export a trial with more micro-batches, or one with "
            "schedule=gpipe"
        ),
    ),
    TrainerRule(
        name="stages_with_weights",
        source="models/base.py, build_model and check_model_has_grad",
        broken=lambda layout, model: bool(_empty_stages(layout, model)),
        sentence=lambda layout, model: (
            f"nanotron cuts stages by their matrix elements, and would give stage "
            f"{_empty_stages(layout, model)[0]} of {layout.pp} no weights, since the head of "
            f"vocab_size={model.vocab_size} weighs as much as several layers; export a trial with a "
            "smaller pp"
        ),
    ),
    *shape_rules("nanotron 0.4", "config/models_config.py, LlamaConfig"),
    TrainerRule(
        name="rotary_base",
        source="models/llama.py, CausalSelfAttention",
        versions="0.4",
        broken=lambda _, model: model.rotary_base != _ROTARY_BASE,
        sentence=lambda _, model: (
            f"rotary_base={model.rotary_base:g} has no counterpart: nanotron 0.4 has 10000 only"
        ),
    ),
)


def _values(job: TrainerJob) -> Mapping[str, Any]:
    layout = job.layout
    return {
        "general": {"project": "layout-tuner", "run": layout.key, "seed": job.seed},
        "parallelism": {
            "dp": layout.dp,
            "tp": layout.tp,
            "pp": layout.pp,
            "expert_parallel_size": 1,
            "pp_engine": ENGINES[layout.schedule],
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            # nanotron refuses it with ALL_REDUCE
            "tp_linear_async_communication": layout.sequence_parallel,
        },
        "tokens": {
            "sequence_length": job.model.seq_length,
            "train_steps": _STEPS,
            "micro_batch_size": layout.micro_batch_size,
            "batch_accumulation_per_replica": layout.num_microbatches,
        },
        "model": _model(job),
        "optimizer": _optimizer(job),
        "tokenizer": {"tokenizer_name_or_path": None},
        # no dataset: nanotron draws tokens at random
        "data": {"dataset": None, "seed": job.seed, "num_loading_workers": 1},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": _STEPS + 1},
        "logging": {"log_level": "info", "iteration_step_info_interval": 1},
    }


def _model(job: TrainerJob) -> dict[str, Any]:
    model = job.model
    return {
        "dtype": "bfloat16",
        "init_method": {"std": 0.02},
        "make_vocab_size_divisible_by": 1,
        "model_config": {
            "is_llama_config": True,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "max_position_embeddings": model.seq_length,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": model.tied_embeddings,
            "vocab_size": model.vocab_size,
        },
    }


def _optimizer(job: TrainerJob) -> dict[str, Any]:
    return {
        "zero_stage": job.layout.zero_stage,
        "accumulate_grad_in_fp32": True,
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "torch_adam_is_fused": True,
        "learning_rate_scheduler": {
            "learning_rate": 1e-4,
            "lr_warmup_steps": 2,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": 1e-5,
        },
    }


def _notes(job: TrainerJob) -> list[str]:
    notes = [
        "the file has random tokens, and a learning rate of its own: set data, tokenizer and "
        "optimizer",
        "nanotron's main branch has other keys: data_stages, optimizer.optimizer_factory and "
        "parallelism.recompute_layer",
    ]
    if job.layout.pp > 1:
        stages = stage_blocks(job.model, job.layout.pp)
        layers = ", ".join(str(blocks.count("layer")) for blocks in stages)
        notes.append(
            f"nanotron cuts stages by their matrix elements: they have {layers} layers, instead of "
            "equally many as measured"
        )
    if job.compile:
        notes.append("the probe's compile=true has no key in nanotron")
    return notes


NANOTRON: Final = TrainerAdapter(
    name="nanotron",
    target_version="nanotron 0.4",
    needs="nanotron 0.4 with flash-attn, its repository in NANOTRON_DIR, and a GPU",
    lacking=_lacking,
    schedules=ENGINES,
    rules=_RULES,
    layout_values=_values,
    placement_paths=(
        "parallelism",
        "tokens.micro_batch_size",
        "tokens.batch_accumulation_per_replica",
        "optimizer.zero_stage",
    ),
    notes=_notes,
    log=_LOG,
)
