"""The models of torchtitan's flavors."""

from __future__ import annotations

import pytest

from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.found_jobs.completed_job import completed
from tests.layout_tuner.trainers.found_jobs.test_torchtitan import NEW, found


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        ("llama2", "7B", 6.738e9),
        ("llama3", "405B", 405.85e9),
        ("simple_fsdp.llama3", "70B", 70.55e9),
        ("llama3", "8B_flex", 8.03e9),
        ("qwen3", "0.6B", 0.596e9),
        ("qwen3", "32B", 32.76e9),
        ("qwen3", "30B-A3B", 30.53e9),
        ("llama4", "17bx16e", 107.77e9),
        ("llama4", "17bx128e_irope", 400.71e9),
        ("deepseek_v3", "16B", 15.71e9),
        ("deepseek_v3", "236B_flex_attn", 235.74e9),
        ("deepseek_v3", "671B", 671.03e9),
        ("gpt_oss", "20b", 20.91e9),
        ("gpt_oss", "120b", 116.8e9),
    ],
)
def test_flavors_have_the_parameters_of_their_models(
    name: str, flavor: str, parameters: float
) -> None:
    job = found(NEW, ("'llama3'", f"'{name}'"), ('"8B"', f"'{flavor}'"))
    model = completed(job, num_nodes=4, devices_per_node=8).model
    assert model.num_parameters == pytest.approx(parameters, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "flavor", "word"),
    [
        ("deepseek_v3", "debugmodel", "flavor"),
        ("llama3", "9B", "flavor"),
        ("flux", "dev", "language"),
    ],
)
def test_a_flavor_without_a_shape_is_named(name: str, flavor: str, word: str) -> None:
    job = found(NEW, ("'llama3'", f"'{name}'"), ('"8B"', f"'{flavor}'"))
    assert word in job.open_fields["model.name"].why
    model = model_preset("llama-8b")
    assert completed(job, model=model, num_nodes=4, devices_per_node=8).model is model
