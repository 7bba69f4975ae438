"""Which options of Megatron's family are listed, and which are irrelevant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from layout_tuner.search_spaces.models.foreign_words import words_of as words_of_text
from layout_tuner.trainers.found_jobs.megatron.megatron_flags import is_irrelevant
from layout_tuner.trainers.found_jobs.megatron.megatron_options import named
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from tests.layout_tuner.trainers.found_jobs.megatron.command_lines import (
    GPT,
    LLAMA,
    MOE,
    PLACED,
    found,
    open_of,
)

RELEVANT: Final = re.compile(
    r"parallel|pipeline|recompute|batch-size|num-layers|layer-freq|hidden-size|heads|num-experts"
    r"|topk|fp8-format|fp4-format|bf16|fp16|offload|window|normalization|position-embedding|seq-len"
    r"|vocab-size|latent|mtp-num|shard|kv-channels|untie|swiglu|distributed-optimizer|fsdp|dropout"
)


WITHOUT_EFFECT: Final = re.compile(
    r"--(no-|disable-|use-)?(bert|ckpt|dino|dist-ckpt|inference|rl|data-parallel-random|eval|retro|ict"
    r"|indexer|mask|mup|dsa|mamba|linear|kd|vision|biencoder|logits|retriever|log|langrl)-?\S*"
    r"|--(pipeline-model-parallel-comm-backend|decoder-seq-length|fp16-lm-cross-entropy"
    r"|decrease-batch-size-if-needed|moe-router-(group-topk|topk-scaling-factor)|no-data-sharding"
    r"|disable-bf16-reduced-precision-matmul|disable-fp8-wgrad|moe-expert-\S+|\S+-teacher"
    r"|fsdp-(db|manual)\S+|enable-full-sharding-in-hsdp|disable-strict-fsdp-\S+|no-strict-fsdp-\S+"
    r"|rotary-seq-len-\S+|adlr-\S+|no-async-tensor-model-parallel-\S+|calc-\S+|max-seqlen-\S+"
    r"|cache-mla-latents|gdp-\S+|mhc-\S+|mtp-detach-heads|no-bias-(dropout|swiglu)-fusion|yarn-\S+"
    r"|loss-scale-window|data-parallel-sharding-strategy|no-scatter-gather-\S+|no-pad-vocab-size|disable-pad-vocab-size|moe-pad-experts-\S+|no-ckpt-\S+|tp-comm-\S+|distrib-optim-\S+|num-dataset-\S+)"
)
"""Options with such a word that change nothing of layout, model, batch and precision: of other
programs, of files, of kernels."""


DATA_LOGS_AND_SAVING: Final = words_of_text(
    """
    --data-path --split --mock-data --num-workers --log-interval --log-throughput --tensorboard-dir
    --wandb-project --save --load --save-interval --ckpt-format --async-save --lr --min-lr --seed
    --lr-decay-style --weight-decay --clip-grad --adam-beta1 --train-iters --train-samples
    --eval-iters --eval-interval --exit-duration-in-mins --distributed-timeout-minutes --no-load-rng
    --init-method-std --norm-epsilon --manual-gc --moe-router-load-balancing-type
    --moe-aux-loss-coeff --no-gradient-accumulation-fusion --distributed-backend --merge-file
    --use-mcore-models --no-masked-softmax-fusion --loss-scale --attention-softmax-in-fp32
    """
)


@pytest.mark.parametrize("adapter", [MEGATRON_LM, MEGATRON_DEEPSPEED], ids=lambda each: each.name)
def test_every_option_of_the_trainer_is_read_listed_or_known_to_be_irrelevant(adapter: Any) -> None:
    name = f"{adapter.name.replace('-', '_')}_flags.txt"
    flags = (Path(__file__).parents[2] / name).read_text().split()
    options = f"{MOE} --window-size 8,0"
    if adapter is MEGATRON_DEEPSPEED:
        options = f"{GPT} {PLACED} --deepspeed"
    base = found(options)
    for flag in flags:
        job = found(f"{options} {flag} 3")
        unknown = [each for each in job.not_understood if "known here" in each.why]
        assert not unknown, flag
        is_other = job.values != base.values or job.not_understood != base.not_understood
        if RELEVANT.search(flag) and not WITHOUT_EFFECT.fullmatch(flag):
            assert is_other or not is_irrelevant(named(flag)), flag
        if flag in DATA_LOGS_AND_SAVING:
            assert not is_other, flag


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--use-fused-swiglu", ""),
        ("--reuse-fp32-param", ""),
        ("--sliding-window 4096", "model.attention_window"),
        ("--n-head-kv 8", "model.num_kv_heads"),
        ("--moe-layer-pattern 1", "model.num_dense_layers"),
        ("--overlapped-distributed-optimizer", "zero_stage"),
        ("--sharded-fsdp", "zero_stage"),
        ("--recompute-in-my-way", "recompute"),
        ("--glu-activation swiglu", "model.family"),
        ("--row-tensor-model-parallel-size 2", "tp"),
        ("--extra-vocab-size 293", "model.vocab_size"),
        ("--my-own-thing 3", ""),
        ("--num-experts-switch 8", "model.num_experts"),
        ("--train-batch-size 8", "global_batch_size"),
        ("--data-parallel-size 8", "dp"),
        ("--load-fp8-weights", "precision"),
    ],
)
def test_an_option_of_a_fork_is_listed_with_the_field_that_it_may_set(
    option: str, name: str
) -> None:
    job = found(f"{LLAMA} {PLACED} {option} --log-a-fork-of-mine 3")
    assert [(each.said, each.field) for each in job.not_understood] == [(option, name)]


def test_what_a_variable_may_hold_behind_an_option_is_listed() -> None:
    job = found(f"{LLAMA} {PLACED} --log-interval 1 ?EXTRA_ARGS --data-path ?A ?B")
    assert [(each.said, each.field) for each in job.not_understood] == [("$EXTRA_ARGS", "")]


def test_long_and_hostile_values_are_one_entry_each() -> None:
    for text in ("1" * 5000, "-1", "1e9", "０", "4.0", "x"):
        job = found(f"{LLAMA} --micro-batch-size 1 --tensor-model-parallel-size={text}")
        assert "tp" in open_of(job), text
    long = "--pipeline-model-parallel-size 999999999999 --decoder-first-pipeline-num-layers 1"
    assert "pipeline_split" in open_of(found(f"{LLAMA} --micro-batch-size 1 {long}"))
    stages = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    for text in ("(t|)*9999" * 3, "((t|)*9)*9", "E" + "t" * 5000 + "L"):
        job = found(f"{LLAMA} --micro-batch-size 1 {stages} {text}")
        assert "pipeline_split" in open_of(job), text
