"""Trainers read the settings of jobs from exported files, and have the defaults without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.exports.export import FORMATS
from tests.exports.exported_files import ENVIRONMENTS, LLAMA, READERS, SEED, written_job
from tests.exports.trainer_environments import read

pytestmark = [pytest.mark.exports, pytest.mark.timeout(600)]

EXPERTS = replace(model_preset("mixtral-8x7b"), num_layers=4)
SHARDED = Layout(dp=2, zero_stage=2, precision="bf16", num_microbatches=2)
TITAN = Layout(tp=2, dp=2, zero_stage=3, sequence_parallel=True, precision="bf16")
MEGATRON = Layout(tp=2, dp=4, ep=4, sequence_parallel=True, zero_stage=1, precision="bf16")

Case = tuple[str, Layout, str, Any, dict[str, JobValue], Any]
"""Format, layout, field of the trainer's configuration, its value without settings, the settings,
and the value with them."""

_ZERO, _BUCKET = "zero_config", 500_000_000
CASES: tuple[Case, ...] = (
    ("deepspeed", SHARDED, f"{_ZERO}.overlap_comm", True, {"overlap_comm": False}, False),
    (
        "deepspeed",
        SHARDED,
        f"{_ZERO}.reduce_bucket_size",
        _BUCKET,
        {"reduce_bucket_millions": 10},
        10_000_000,
    ),
    (
        "deepspeed",
        SHARDED,
        f"{_ZERO}.allgather_bucket_size",
        _BUCKET,
        {"allgather_bucket_millions": 5000},
        5_000_000_000,
    ),
    (
        "deepspeed",
        SHARDED,
        f"{_ZERO}.contiguous_gradients",
        True,
        {"contiguous_gradients": False},
        False,
    ),
    ("torchtitan-0.2", TITAN, "compile.enable", False, {"compile": True}, True),
    (
        "torchtitan-0.2",
        TITAN,
        "parallelism.enable_async_tensor_parallel",
        False,
        {"compile": True, "async_tp": True},
        True,
    ),
    (
        "torchtitan-0.2",
        TITAN,
        "activation_checkpoint.memory_budget",
        0.5,
        {"compile": True, "memory_budget": 25},
        0.25,
    ),
    ("torchtitan-0.3", TITAN, "compile.enable", False, {"compile": True}, True),
    (
        "torchtitan-0.3",
        TITAN,
        "compile.enable_async_tensor_parallel",
        False,
        {"compile": True, "async_tp": True},
        True,
    ),
    ("torchtitan-0.3", TITAN, "training.disable_cuda_graphs", False, {"cuda_graphs": False}, True),
    *(
        (name, MEGATRON, field, before, settings, after)
        for name in ("megatron-lm", "megatron-bridge")
        for field, before, settings, after in (
            (
                "moe_token_dispatcher_type",
                "alltoall",
                {"moe_dispatcher": "allgather"},
                "allgather",
            ),
            ("overlap_moe_expert_parallel_comm", False, {"ep_overlap": True}, True),
            ("moe_grouped_gemm", True, {"grouped_gemm": False}, False),
            ("moe_router_fusion", False, {"router_fusion": True}, True),
            ("cross_entropy_fusion_impl", "native", {"cross_entropy": "te"}, "te"),
            ("tp_comm_overlap", False, {"tp_overlap": True}, True),
            (
                "delay_wgrad_compute",
                False,
                {"ep_overlap": True, "delay_wgrad": True},
                True,
            ),
        )
    ),
)


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_a_trainer_reads_the_settings_of_a_job(name: str, tmp_path: Path) -> None:
    cases = [case for case in CASES if case[0] == name]
    paths, ranks, expected = [], [], []
    for _, layout, field, before, settings, after in cases:
        for given, value in (({}, before), (settings, after)):
            job = TrainerJob(
                model=EXPERTS if layout.ep > 1 else LLAMA,
                layout=replace(layout, job=JobSettings(given)),
                seed=SEED,
            )
            assert not FORMATS[name].adapter.refusals(job)
            paths.append(written_job(tmp_path / str(len(paths)), name, job, [field]))
            ranks.append(layout.num_devices)
            expected.append((field, value, given))
    answers = read(ENVIRONMENTS.get(name, name), READERS[name][1], paths, ranks)
    for answer, (field, value, given) in zip(answers, expected, strict=True):
        assert "refused" not in answer, (given, answer)
        assert answer[field] == value, given


def test_megatron_core_takes_the_graphs_of_its_version(tmp_path: Path) -> None:
    """Core 0.16.1 has a scope, and refuses what the adapter's target has."""
    paths = []
    form = FORMATS["megatron-lm"]
    for version in ("0.16.1", ""):
        adapter = replace(form.adapter, version=version)
        for value in ("attn", "attn_moe_router", "full_iteration"):
            layout = replace(MEGATRON, job=JobSettings({"cuda_graphs": value}))
            job = TrainerJob(model=EXPERTS, layout=layout)
            folder = tmp_path / str(len(paths))
            fields = ["cuda_graph_impl", "cuda_graph_scope"]
            path = written_job(folder, "megatron-lm", job, fields)
            path.write_text(path.read_text() if not version else json.dumps(adapter.arguments(job)))
            paths.append(path)
    ranks = [MEGATRON.num_devices] * len(paths)
    answers = read("megatron-core", READERS["megatron-lm"][1], paths, ranks)
    assert [each.get("cuda_graph_scope") for each in answers[:3]] == [
        ["attn"],
        ["attn", "moe_router", "moe_preprocess"],
        ["full_iteration"],
    ]
    assert answers[2]["cuda_graph_impl"] == "local"
    assert "refused" in answers[5], answers[5]
