"""Exported files, read by the trainers' own parsers, give the layouts that were exported."""

import os
from pathlib import Path

import pytest

from search_spaces.spec.layout import Layout
from tests.exports.exported_files import (
    EVERY_KNOB,
    LLAMA,
    SEED,
    changed,
    expected,
    layouts,
    ranks,
    written,
)
from tests.exports.trainer_environments import read

pytestmark = [pytest.mark.exports, pytest.mark.timeout(300)]

TORCHTITAN_MAIN = os.environ.get("TORCHTITAN_MAIN", "")

PARALLEL = ("tp", "pp", "dp", "micro_batch_size", "num_microbatches", "precision")
SHAPE = (
    "seq_length",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "vocab_size",
)


def test_deepspeed_reads_back_the_layouts(tmp_path: Path) -> None:
    chosen = [
        *layouts(vpp=1, tp=1, sequence_parallel=False)[:3],
        *layouts(vpp=1, pp=1, sequence_parallel=False)[3:],
        Layout(dp=4, precision="fp16"),
        Layout(dp=4, tp=2, num_microbatches=3),
        Layout(dp=4, ep=2),
    ]
    paths = written(tmp_path, "deepspeed", "ds_config.json", chosen)
    answers = read("deepspeed", "read_deepspeed.py", paths, NUM_DEVICES=ranks(chosen))
    for layout, answer in zip(chosen, answers, strict=True):
        interval = int(layout.pp > 1 and layout.recompute == "full")
        assert answer == {
            **expected(layout, *PARALLEL, "ep", "zero_stage"),
            "recompute_interval": interval,
        }


def test_deepspeed_refuses_a_wrong_batch_and_an_unknown_key(tmp_path: Path) -> None:
    chosen = layouts(vpp=1, pp=1, sequence_parallel=False)[:1]
    (path,) = written(tmp_path, "deepspeed", "ds_config.json", chosen)
    broken = [
        changed(path, '"train_batch_size": 24', '"train_batch_size": 36'),
        changed(path, '"stage": 1', '"stage": 1, "stages": 1'),
        changed(path, '"autotp_size": 2', '"autotp_sizes": 2'),
    ]
    devices = ",".join(["4"] * 3)
    batch, zero, tensor = read("deepspeed", "read_deepspeed.py", broken, NUM_DEVICES=devices)
    assert "36 != 3 * 4 * 2" in batch["refused"]
    assert "stages" in zero["refused"]
    assert "autotp_sizes" in tensor["refused"]


def test_accelerate_reads_back_the_layouts(tmp_path: Path) -> None:
    replicas = {"tp": 1, "pp": 1, "vpp": 1, "recompute": "none", "sequence_parallel": False}
    megatron = layouts(vpp=1)
    chosen = [*megatron, *layouts(**replicas)[:2], *layouts(**replicas, zero_stage=0)[:2]]
    paths = written(tmp_path, "accelerate", "accelerate.yaml", chosen)
    answers = read("accelerate", "read_accelerate.py", paths)
    for layout, answer in zip(chosen, answers, strict=True):
        names = {"num_nodes", "num_devices", "precision", "dp", "zero_stage"}
        if layout in megatron:
            names |= {"tp", "pp", "num_microbatches", "recompute", "sequence_parallel"}
        elif layout.zero_stage == 1:
            names |= {"num_microbatches"}
        assert answer == expected(layout, *names)


def test_the_launch_script_says_the_accumulation_that_the_file_cannot(tmp_path: Path) -> None:
    (path,) = written(tmp_path, "accelerate", "accelerate.yaml", [Layout(dp=2, num_microbatches=6)])
    script = (path.parent / "accelerate.sh").read_text()
    assert "export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=6\n" in script


def test_accelerate_refuses_unknown_keys(tmp_path: Path) -> None:
    (path,) = written(tmp_path, "accelerate", "accelerate.yaml", layouts(vpp=1)[:1])
    broken = [
        changed(path, "num_machines: 2", "num_machine: 2"),
        changed(path, "megatron_lm_pp_degree: 2", "megatron_lm_stages: 2"),
        changed(path, "distributed_type: MEGATRON_LM", "distributed_type: MEGATRON"),
    ]
    top, section, kind = read("accelerate", "read_accelerate.py", broken)
    assert "num_machine" in top["refused"]
    assert section == {"refused": "2"}  # argparse: its exit status
    assert "MEGATRON" in kind["refused"]


def test_nanotron_reads_back_layouts_and_model(tmp_path: Path) -> None:
    chosen = [
        *layouts(vpp=1, recompute="none"),
        *layouts(vpp=1, recompute="none", sequence_parallel=False, zero_stage=0)[:1],
    ]
    paths = written(tmp_path, "nanotron", "nanotron.yaml", chosen)
    names = (*PARALLEL, *SHAPE, "zero_stage", "sequence_parallel", "global_batch_size")
    for layout, answer in zip(chosen, read("nanotron", "read_nanotron.py", paths), strict=True):
        assert answer == {**expected(layout, *names, "tied_embeddings"), "norm_epsilon": 1e-5}


def test_nanotron_refuses_unknown_keys_and_wrong_types(tmp_path: Path) -> None:
    (path,) = written(tmp_path, "nanotron", "nanotron.yaml", layouts(vpp=1, recompute="none")[:1])
    broken = [
        changed(path, "  expert_parallel_size: 1", "  expert_parallel_size: 1\n  recompute: 1"),
        changed(path, "batch_accumulation_per_replica: 4", "batch_accumulation_per_replica: four"),
    ]
    key, kind = read("nanotron", "read_nanotron.py", broken)
    assert "recompute" in key["refused"]
    assert "batch_accumulation_per_replica" in kind["refused"]


def test_torchtitan_0_2_reads_back_layouts_and_model(tmp_path: Path) -> None:
    """Beside tp or pp it has FSDP for replicas, and half precision with FSDP alone."""
    alone = {"tp": 1, "pp": 1, "vpp": 1, "zero_stage": 0, "sequence_parallel": False}
    chosen = [
        *layouts(zero_stage=0, dp=1, precision="fp32"),
        *layouts(**alone),
        *layouts(zero_stage=0),
    ]
    paths = written(tmp_path, "torchtitan-0.2", "torchtitan.toml", chosen)
    answers = read("torchtitan-0.2", "read_torchtitan_0_2.py", paths, NUM_DEVICES=ranks(chosen))
    for layout, answer in zip(chosen, answers, strict=True):
        assert answer == {
            **expected(layout, *PARALLEL, *SHAPE, "vpp", "recompute"),
            "is_sharded": layout.dp > 1 and layout.tp > 1,
            "norm_epsilon": 1e-5,
            "rotary_base": 10000.0,
            "seed": SEED,
        }


def test_torchtitan_0_2_refuses_an_unknown_key_and_wrong_ranks(tmp_path: Path) -> None:
    chosen = layouts(dp=1, zero_stage=0, precision="fp32")[:1]
    (path,) = written(tmp_path, "torchtitan-0.2", "torchtitan.toml", chosen)
    broken = [
        changed(path, "seq_len = 512", "seq_length = 512"),
        changed(path, "tensor_parallel_degree = 2", "tensor_parallel_degree = 4"),
    ]
    key, degree = read("torchtitan-0.2", "read_torchtitan_0_2.py", broken, NUM_DEVICES="4,4")
    assert "seq_length" in key["refused"]
    assert "tp(4) * pp(2) != WORLD_SIZE(4)" in degree["refused"]


def in_torchtitan(layout: Layout) -> dict[str, object]:
    """What a reader of 0.3 and main says."""
    names = (*PARALLEL, *SHAPE, "vpp", "recompute", "sequence_parallel", "tied_embeddings")
    return {
        **expected(layout, *names),
        "is_sharded": False,
        "norm_epsilon": 1e-5,
        "rotary_base": 10000.0,
        "seed": SEED,
    }


def test_torchtitan_0_3_reads_back_layouts_and_model(tmp_path: Path) -> None:
    chosen = [
        *layouts(zero_stage=0),
        *layouts(zero_stage=0, pp=1, vpp=1, recompute="none", sequence_parallel=False)[:2],
    ]
    paths = written(tmp_path, "torchtitan-0.3", "torchtitan_layout.py", chosen)
    answers = read("torchtitan-0.3", "read_torchtitan_0_3.py", paths, NUM_DEVICES=ranks(chosen))
    for layout, answer in zip(chosen, answers, strict=True):
        assert answer == in_torchtitan(layout)


@pytest.mark.skipif(not TORCHTITAN_MAIN, reason="TORCHTITAN_MAIN names no checkout of torchtitan")
def test_torchtitan_main_reads_back_layouts_and_model(tmp_path: Path) -> None:
    """By hand, from a checkout: docs/guides/exports.md says at which revision it last passed."""
    chosen = [
        *layouts(zero_stage=0),
        *layouts(zero_stage=0, pp=1, vpp=1, recompute="none", sequence_parallel=False)[:2],
    ]
    paths = written(tmp_path, "torchtitan-main", "torchtitan_layout.py", chosen)
    tokens = changed(paths[0], "per_train_step = 12288", "per_train_step = 12289")
    *answers, refused = read(
        "torchtitan-main",
        "read_torchtitan_0_3.py",
        [*paths, tokens],
        checkout=TORCHTITAN_MAIN,
        NUM_DEVICES=ranks([*chosen, chosen[0]]),
    )
    for layout, answer in zip(chosen, answers, strict=True):
        assert answer == in_torchtitan(layout)
    assert "AssertionError" in refused["refused"]


def test_torchtitan_0_3_refuses_an_unknown_field_and_wrong_numbers(tmp_path: Path) -> None:
    (path,) = written(tmp_path, "torchtitan-0.3", "torchtitan_layout.py", layouts(zero_stage=0)[:1])
    broken = [
        changed(path, "training.seq_len =", "training.seq_length ="),
        changed(path, "tensor_parallel_degree = 2", "tensor_parallel_degree = 4"),
        changed(path, "local_batch_size = 12", "local_batch_size = 13"),
    ]
    devices = ",".join(["8"] * 3)
    answers = read("torchtitan-0.3", "read_torchtitan_0_3.py", broken, NUM_DEVICES=devices)
    field, degree, batch = answers
    assert "seq_length" in field["refused"]
    assert "tp(4) * pp(2) != WORLD_SIZE(8)" in degree["refused"]
    assert "local_batch_size (13)" in batch["refused"]


def test_no_knob_of_the_layouts_has_its_default() -> None:
    default = Layout().to_mapping()
    for layout in layouts():
        same = {name for name, value in layout.to_mapping().items() if value == default[name]}
        assert same == {"zero_replicas"}  # of the formats here none has it
        assert LLAMA.num_layers % (layout.pp * layout.vpp) == 0
    assert set(EVERY_KNOB) == set(default) - {"zero_replicas"}
