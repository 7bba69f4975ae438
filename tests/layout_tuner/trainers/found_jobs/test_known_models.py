"""Models by the names that recipes, configurations and scripts give them."""

from __future__ import annotations

import pytest

from layout_tuner.trainers.found_jobs.known_models import known_model

# Billions of parameters as on the models' cards and in their papers, which state no shapes.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6.74,
    "llama2_13B": 13.0,
    "meta-llama/Llama-2-70b-chat-hf": 69.0,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8.03,
    "llama31_70b": 70.6,
    "llama3.1_405B.yaml": 405.9,
    "llama32_1b": 1.24,
    "Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "Qwen/Qwen2.5-0.5B": 0.49,
    "qwen25_1p5b": 1.54,
    "Qwen2.5-3B-Instruct": 3.09,
    "qwen25_7b": 7.62,
    "qwen2.5_14B": 14.8,
    "qwen2.5_32B": 32.8,
    "qwen2_72b": 72.7,
    "qwen3_600m": 0.596,
    "qwen3_1p7b": 1.72,
    "Qwen/Qwen3-4B-Instruct-2507": 4.02,
    "qwen3-8b": 8.19,
    "qwen3_14b": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "qwen3_30b_a3b": 30.5,
    "Qwen3-235B-A22B-Thinking-2507": 235.1,
    "mistralai/Mistral-7B-v0.1": 7.24,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "mistralai/Mistral-Nemo-Base-2407": 12.2,
    "mistralai/Mistral-Small-24B-Base-2501": 23.6,
    "mixtral_8x7B_v0.1": 46.7,
    "Mixtral-8x22B": 140.6,
    "gpt_oss_20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.10,
    "01-ai/Yi-34B": 34.4,
    "codellama/CodeLlama-34b-Instruct-hf": 33.7,
    "openai-community/gpt2": 0.124,
    "gpt2-xl": 1.56,
    "gpt3_175b": 174.6,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03,
    "deepseek_v3": 671,
    "deepseek-ai/DeepSeek-R1": 671,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 15.7,
    "deepseek_v2": 236,
    "moonshotai/Kimi-K2-Instruct": 1026,
    "glm45_355b": 353,
    "zai-org/GLM-4.5-Air-Base": 107,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 80,
    "nemotron_3_nano": 31.6,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": 120.6,
    "MiniMaxAI/MiniMax-M2": 229,
    "meta-llama/Llama-4-Scout-17B-16E": 107.8,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400,
    "allenai/Olmo-3-1125-32B": 32.2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_name_has_the_parameters_of_its_card(name: str) -> None:
    shape = known_model(name)
    assert shape is not None
    assert shape.num_main_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("llama3_1_8b", "meta-llama/Llama-3.1-8B"),
        ("Llama-3-1-8B", "llama3.1-8b"),
        ("/models/Meta-Llama-3-8B/", "llama3_8b"),
        ("qwen3_1p7b", "Qwen/Qwen3-1.7B"),
        ("Qwen2-7B", "qwen25_7b"),
    ],
)
def test_spellings_of_one_name_are_one_model(name: str, alike: str) -> None:
    assert known_model(name) == known_model(alike) is not None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "8B",
        "llama",
        "llama3-1.8b",  # no release of this size, and not Llama 3.1 8B
        "llama-7b",  # Llama 1 or 2
        "llama-3-8b-mine",
        "Qwen2.5-VL-7B-Instruct",
        "qwen25_vl_7b",
        "deepseek_v4_flash",
        "nemotron_3_nano_4b",
        "tiny",
        "tiny-mla",
        "/",
    ],
)
def test_no_name_is_taken_for_one_that_is_like_it(name: str) -> None:
    assert known_model(name) is None


def test_generations_of_one_size_differ() -> None:
    old, new = known_model("mistral-7b-v0.1"), known_model("Mistral-7B-Instruct-v0.2")
    assert old is not None
    assert new is not None
    assert (old.attention_window, new.attention_window) == (4096, None)
    small, large = known_model("qwen25_3b"), known_model("qwen25_7b")
    assert small is not None
    assert large is not None
    assert (small.tied_embeddings, large.tied_embeddings) == (True, False)
