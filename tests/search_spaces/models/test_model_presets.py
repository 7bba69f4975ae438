"""The presets of published models: their parameters, their documents and how they print."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layout_tuner.search_spaces.models.model_presets import (
    MODEL_PRESETS,
    model_preset,
    resolve_model,
)

PUBLISHED = {
    # Billions of parameters without multi-token prediction, and those that a token uses.
    "deepseek-v3": (671.026, 37.55),
    "kimi-k2": (1026.41, 32.86),
    "glm-4.5": (352.80, 33.63),
    "glm-4.5-air": (106.85, 13.42),
    "qwen3-next-80b-a3b": (79.674, 3.875),
    "nemotron-3-nano-30b-a3b": (31.578, 3.58),
    "nemotron-3-super-120b-a12b": (120.669, 12.770),
    "minimax-m2": (228.69, 11.03),
    "llama-4-scout": (107.77, 17.17),
    "llama-4-maverick": (400.71, 17.19),
    "olmo-3-32b": (32.234, 32.234),
    "gpt-oss-20b": (20.915, 4.187),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    total, active = PUBLISHED[name]
    model = model_preset(name)
    assert replace(model, num_mtp_layers=0).num_parameters == model.num_main_parameters
    assert model.num_main_parameters / 1e9 == pytest.approx(total, rel=1e-3)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=1e-3)


def test_presets_have_as_many_parameters_as_files() -> None:
    """Counts of the tensors of published checkpoints, and of transformers 5.24.0 (DeepSeek-V3)."""
    assert model_preset("deepseek-v3").num_main_parameters == 671_026_404_352
    assert model_preset("deepseek-v3").num_mtp_parameters == 11_610_067_968
    assert model_preset("qwen3-next-80b-a3b").num_main_parameters == 79_674_391_296
    assert model_preset("nemotron-3-super-120b-a12b").num_parameters == 123_611_012_096
    assert model_preset("gpt-oss-20b").num_parameters == 20_914_757_184


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_preset_comes_back_from_its_document(name: str) -> None:
    assert resolve_model(model_preset(name).to_mapping()) == model_preset(name)
    changed = resolve_model({"preset": name, "vocab_size": 999})
    assert changed == replace(model_preset(name), name=f"{name}-custom", vocab_size=999)


def test_presets_predict_as_many_tokens_as_published() -> None:
    depths = {name: model.num_mtp_layers for name, model in MODEL_PRESETS.items()}
    assert {name: number for name, number in depths.items() if number} == {
        "deepseek-v3": 1,
        "glm-4.5": 1,
        "glm-4.5-air": 1,
        "qwen3-next-80b-a3b": 1,
        "nemotron-3-super-120b-a12b": 1,
        "minimax-m2": 3,
    }


def test_the_hybrids_have_their_numbers_of_kinds() -> None:
    numbers = {
        name: {kind.kind: len(kind.layers) for kind in model_preset(name).kinds}
        for name in ("nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b", "qwen3-next-80b-a3b")
    }
    assert list(numbers.values()) == [
        {"mamba2": 23, "experts": 23, "full": 6},
        {"mamba2": 40, "experts": 40, "full": 8},
        {"gated_delta_net+experts": 36, "full+experts": 12},
    ]


def test_the_presets_for_cpus_have_few_parameters() -> None:
    mla, hybrid = model_preset("tiny-mla"), model_preset("tiny-hybrid")
    assert max(mla.num_parameters, hybrid.num_parameters) < 2_000_000
    assert mla.kind_of_layers == ("full+dense", *["full+experts"] * 3)
    every_second = ("window+dense", "window+experts", "window+dense", "full+experts")
    assert hybrid.kind_of_layers == every_second
