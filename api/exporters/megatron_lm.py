"""A launch script for Megatron-LM's pretrain_gpt.py.

The flags are those of `megatron/training/arguments.py` (many are generated there from dataclasses).
"""

from __future__ import annotations

import shlex
from typing import Final

from api.exporters.base import (
    ExportBundle,
    ExportCommand,
    ExportFile,
    ExportImpossibleError,
    ExportSource,
)
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape

TARGET_VERSION: Final = "Megatron-LM of 2026-08 (d98e8a64)"

_SCRIPT: Final = """\
#!/usr/bin/env bash
{comments}
# Written for {target_version}.
# Usage: MEGATRON_DIR=/path/to/Megatron-LM {name} [further Megatron-LM arguments]
#   one node, or each node by hand: NODE_RANK=0 MASTER_ADDR=host {name}
#   in a Slurm allocation:          LAUNCH=srun {name}
#   real data instead of mock data: DATA_ARGS="--data-path ... --split 99,1,0" {name}
set -euo pipefail
: "${{MEGATRON_DIR:?set it to a checkout of Megatron-LM}}"
export CUDA_DEVICE_MAX_CONNECTIONS=1
export MASTER_ADDR="${{MASTER_ADDR:-localhost}}" MASTER_PORT="${{MASTER_PORT:-29500}}"
NUM_NODES={num_nodes}
RANKS_PER_NODE={ranks_per_node}

ARGS=(
{arguments}
)
read -r -a DATA <<<"${{DATA_ARGS:---mock-data}}"

case "${{LAUNCH:-torchrun}}" in
torchrun)
    exec torchrun --nnodes "$NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" \\
        --node-rank "${{NODE_RANK:-0}}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
        "$MEGATRON_DIR/pretrain_gpt.py" "${{ARGS[@]}}" "${{DATA[@]}}" "$@"
    ;;
srun)
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    export MASTER_ADDR WORLD_SIZE={num_devices}
    # shellcheck disable=SC2016  # the ranks expand it
    exec srun -N "$NUM_NODES" -n {num_devices} --ntasks-per-node "$RANKS_PER_NODE" \\
        bash -c 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"; exec python "$@"' rank \\
        "$MEGATRON_DIR/pretrain_gpt.py" "${{ARGS[@]}}" "${{DATA[@]}}" "$@"
    ;;
*)
    echo "LAUNCH=$LAUNCH is neither torchrun nor srun" >&2
    exit 2
    ;;
esac
"""


def export_megatron_lm(source: ExportSource) -> ExportBundle:
    """Writes a script with the layout, the model's shape and mock data.

    Raises:
        ExportImpossibleError: the layout has no counterpart in Megatron-LM.
    """
    layout = source.layout
    if layout.zero_stage == 1 and layout.precision == "fp32":
        raise ExportImpossibleError(
            "zero_stage=1 with precision=fp32 has no counterpart: Megatron-LM's distributed optimizer "
            "needs bf16 or fp16; export a trial of zero_stage 0, or search with precision bf16"
        )
    name = "megatron-lm.sh"
    groups = [*_parallel_flags(layout), *_batch_flags(layout), *_model_flags(source.model)]
    groups += [*_precision_flags(layout), *_recompute_flags(source), *_run_flags(source)]
    about = (f"campaign {source.campaign}, trial {source.trial}: {layout.key}", source.gain)
    script = _SCRIPT.format(
        comments="\n".join(f"# {line}" for line in about if line),
        target_version=TARGET_VERSION,
        name=name,
        num_nodes=layout.num_nodes,
        ranks_per_node=source.ranks_per_node,
        num_devices=layout.num_devices,
        arguments="\n".join("    " + shlex.join(words) for words in groups),
    )
    return ExportBundle(
        format="megatron-lm",
        target_version=TARGET_VERSION,
        commands=_commands(source, name),
        files=(ExportFile(name=name, content=script, executable=True),),
        notes=_notes(source),
    )


def _commands(source: ExportSource, name: str) -> tuple[ExportCommand, ...]:
    megatron = "MEGATRON_DIR=/path/to/Megatron-LM"
    if source.layout.num_nodes > 1:
        when = f"in a Slurm allocation of {source.layout.num_nodes} nodes"
        return (ExportCommand(when=when, words=("env", megatron, "LAUNCH=srun", "bash", name)),)
    return (ExportCommand(when="here", words=("env", megatron, "bash", name)),)


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


def _batch_flags(layout: Layout) -> list[list[str]]:
    return [
        ["--micro-batch-size", str(layout.micro_batch_size)],
        ["--global-batch-size", str(layout.global_batch_size)],
    ]


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


def _precision_flags(layout: Layout) -> list[list[str]]:
    return [] if layout.precision == "fp32" else [[f"--{layout.precision}"]]


def _recompute_flags(source: ExportSource) -> list[list[str]]:
    if source.layout.recompute == "selective":
        return [["--recompute-granularity", "selective"]]
    if source.layout.recompute == "full":
        # uniform, one layer at a time: every block is recomputed from its own input
        return [
            ["--recompute-granularity", "full"],
            ["--recompute-method", "uniform", "--recompute-num-layers", "1"],
        ]
    return []


def _run_flags(source: ExportSource) -> list[list[str]]:
    return [
        ["--seed", str(source.seed + 1)],  # Megatron-LM refuses a seed of 0
        ["--train-iters", "100", "--lr", "1e-4", "--lr-decay-style", "constant"],
        ["--eval-iters", "0", "--log-interval", "1", "--log-throughput"],
    ]


def _notes(source: ExportSource) -> tuple[str, ...]:
    layout = source.layout
    notes = [
        "mock data and a constant learning rate stand in the script; give your own as DATA_ARGS and "
        "further arguments",
        "Megatron-LM derives dp and the number of micro-batches from the world size: start exactly "
        f"{layout.num_devices} ranks ({source.ranks_per_node} on each of {layout.num_nodes} nodes)",
    ]
    notes.append(
        f"seed {source.seed} of the campaign is --seed {source.seed + 1}: Megatron-LM refuses 0"
    )
    if layout.precision == "fp32":
        notes.append("without --bf16 or --fp16 Megatron-LM trains in fp32, as the probe did")
    if source.compile:
        notes.append(
            "the probe's compile=true has no flag here: Megatron-LM brings fused kernels of its own"
        )
    return tuple(notes)
