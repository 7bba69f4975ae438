"""The config.json of Hugging Face, as transformers 4 and 5 write it, read into a shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from layout_tuner.errors import ModelShapeInvalidError, SearchSpaceError
from layout_tuner.search_spaces.models.config_families import FAMILIES, REFUSED, SAME_FAMILY
from layout_tuner.search_spaces.models.config_features import Feature, refused_features
from layout_tuner.search_spaces.models.config_json import shape_of_config
from layout_tuner.search_spaces.models.model_files import described_model
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape

SEQ: Final = 2048
DENSE: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 40000,
}
SPARSE: Final[dict[str, Any]] = {
    **DENSE,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}


def read(
    kind: str, config: dict[str, Any] | None = None, /, seq: int = SEQ, **more: Any
) -> ModelShape:
    base = DENSE if config is None else config
    return shape_of_config({"model_type": kind, **base, **more}, seq_length=seq)


def refusal(document: dict[str, Any], seq: int | None = SEQ) -> str:
    with pytest.raises(ModelShapeInvalidError) as caught:
        shape_of_config(document, seq_length=seq)
    assert len(caught.value.parts) == 1
    return str(caught.value)


def test_a_dense_file_is_a_shape() -> None:
    model = read("llama", rope_theta=5e5, tie_word_embeddings=True, torch_dtype="bfloat16")
    assert model == ModelShape(
        name="custom",
        family="llama",
        num_layers=12,
        hidden_size=512,
        ffn_hidden_size=1536,
        num_heads=8,
        num_kv_heads=2,
        seq_length=SEQ,
        vocab_size=40000,
        tied_embeddings=True,
        rotary_base=5e5,
    )


PUBLISHED: Final = (
    # Parameters as counted by their publishers' class.
    ("llama", (4096, 14336, 32, 32, 8, 128256), {}, 8_030_261_248),
    ("qwen2", (3584, 18944, 28, 28, 4, 152064), {}, 7_615_616_512),
    ("qwen3", (2560, 9728, 36, 32, 8, 151936), {"tie_word_embeddings": True}, 4_022_468_096),
)


@pytest.mark.parametrize(("kind", "sizes", "more", "parameters"), PUBLISHED)
def test_parameters_of_published_models(
    kind: str, sizes: tuple[int, ...], more: dict[str, Any], parameters: int
) -> None:
    config = dict(zip(DENSE, sizes, strict=True))
    assert read(kind, config | more).num_parameters == parameters


@pytest.mark.parametrize(
    "words",
    [
        {"rope_theta": 70000},
        {"rope_theta": 70000.0, "rope_scaling": None},
        {"rope_scaling": {"rope_theta": 70000.0, "type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 70000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 7e4}, "rope_theta": 7e4},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 10000.0},
                "full_attention": {"rope_theta": 70000.0},
            }
        },
    ],
)
def test_the_rotary_base_moved(words: dict[str, Any]) -> None:
    assert read("gemma3", **words).rotary_base == 70000.0
    assert read("llama").rotary_base == 10000.0
    assert read("cwm").rotary_base == 1e6  # that of the class


def test_two_rotary_bases_are_refused() -> None:
    said = refusal(
        {"model_type": "llama", **DENSE, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}
    )
    assert "rope_theta=10000.0 and rope_parameters.rope_theta=1000000.0 state two values" in said


@pytest.mark.parametrize(
    ("kind", "words", "head_dim"),
    [
        ("llama", {}, 64),
        ("llama", {"head_dim": 128}, 128),
        ("llama", {"head_dim": None}, 64),
        ("qwen2", {"head_dim": 96}, 96),
        ("qwen3", {}, 128),
        ("qwen3", {"head_dim": None}, 64),
        ("gemma2", {}, 256),
        ("hunyuan_v1_dense", {"attention_head_dim": 96}, 96),
        ("stablelm", {"head_dim": 96}, 64),
    ],
)
def test_the_width_of_heads_is_that_of_the_class(
    kind: str, words: dict[str, Any], head_dim: int
) -> None:
    assert read(kind, **words).head_size == head_dim


@pytest.mark.parametrize(
    ("kind", "words", "window", "every"),
    [
        ("mistral", {}, 1024, None),
        ("mistral", {"sliding_window": None}, None, None),
        ("llama", {}, None, None),
        ("qwen2", {}, None, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 1024, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 12}, None, None),
        ("gemma3", {}, 1024, 6),
        ("gemma3", {"sliding_window_pattern": 4}, 1024, 4),
        ("exaone4", {"sliding_window_pattern": "LLG"}, 1024, 3),
        ("exaone4", {"sliding_window": None}, None, None),
        ("llama", {"layer_types": ["full_attention"] * 12}, None, None),
        ("olmo3", {"layer_types": ["sliding_attention", "full_attention"] * 6}, 1024, 2),
        ("olmo3", {"layer_types": ["sliding_attention"] * 12}, 1024, None),
        ("gemma3", {"sliding_window": 2048}, None, None),  # all positions of a sequence
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": [0] * 12}, 1024, None),
    ],
)
def test_windows_are_said_in_several_ways(
    kind: str, words: dict[str, Any], window: int | None, every: int | None
) -> None:
    stated: dict[str, Any] = {} if kind == "llama" else {"sliding_window": 1024}
    model = read(kind, **(stated | words))
    assert (model.attention_window, model.full_attention_every) == (window, every)


def test_windows_in_other_layers_are_kinds_of_layers() -> None:
    first = read("cwm", sliding_window=64)
    assert (first.attention_window, first.full_attention_every) == (64, None)
    assert first.layer_kinds == ("full+dense", *["window+dense"] * 3)
    assert first.lacks == ""
    kinds = ["full_attention"] * 8 + ["sliding_attention"] * 4
    last = read("olmo3", sliding_window=64, layer_types=kinds)
    assert last.kind_of_layers == ("full+dense",) * 8 + ("window+dense",) * 4
    assert refusal(
        {"model_type": "llama", **DENSE, "layer_types": ["full_attention", "conv"] * 6}
    ).startswith("layer_types has 'conv'")


def test_chunks_are_full_attention_for_sequences_of_a_chunk() -> None:
    scout = {"num_local_experts": 4, "intermediate_size": 256, "intermediate_size_mlp": 1024}
    model = read("llama4_text", {**DENSE, **scout}, attention_chunk_size=2048)
    assert (model.attention_window, model.experts_per_token) == (None, 1)
    assert (model.moe_ffn_hidden_size, model.shared_expert_ffn_hidden_size) == (256, 256)
    config = {"model_type": "llama4_text", **DENSE, **scout, "attention_chunk_size": 2048}
    assert "attention in chunks of 2048 tokens" in refusal(config, seq=16384)
    every = shape_of_config({**config, "interleave_moe_layer_step": 2}, seq_length=SEQ)
    assert (every.experts_every, every.ffn_hidden_size, every.router_score) == (2, 1024, "sigmoid")


@pytest.mark.parametrize(
    ("kind", "words", "width", "shared"),
    [
        ("mixtral", {"num_local_experts": 16}, 1536, 0),
        ("olmoe", {}, 1536, 0),
        ("qwen3_moe", {"moe_intermediate_size": 256}, 256, 0),
        ("qwen2_moe", {"shared_expert_intermediate_size": 700}, 256, 700),
        ("glm4_moe", {"n_shared_experts": 2, "num_nextn_predict_layers": 0}, 256, 512),
        ("deepseek", {"n_shared_experts": 2}, 256, 512),
        ("ernie4_5_moe", {"moe_layer_start_index": 0}, 256, 512),
        ("granitemoeshared", {"shared_intermediate_size": 100}, 1536, 100),
        ("hunyuan_v1_moe", {"num_experts_per_tok": None, "moe_topk": [4] * 12}, 1536, 1536),
    ],
)
def test_widths_of_experts(kind: str, words: dict[str, Any], width: int, shared: int) -> None:
    config = dict(SPARSE)
    if width == 1536:
        del config["moe_intermediate_size"]
    model = read(kind, config | words)
    assert (model.num_experts, model.experts_per_token) == (16, 4)
    assert (model.moe_ffn_hidden_size, model.shared_expert_ffn_hidden_size) == (width, shared)


@pytest.mark.parametrize(
    ("kind", "words", "dense"),
    [
        ("qwen3_moe", {}, 0),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, 2),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, 1),
        ("glm4_moe", {"num_mtp_layers": 0, "first_k_dense_replace": 3}, 3),
        ("deepseek", {"first_k_dense_replace": 1, "moe_layer_freq": 1}, 1),
        ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_end_index": 11}, 3),
        ("hy_v3", {}, 1),
        ("mellum", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10}, 2),
    ],
)
def test_dense_layers_at_the_beginning(kind: str, words: dict[str, Any], dense: int) -> None:
    config = {**SPARSE, "hidden_size": 256, "moe_intermediate_size": 2048} | words
    assert read(kind, config).num_dense_layers == dense


@pytest.mark.parametrize(
    ("words", "every", "kinds"),
    [
        ({"decoder_sparse_step": 2}, 2, "DEDEDEDEDEDE"),
        ({"decoder_sparse_step": 5}, 5, "DDDDEDDDDEDD"),
        ({"mlp_only_layers": [5]}, 0, "EEEEEDEEEEEE"),
        ({"mlp_layer_types": ["sparse", "dense"] * 6}, 0, "EDEDEDEDEDED"),
        ({"moe_layer_freq": 2}, 0, "EDEDEDEDEDED"),
        ({"moe_layer_freq": [0, 1, 1] * 4}, 0, "DEEDEEDEEDEE"),
        ({"mlp_only_layers": [0, 1]}, 0, "DDEEEEEEEEEE"),
    ],
)
def test_experts_are_in_the_layers_that_a_file_says(
    words: dict[str, Any], every: int, kinds: str
) -> None:
    model = read("qwen3_moe", SPARSE, **words)
    sparse = {"D": "full+dense", "E": "full+experts"}
    assert model.kind_of_layers == tuple(sparse[each] for each in kinds)
    assert model.experts_every == every
    assert (model.ffn_hidden_size, model.moe_ffn_hidden_size) == (1536, 256)


@pytest.mark.parametrize(
    ("kind", "is_tied"),
    [("llama", False), ("gemma", True), ("smollm3", True), ("ernie4_5", True), ("qwen2", False)],
)
def test_embeddings_are_tied_as_in_the_class(kind: str, is_tied: bool) -> None:
    assert read(kind).tied_embeddings is is_tied
    assert read(kind, tie_word_embeddings=not is_tied).tied_embeddings is not is_tied


def test_the_decoder_of_a_model_for_pictures_is_read() -> None:
    nested = {
        "architectures": ["OurForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {"model_type": "qwen2", **DENSE},
        "vision_config": {"hidden_size": 1024},
        "tie_word_embeddings": True,
    }
    model = shape_of_config(nested, seq_length=SEQ)
    assert (model.hidden_size, model.tied_embeddings) == (512, True)
    assert (model.lacks, model.biases) == ("a tower for pictures", "qkv")
    # The part leaves out what is as in its class, and gemma3's ties embeddings.
    short = {"model_type": "gemma3", "text_config": {"hidden_size": 512}, "vision_config": {"x": 1}}
    model = shape_of_config(short, seq_length=SEQ)
    assert (model.num_layers, model.vocab_size, model.head_size) == (26, 262208, 256)
    assert (model.tied_embeddings, model.full_attention_every) == (True, None)
    longer = shape_of_config(short, seq_length=8192)
    assert (longer.attention_window, longer.full_attention_every) == (4096, 6)


@pytest.mark.parametrize(
    ("kind", "words", "lacks"),
    [
        ("glm4", {"attention_bias": False}, "norms behind attention and feed-forward too"),
        ("olmo2", {}, "norms behind attention and feed-forward in place of before"),
        ("jais2", {"attention_bias": False}, "biases of feed-forwards"),
        ("gpt_neox", {}, "a norm of the feed-forward's own"),
        ("apertus", {}, "two learned numbers of each activation, the activation xielu in place"),
        ("cohere", {}, "LayerNorm in place of RMSNorm"),
        ("olmo", {"clip_qkv": 8.0}, "norms without weights, clipped queries, keys and values"),
        ("gemma", {"hidden_act": "relu"}, "the activation relu in place of silu"),
        ("granite", {"logits_scaling": 8.0}, "scaling factors"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "scaled rotary positions (yarn)",
        ),
        ("llama", {"our_field": 3}, "fields whose meaning is not known here: our_field"),
        ("llama", {"unused": None, "eos_token_id": 2, "_name_or_path": "a"}, ""),
    ],
)
def test_what_costs_little_is_named(kind: str, words: dict[str, Any], lacks: str) -> None:
    model = read(kind, **words)
    assert model.lacks.startswith(lacks)
    assert bool(model.lacks) is bool(lacks)


def test_what_costs_more_is_refused_with_its_part() -> None:
    config = {"model_type": "laguna", **SPARSE, "num_attention_heads": 128, "head_dim": 4}
    said = refusal(config | {"gating": "per-head"})
    assert said.startswith("no field of a model says a gate of each head's output (")
    assert said.endswith("more than 0.5% of its parameters or FLOPs")
    gated = shape_of_config({**config, "gating": "per-channel"}, seq_length=SEQ)
    assert gated.attention_output_gate


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("bailing_hybrid", "gates of full rank in layers of KDA"),
        ("falcon_h1", "layers of Mamba-1, or of Mamba and attention at once"),
        ("mimo_v2_flash", "values of another width than keys"),
        ("deepseek_v32", "attention to indexed or compressed positions"),
        ("gemma3n_text", "layers or embeddings of different widths"),
        ("bert", "an encoder, or other parts than a decoder"),
        ("bloom", "ALiBi positions"),
    ],
)
def test_families_that_a_shape_cannot_say_are_refused_by_name(kind: str, what: str) -> None:
    assert what in refusal({"model_type": kind, **DENSE}, seq=None)


def test_no_family_is_both_read_and_refused() -> None:
    assert not {*FAMILIES, *SAME_FAMILY} & set(REFUSED)
    assert {*SAME_FAMILY.values()} <= set(FAMILIES)


def test_the_family_of_a_file_without_a_type_is_that_of_its_architecture() -> None:
    config = {"architectures": ["Qwen3MoeForCausalLM"], **SPARSE}
    assert shape_of_config(config, seq_length=SEQ).qk_norm is True
    assert "Mamba and attention" in refusal({"architectures": ["FalconH1ForCausalLM"], **DENSE})
    said = refusal({"architectures": ["OurOwnForCausalLM"], "model_type": "ours", **DENSE})
    assert said.startswith(
        "model_type='ours' is of no family of decoders whose config.json is read"
    )
    for head in ("LlamaModel", "LlamaForSequenceClassification"):
        said = refusal({"architectures": [head], "model_type": "llama", **DENSE})
        assert "no output projection to the vocabulary" in said


def test_words_of_layers_that_a_family_does_not_have_are_refused() -> None:
    assert "kv_lora_rank=512 says multi-head latent attention, which a llama does not have" in (
        refusal({"model_type": "llama", **DENSE, "kv_lora_rank": 512})
    )
    assert "num_experts=8 says experts" in refusal(
        {"model_type": "llama", **DENSE, "num_experts": 8}
    )
    parts = {"model_type": "llama", **DENSE, "linear_attn_config": {"num_heads": 4}}
    assert "says layers of other kinds than attention" in refusal(parts)
    assert "that share weights" in refusal({"model_type": "llama", **DENSE, "use_cla": True})
    heads = {"num_attention_heads_per_layer": [8, 16] * 6}
    assert "of different widths" in refusal({"model_type": "laguna", **SPARSE, **heads})
    assert read("llama", num_experts=1, kv_lora_rank=None).num_experts == 0


def test_a_gpt_has_as_many_positions_as_its_file_says() -> None:
    config = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    model = read("gpt2", config, seq=1024)
    assert (model.family, model.num_parameters, model.lacks) == ("gpt", 124_439_808, "")
    assert read("gpt2", config, seq=1000).lacks == "1024 learned positions"
    assert "1024 learned positions (0.6%)" in refusal({"model_type": "gpt2", **config}, seq=24)
    said = refusal({"model_type": "gpt2", **config}, seq=2048)
    assert said == "seq_length=2048 is more than the 1024 learned positions of the model"
    assert read("gpt_bigcode", config, seq=1024).num_kv_heads == 1


def test_other_blocks_of_the_family_gpt() -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    opt = {**sizes, "ffn_dim": 1024, "vocab_size": 9000, "max_position_embeddings": SEQ}
    assert (
        read("opt", opt).lacks
        == f"{SEQ + 2} learned positions, the activation relu in place of gelu"
    )
    plain = read(
        "opt", {**opt, "num_attention_heads": 2, "enable_bias": False, "vocab_size": 90000}
    )
    assert "linear layers without biases" in plain.lacks
    assert "of different widths" in refusal(
        {"model_type": "opt", **opt, "word_embed_proj_dim": 128}
    )
    neo = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "vocab_size": 9000}
    local = read("gpt_neo", neo, attention_layers=["global", "local"] * 2, window_size=64)
    assert (local.attention_window, local.full_attention_every) == (64, 2)
    assert "attention windows in other layers" in local.lacks


def test_windows_that_no_field_says_are_refused() -> None:
    neo = {"hidden_size": 256, "num_layers": 5, "num_heads": 4, "vocab_size": 9000}
    uneven = {**neo, "attention_layers": ["global", "local", "global", "local", "global"]}
    said = refusal({"model_type": "gpt_neo", **uneven, "window_size": 64})
    assert said.startswith("no field of the family gpt says attention windows in other layers")
    said = refusal({"model_type": "llama", **DENSE, "use_sliding_window": True})
    assert said.startswith("use_sliding_window=true: no field of a model says attention windows")


def test_refused_features_are_the_large_ones_or_together_all() -> None:
    model = read("llama")

    def refused(*shares: float) -> list[str]:
        numbers = (int(share * model.num_parameters) for share in shares)
        features = [Feature(name=str(n), parameters=each) for n, each in enumerate(numbers)]
        return [each.name for each in refused_features(model, features)]

    assert refused(0.0, 0.01, 0.003) == ["1"]
    assert refused(0.003, 0.0, 0.003) == ["0", "2"]
    assert refused(0.001, 0.003) == []


def test_a_part_about_rotary_positions_is_a_mapping() -> None:
    said = refusal({"model_type": "llama", **DENSE, "rope_scaling": "linear"})
    assert said == "rope_scaling='linear' is not a mapping"
    odd = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": [1]}}
    assert "another rotary base" in read("olmo3", rope_parameters=odd).lacks


def test_the_sequence_length_is_asked_for() -> None:
    config = {"model_type": "llama", **DENSE, "max_position_embeddings": 4096}
    said = refusal(config, seq=None)
    assert "state it with --seq-length, or as seq_length beside config" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ('{"model_type": "llama"} {}', "malformed JSON at line 1, column 25"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "the field 'model_type' is there twice"),
        ('{"model_type": "llama", "a": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply"),
        (
            '{"model_type": "llama", "a": ' + "[" * 90000 + "]" * 90000 + "}",
            "more than 50000 values",
        ),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "rms_norm_eps=NaN is not a finite number"),
        ('{"model_type": "llama", "x": [{"y": -Infinity}]}', "y=-Infinity is not a finite number"),
        ('{"model_type": "llama", "a": "' + "x" * (1 << 20) + '"}', "it has more than 1 MB"),
        ('{"model_type": 3}', "model_type=3 is of no family"),
        ('{"model_type": "llama"}', "does not state num_hidden_layers"),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000000}',
            "is not a whole number from",
        ),
        (
            '{"model_type": "llama", "num_hidden_layers": 2.5}',
            "num_hidden_layers=2.5 is not a whole",
        ),
        (
            '{"model_type": "llama", "num_hidden_layers": true}',
            "num_hidden_layers=true is not a whole",
        ),
        ('{"model_type": "llama", "num_hidden_layers": -3}', "=-3 is not a whole number"),
        ('{"model_type": "llava", "text_config": 3}', "text_config=3 is not a mapping"),
        ('{"model_type": "gemma3", "text_config": {"layer_types": "full"}}', "layer_types='full'"),
        (
            '{"model_type": "llama", "architectures": "LlamaForCausalLM", "num_hidden_layers": "4"}',
            "'4'",
        ),
    ],
)
def test_hostile_files_get_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(SearchSpaceError) as caught:
        described_model(file, seq_length=SEQ)
    assert len(caught.value.parts) == 1
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)
    assert len(str(caught.value).removeprefix(str(file))) < 400


@pytest.mark.parametrize(
    "word", [*DENSE, "head_dim", "rope_theta", "layer_types", "tie_word_embeddings"]
)
@pytest.mark.parametrize("value", ["8", [1, 2], {"a": 1}, 10**30, -1, 0.5], ids=repr)
def test_a_wrong_value_of_any_word_gets_one_sentence(word: str, value: Any) -> None:
    said = refusal({"model_type": "llama", **DENSE, word: value})
    assert "\n" not in said


def test_a_file_has_the_name_that_it_states_or_that_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "our-7b"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **DENSE}))
    model = described_model(str(file), seq_length=SEQ)
    assert model["name"] == "our-7b"
    assert resolve_model(model).seq_length == SEQ
    file.write_text(json.dumps({"model_type": "llama", **DENSE, "_name_or_path": "us/their-7b"}))
    assert described_model(file, seq_length=SEQ)["name"] == "their-7b"
    stated = {"config": "our-7b/config.json", "seq_length": 64, "name": "mine"}
    model = described_model(stated, folder=tmp_path)
    assert (model["name"], model["seq_length"]) == ("mine", 64)
    other = file.with_name("small.json")
    other.write_text(json.dumps({"model_type": "llama", **DENSE}))
    assert described_model(other, seq_length=SEQ)["name"] == "small"


def test_a_model_of_our_own_needs_no_sequence_length(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("preset: tiny\nnum_layers: 6\n")
    assert described_model(own) == {"preset": "tiny", "num_layers": 6}
    for named, said in ((own, "has its sequence length in it"), ("tiny", "has its own sequence")):
        with pytest.raises(ModelShapeInvalidError, match=said):
            described_model(named, seq_length=SEQ)
    with pytest.raises(ModelShapeInvalidError, match=r"it is no config\.json of Hugging Face"):
        described_model({"config": str(own)})
    with pytest.raises(SearchSpaceError, match="unknown field beside config 'seq'"):
        described_model({"config": str(own), "seq": 3})


@pytest.mark.parametrize(
    "kind", ["glm4_moe", "gpt_oss", "minimax_m2", "olmoe", "qwen2_moe", "ernie4_5_moe"]
)
def test_experts_without_a_number_are_not_dense(kind: str) -> None:
    config = {name: value for name, value in SPARSE.items() if name != "num_experts"}
    said = refusal({"model_type": kind, **config})
    assert said == "the config.json does not state num_experts"


def test_families_with_experts_may_have_none() -> None:
    assert read("deepseek").num_experts == read("dots1").num_experts == 0
    assert read("olmoe", num_experts=0).num_experts == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *dict.fromkeys(("mistral", "seed_oss", "cwm", "ministral3", "exaone", "emu3"), 8).items(),
        *dict.fromkeys(("gemma2", "gemma3", "smollm3", "vaultgemma"), 4).items(),
        *dict.fromkeys(("ernie4_5", "glm", "glm4", "glm4v"), 2).items(),
        *dict.fromkeys(("qwen2", "qwen3", "exaone4", "llama", "olmo2"), 32).items(),
    ],
)
def test_groups_of_queries_are_those_of_the_class(kind: str, expected: int) -> None:
    config = {name: value for name, value in DENSE.items() if name != "num_key_value_heads"}
    config |= {"num_attention_heads": 32, "hidden_size": 2048}
    assert read(kind, config).num_kv_heads == expected
    assert read(kind, config, num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        ("opt", {}, (None, 0.1)),
        ("opt", {"dropout": 0.2, "attention_dropout": 0.3}, (0.3, 0.2)),
        ("gpt_neo", {"resid_dropout": 0.1}, (None, 0.1)),
        ("gpt2", {}, (0.1, 0.1)),
        ("gpt2", {"resid_pdrop": 0.0, "attn_pdrop": 0.0}, (None, 0.0)),
        ("gpt_bigcode", {}, (0.1, 0.1)),
        ("biogpt", {}, (0.1, 0.1)),
        ("seed_oss", {}, (0.1, 0.1)),
    ],
)
def test_dropout_by_its_names(
    kind: str, words: dict[str, float], expected: tuple[float | None, float]
) -> None:
    model = read(kind, {**DENSE, "max_position_embeddings": 1024}, seq=1024, **words)
    assert (model.attention_dropout, model.hidden_dropout) == expected


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "MedusaLlamaForCausalLM"])
def test_draft_models_are_refused(name: str) -> None:
    said = refusal({"model_type": "llama", "architectures": [name], **DENSE})
    assert said.startswith(f"'{name}' has layers of a draft model")
