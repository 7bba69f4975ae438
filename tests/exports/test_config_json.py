"""Shapes of config.json files against the parameters that the library itself counts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.config_families import FAMILIES, REFUSED, SAME_FAMILY
from layout_tuner.search_spaces.models.config_features import refused_features
from layout_tuner.search_spaces.models.config_json import decoder_of_config, shape_of_config
from layout_tuner.search_spaces.models.model_presets import model_preset
from tests.exports.trainer_environments import Ask, installed, reading

pytestmark = pytest.mark.exports

SEQ: Final = 1024
MOST_OFF: Final = 0.001
"""Largest part of the library's count by which a shape that is read differs from it."""

CODE_ELSEWHERE: Final = {
    "emu3",  # whose decoder the library builds with all else alone
    *("baichuan", "bailing_moe", "bailing_moe_v2", "chatglm", "deepseek", "internlm", "internlm2"),
    *("minicpm", "orion", "qwen", "xverse"),
}
"""Families whose code is not in the library, but beside their files."""

LEARNED: Final = {kind for kind, family in FAMILIES.items() if family.kind == "gpt"}

NEEDED: Final[dict[str, dict[str, Any]]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""What a class has no default for, and layers of another kind."""

TYPES: Final = {
    "aria": "aria_text",
    "gemma3": "gemma3_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "llama4": "llama4_text",
}

GLM: Final = {
    "rope_theta": 1e6,
    "attention_bias": True,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
}
SUPER: Final = "MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
HYBRID: Final = {"head_dim": 128, "num_key_value_heads": 2, "moe_intermediate_size": 1856}
SIZES: Final[dict[str, tuple[str, dict[str, Any], float]]] = {
    "deepseek-v3": ("deepseek_v3", {}, 671.03),
    "kimi-k2": (
        "deepseek_v3",
        {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840}
        | {"routed_scaling_factor": 2.827, "num_mtp_layers": 0, "rope_theta": 5e4},
        1026.41,
    ),
    "glm-4.5": (
        "glm4_moe",
        GLM
        | {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92}
        | {"n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True}
        | {"routed_scaling_factor": 2.5},
        352.80,
    ),
    "glm-4.5-air": ("glm4_moe", GLM | {"moe_intermediate_size": 1408}, 106.85),
    "qwen3-next-80b-a3b": ("qwen3_next", {"rope_theta": 1e7}, 79.67),
    "nemotron-3-nano-30b-a3b": (
        "nemotron_h",
        HYBRID
        | {"hidden_size": 2688, "mamba_num_heads": 64, "n_routed_experts": 128}
        | {"num_experts_per_tok": 6, "moe_shared_expert_intermediate_size": 3712}
        | {"hybrid_override_pattern": "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME"}
        | {"routed_scaling_factor": 2.5},
        31.58,
    ),
    "nemotron-3-super-120b-a12b": (
        "nemotron_h",
        HYBRID
        | {"moe_intermediate_size": 2688, "moe_latent_size": 1024, "n_routed_experts": 512}
        | {"num_experts_per_tok": 22, "moe_shared_expert_intermediate_size": 5376}
        | {"hybrid_override_pattern": SUPER, "routed_scaling_factor": 5.0}
        | {"num_nextn_predict_layers": 1},
        120.67,
    ),
    "minimax-m2": ("minimax_m2", {"rotary_dim": 64, "num_mtp_modules": 3}, 228.69),
    "llama-4-scout": ("llama4_text", {}, 107.77),
    "llama-4-maverick": (
        "llama4_text",
        {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        400.71,
    ),
    "olmo-3-32b": (
        "olmo3",
        {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 100278}
        | {"rope_theta": 5e5},
        32.23,
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.91),
    "gpt-oss-120b": ("gpt_oss", {}, 116.83),
}
"""Fields that differ from those of the class, and billions of parameters, of published models."""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with reading("transformers", "read_transformers.py") as asked:
        yield asked


def counted(ask: Ask, folder: Path, kind: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """The configuration of a type, as the library writes it, and its count of parameters."""
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **fields}))
    answer = ask(file, 1)
    assert "parameters" in answer, answer
    return answer["config"], answer["parameters"]


def check(config: dict[str, Any], parameters: int) -> None:
    """A shape has the library's parameters, less those that it names; few where it is read."""
    seq_length = SEQ
    if config["model_type"] in LEARNED:
        seq_length = config.get("n_positions") or config["max_position_embeddings"]
    decoder = decoder_of_config(config, seq_length=seq_length)
    lacking = sum(each.parameters for each in decoder.features)
    assert decoder.shape.num_main_parameters + lacking == parameters  # it builds no MTP
    if refused := list(refused_features(decoder.shape, decoder.features)):
        with pytest.raises(ModelShapeInvalidError, match=re.escape(refused[0].name)):
            shape_of_config(config, seq_length=seq_length)
        return
    shape = shape_of_config(config, seq_length=seq_length)
    assert abs(shape.num_main_parameters - parameters) <= MOST_OFF * parameters
    for feature in decoder.features:
        assert feature.name in shape.lacks


@pytest.mark.parametrize("kind", sorted({*FAMILIES} - CODE_ELSEWHERE))
def test_a_shape_and_what_it_lacks_have_the_parameters_of_the_class(
    kind: str, ask: Ask, tmp_path: Path
) -> None:
    check(*counted(ask, tmp_path, TYPES.get(kind, kind), **NEEDED.get(kind, {})))


@pytest.mark.parametrize("name", SIZES)
def test_a_published_model_has_its_parameters(name: str, ask: Ask, tmp_path: Path) -> None:
    kind, fields, billions = SIZES[name]
    config, parameters = counted(ask, tmp_path, kind, **fields)
    assert round(parameters / 1e9, 2) == billions
    check(config, parameters)


@pytest.mark.parametrize("name", sorted({*SIZES} - {"gpt-oss-120b"}))
def test_a_published_file_is_its_preset(name: str, ask: Ask, tmp_path: Path) -> None:
    kind, fields, _ = SIZES[name]
    config, _ = counted(ask, tmp_path, kind, **fields)
    preset = model_preset(name)
    file = {"num_nextn_predict_layers": preset.num_mtp_layers} if "next" in name else {}
    shape = shape_of_config(config | file, seq_length=preset.seq_length, name=name)
    assert replace(shape, lacks="") == replace(preset, lacks="")


def test_every_type_of_the_library_is_read_or_refused_by_name() -> None:
    table = installed("transformers") / "transformers" / "models" / "auto" / "modeling_auto.py"
    _, _, after = table.read_text().partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")
    types = re.findall(r'\("([\w-]+)", "\w+"\)', after.partition("\n)\n")[0])
    assert len(types) > 150
    plain = {re.sub(r"_text(_model)?$", "", each) for each in types}
    known = {*FAMILIES, *SAME_FAMILY, *REFUSED}
    assert plain - known == {"got_ocr2", "moss_transcribe_diarize"}  # they nest a qwen2 and a qwen3
