"""Models of Megatron-Bridge: those of recipes by name, and those that overrides state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from tests.exports.exported_files import exported_texts
from tests.layout_tuner.trainers.found_jobs.recipes.test_bridge import (
    SAVED,
    as_trained,
    command,
    read,
)

MLA = MODEL_PRESETS["tiny-mla"]


@pytest.mark.parametrize(
    ("recipe", "preset"),
    [
        ("deepseek_v3_pretrain_1024gpu_h100_bf16_config", "deepseek-v3"),
        ("kimi_k2_pretrain_config", "kimi-k2"),
        ("glm45_355b_pretrain_config", "glm-4.5"),
        ("glm45_air_106b_pretrain_config", "glm-4.5-air"),
        ("nemotron_3_nano_pretrain_16gpu_h100_bf16_config", "nemotron-3-nano-30b-a3b"),
        ("nemotron_3_super_pretrain_config", "nemotron-3-super-120b-a12b"),
        ("qwen3_next_80b_a3b_pretrain_config", "qwen3-next-80b-a3b"),
        ("gpt_oss_20b_pretrain_config", "gpt-oss-20b"),
    ],
)
def test_a_recipe_has_the_model_of_its_name(recipe: str, preset: str) -> None:
    job = command("--recipe", recipe, "model.pipeline_model_parallel_size=2")
    shape = MODEL_PRESETS[preset]
    sizes = {"seq_length": shape.seq_length, "vocab_size": shape.vocab_size}
    found = ModelShape.from_mapping({**job.below("model."), **sizes})
    assert found == replace(shape, attention_dropout=found.attention_dropout)
    assert {"tp", "recompute", "model.vocab_size"} <= {*job.open_fields}
    assert job.open_fields["pipeline_split"].said == "pipeline_split"


def test_a_model_that_overrides_state_whole_is_not_the_recipe_s() -> None:
    texts = exported_texts("megatron-bridge", TrainerJob(model=MLA, layout=Layout(num_nodes=1)))
    job = read_job(JobFile(name="job.sh", text=texts["megatron-bridge.sh"]))
    assert completed(job).model == replace(as_trained(MLA), attention_dropout=None)
    assert "deepseek_v2_lite" in texts["megatron-bridge.sh"]


def test_the_ranks_of_a_class_are_512_where_a_configuration_states_none() -> None:
    job = read(SAVED.replace("multi_latent_attention: false", "multi_latent_attention: true"))
    ranks = job.value("model.q_lora_rank"), job.value("model.kv_lora_rank")
    assert ranks == (512, 512)


@pytest.mark.parametrize(
    ("function", "gate", "activation"),
    [
        ("squared_relu", "false", "relu2"),
        ("gelu", "true", "geglu"),
        ("gelu", "false", "gelu"),
        ("silu", "true", None),
    ],
)
def test_the_function_and_its_gate_are_an_activation(
    function: str, gate: str, activation: str | None
) -> None:
    text = SAVED.replace("gated_linear_unit: true", f"gated_linear_unit: {gate}")
    job = read(text.replace("functional.silu", f"functional.{function}"))
    assert job.value("model.activation") == activation
    assert not any(name.startswith("model.") for name in job.open_fields)
