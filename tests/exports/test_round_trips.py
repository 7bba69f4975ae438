"""Exported files, read by the trainers' own parsers, give the layouts that were exported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.nanotron import stage_blocks
from tests.exports.exported_files import (
    EVERY_KNOB,
    LLAMA,
    READERS,
    SEED,
    changed,
    expected,
    layouts,
    written,
)
from tests.exports.trainer_environments import read

pytestmark = [pytest.mark.exports, pytest.mark.timeout(300)]

TORCHTITAN_MAIN = os.environ.get("TORCHTITAN_MAIN", "")
PARALLEL = ("tp", "pp", "dp", "micro_batch_size", "num_microbatches", "precision")
SHAPE = (
    *("seq_length", "num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_heads", "num_kv_heads", "vocab_size"),
)
TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
REPLICAS: dict[str, Any] = {"tp": 1, "pp": 1, "vpp": 1, "sequence_parallel": False}
WITHOUT_PIPELINE = {"pp": 1, "vpp": 1, "recompute": "none", "sequence_parallel": False}
CHOSEN: dict[str, list[Layout]] = {
    "deepspeed": [
        *layouts(vpp=1, pp=1, sequence_parallel=False),
        *layouts(vpp=1, tp=1, sequence_parallel=False)[:3],
        Layout(dp=4, precision="fp16"),
        Layout(dp=4, tp=2, num_microbatches=3),
        Layout(dp=4, ep=2),
        Layout(dp=4, tp=2, zero_stage=3, precision="bf16"),
        Layout(dp=2, zero_stage=0, precision="bf16"),
    ],
    "accelerate": [
        *layouts(vpp=1),
        *layouts(**REPLICAS, recompute="none")[:2],
        *layouts(**REPLICAS, recompute="none", zero_stage=0)[:2],
        Layout(dp=4, zero_stage=3, zero_replicas=2),
    ],
    "nanotron": [
        *layouts(vpp=1, recompute="none"),
        *layouts(vpp=1, recompute="none", sequence_parallel=False, zero_stage=0)[:1],
    ],
    # Beside tp or pp it has FSDP for replicas, and half precision with FSDP alone.
    "torchtitan-0.2": [
        *layouts(zero_stage=0, dp=1, precision="fp32"),
        *layouts(**REPLICAS, zero_stage=0),
        *layouts(zero_stage=0),
    ],
    "torchtitan-0.3": [*layouts(zero_stage=0), *layouts(zero_stage=0, **WITHOUT_PIPELINE)[:2]],
}
"""Layouts that each format can express."""


def read_back(
    folder: Path,
    name: str,
    chosen: Sequence[Layout],
    changes: Sequence[tuple[str, str]] = (),
    checkout: str = "",
) -> list[dict[str, Any]]:
    """What the trainer reads of each layout, or of the first one with each of the changes."""
    paths = written(folder, name, chosen)
    if changes:
        paths = [changed(paths[0], *change) for change in changes]
        chosen = [chosen[0]] * len(changes)
    ranks = [each.num_devices for each in chosen]
    return read(name, READERS[name][1], paths, ranks, checkout=checkout)


def as_read(name: str, layout: Layout) -> dict[str, Any]:
    """What the reader of a format says of a layout."""
    if name == "deepspeed":
        is_wide = layout.precision == "bf16" and layout.zero_stage
        return {
            **expected(layout, *PARALLEL, "ep", "zero_stage"),
            "accumulates": "float32" if is_wide else TYPES[layout.precision],
            "recompute_interval": int(layout.pp > 1 and layout.recompute == "full"),
            **({"shard": [256 // layout.tp, 64]} if layout.pp == 1 else {}),
        }
    if name == "accelerate":
        names = {"num_nodes", "num_devices", "precision", "dp"}
        names |= {"zero_replicas"} if layout.zero_stage > 1 else {"zero_stage"}
        if layout.tp > 1:
            names |= {"tp", "pp", "cp", "num_microbatches", "recompute", "sequence_parallel"}
        elif layout.zero_stage == 1:
            names |= {"num_microbatches"}
        return expected(layout, *names)
    norm = {"norm_epsilon": 1e-5}
    if name == "nanotron":
        names = {*PARALLEL, *SHAPE, "zero_stage", "sequence_parallel", "global_batch_size"}
        stages = [blocks.count("layer") for blocks in stage_blocks(LLAMA, layout.pp)]
        return expected(layout, *names, "tied_embeddings", "schedule") | norm | {"stages": stages}
    others = norm | {"rotary_base": 10000.0, "seed": SEED, "is_sharded": False}
    said = expected(layout, *PARALLEL, *SHAPE, "vpp", "recompute")
    if name == "torchtitan-0.2":
        return said | others | {"is_sharded": layout.dp > 1 and layout.tp > 1}
    return said | others | expected(layout, "sequence_parallel", "tied_embeddings")


@pytest.mark.parametrize("name", CHOSEN)
def test_a_trainer_reads_back_the_layouts_and_the_model(name: str, tmp_path: Path) -> None:
    answers = read_back(tmp_path, name, CHOSEN[name])
    for layout, answer in zip(CHOSEN[name], answers, strict=True):
        assert answer == as_read(name, layout)


@pytest.mark.skipif(not TORCHTITAN_MAIN, reason="TORCHTITAN_MAIN names no checkout of torchtitan")
def test_torchtitan_main_reads_back_the_layouts_and_the_model(tmp_path: Path) -> None:
    """By hand, from a checkout: docs/guides/exports.md says at which revision it last passed."""
    name, chosen = "torchtitan-main", CHOSEN["torchtitan-0.3"]
    answers = read_back(tmp_path, name, chosen, checkout=TORCHTITAN_MAIN)
    for layout, answer in zip(chosen, answers, strict=True):
        assert answer == as_read(name, layout)
    (again := tmp_path / "again").mkdir()
    more_tokens = ("per_train_step = 12288", "per_train_step = 12289")
    (answer,) = read_back(again, name, chosen, [more_tokens], checkout=TORCHTITAN_MAIN)
    assert "AssertionError" in answer["refused"]


REFUSED: dict[str, list[tuple[str, str, str]]] = {
    "deepspeed": [
        # The engine counts the ranks of tp too.
        ('"steps_per_print": 1', '"train_batch_size": 24', "24 != 3 * 4 * 4"),
        ('"stage": 1', '"stage": 1, "mics_shard_size": 2', "MiCS ZeRO-3 sharding has been removed"),
        ('"stage": 1', '"stage": 1, "stages": 1', "stages"),
        ('"autotp_size": 2', '"autotp_sizes": 2', "autotp_sizes"),
    ],
    "accelerate": [
        ("num_machines: 2", "num_machine: 2", "num_machine"),
        # argparse ends with its exit status.
        ("megatron_lm_pp_degree: 2", "megatron_lm_stages: 2", "SystemExit: 2"),
        ("distributed_type: MEGATRON_LM", "distributed_type: MEGATRON", "MEGATRON"),
    ],
    "nanotron": [
        ("  expert_parallel_size: 1", "  expert_parallel_size: 1\n  recompute: 1", "recompute"),
        ("accumulation_per_replica: 4", "accumulation_per_replica: four", "accumulation_per_rep"),
    ],
    "torchtitan-0.2": [
        ("seq_len = 512", "seq_length = 512", "seq_length"),
        (
            "tensor_parallel_degree = 2",
            "tensor_parallel_degree = 4",
            "tp(4) * pp(2) != WORLD_SIZE(4)",
        ),
    ],
    "torchtitan-0.3": [
        ("training.seq_len =", "training.seq_length =", "seq_length"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 4", "tp(4) * pp(2) != WORLD_SIZE"),
        ("local_batch_size = 12", "local_batch_size = 13", "local_batch_size (13)"),
    ],
}
"""By format, changes of the file of a layout, and a part of the trainer's refusal."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_refuses_unknown_keys_and_wrong_numbers(name: str, tmp_path: Path) -> None:
    changes = [(before, after) for before, after, _ in REFUSED[name]]
    answers = read_back(tmp_path, name, CHOSEN[name][:1], changes)
    for (_, after, says), answer in zip(REFUSED[name], answers, strict=True):
        assert says in answer.get("refused", ""), after


def test_the_launch_script_states_the_gradient_accumulation_that_the_file_cannot(
    tmp_path: Path,
) -> None:
    (path,) = written(tmp_path, "accelerate", [Layout(dp=2, num_microbatches=6)])
    script = (path.parent / "accelerate.sh").read_text()
    assert "export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=6\n" in script


def test_no_knob_of_the_layouts_has_its_default() -> None:
    default = Layout().to_mapping()
    for layout in layouts():
        same = {name for name, value in layout.to_mapping().items() if value == default[name]}
        assert same == {"zero_replicas"}  # of the formats here none has it
        assert LLAMA.num_layers % (layout.pp * layout.vpp) == 0
    assert set(EVERY_KNOB) == set(default) - {"zero_replicas"}
