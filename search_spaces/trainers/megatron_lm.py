"""Megatron-LM's pretrain_gpt.py.

The flags are those of `megatron/training/arguments.py` (many are generated there from dataclasses).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.trainers.base import TrainerAdapter, TrainerJob


def _refusals(job: TrainerJob) -> list[str]:
    if job.layout.zero_stage == 1 and job.layout.precision == "fp32":
        return [
            "zero_stage=1 with precision=fp32 has no counterpart: Megatron-LM's distributed optimizer "
            "needs bf16 or fp16; export a trial of zero_stage 0, or search with precision bf16"
        ]
    return []


def argument_groups(job: TrainerJob) -> list[list[str]]:
    """The arguments, in groups that stand on a line each."""
    layout = job.layout
    return [
        *_parallel_flags(layout),
        ["--micro-batch-size", str(layout.micro_batch_size)],
        ["--global-batch-size", str(layout.global_batch_size)],
        *_model_flags(job.model),
        *([] if layout.precision == "fp32" else [[f"--{layout.precision}"]]),
        *_recompute_flags(layout),
        ["--seed", str(job.seed + 1)],  # Megatron-LM refuses a seed of 0
    ]


def _arguments(job: TrainerJob) -> Sequence[str]:
    return [word for group in argument_groups(job) for word in group]


def _parallel_flags(layout: Layout) -> list[list[str]]:
    flags = [
        ["--tensor-model-parallel-size", str(layout.tp)],
        ["--pipeline-model-parallel-size", str(layout.pp)],
    ]
    if layout.vpp > 1:
        flags.append(["--num-virtual-stages-per-pipeline-rank", str(layout.vpp)])
    if layout.sequence_parallel:
        flags.append(["--sequence-parallel"])
    if layout.zero_stage == 1:
        flags += [
            ["--use-distributed-optimizer"],
            ["--overlap-grad-reduce"],
            ["--overlap-param-gather"],
        ]
    if layout.zero_replicas > 1:
        flags.append(["--num-distributed-optimizer-instances", str(layout.zero_replicas)])
    return flags


def _model_flags(model: ModelShape) -> list[list[str]]:
    flags = [
        ["--num-layers", str(model.num_layers)],
        ["--hidden-size", str(model.hidden_size)],
        ["--ffn-hidden-size", str(model.ffn_hidden_size)],
        ["--num-attention-heads", str(model.num_heads)],
        ["--seq-length", str(model.seq_length)],
        ["--max-position-embeddings", str(model.seq_length)],
        # No padding of the vocabulary, as in the probe.
        ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size)],
        ["--make-vocab-size-divisible-by", "1"],
        ["--attention-dropout", "0.0", "--hidden-dropout", "0.0"],
    ]
    if model.num_kv_heads != model.num_heads:
        flags.append(["--group-query-attention", "--num-query-groups", str(model.num_kv_heads)])
    if model.family == "llama":
        flags += [
            ["--normalization", "RMSNorm"],
            ["--swiglu", "--disable-bias-linear"],
            ["--position-embedding-type", "rope"],
        ]
    else:
        flags.append(["--position-embedding-type", "learned_absolute"])
    if not model.tied_embeddings:
        flags.append(["--untie-embeddings-and-output-weights"])
    return flags


def _recompute_flags(layout: Layout) -> list[list[str]]:
    if layout.recompute == "selective":
        return [["--recompute-granularity", "selective"]]
    if layout.recompute == "full":
        # uniform, one layer at a time: every block is recomputed from its own input
        return [
            ["--recompute-granularity", "full"],
            ["--recompute-method", "uniform", "--recompute-num-layers", "1"],
        ]
    return []


def _notes(job: TrainerJob) -> list[str]:
    layout = job.layout
    notes = [
        "Megatron-LM derives dp and the number of micro-batches from the world size: start exactly "
        f"{layout.num_devices} ranks ({job.ranks_per_node} on each of {layout.num_nodes} nodes)",
        f"seed {job.seed} of the campaign is --seed {job.seed + 1}: Megatron-LM refuses 0",
    ]
    if layout.precision == "fp32":
        notes.append("without --bf16 or --fp16 Megatron-LM trains in fp32, as the probe did")
    if job.compile:
        notes.append(
            "the probe's compile=true has no flag here: Megatron-LM brings fused kernels of its own"
        )
    return notes


MEGATRON_LM: Final = TrainerAdapter(
    name="megatron-lm",
    target_version="Megatron-LM of 2026-08 (d98e8a64)",
    needs="a checkout of Megatron-LM in MEGATRON_DIR",
    refusals=_refusals,
    arguments=_arguments,
    notes=_notes,
)
