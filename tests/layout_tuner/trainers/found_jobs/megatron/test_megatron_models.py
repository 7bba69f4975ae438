"""Shapes of models from Megatron's options."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from layout_tuner.errors import SearchSpaceError
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.megatron.megatron_layers import layers_of_text
from tests.layout_tuner.trainers.found_jobs.megatron.command_lines import (
    GPT,
    LLAMA,
    MOE,
    PLACED,
    found,
    open_of,
)


@pytest.mark.parametrize(
    ("text", "dense"),
    [
        ("1", None),
        ("([1]*32)", None),
        ("([0]*3+[1]*29)", 3),
        ("[0]*1+[1]*31", 1),
        ("[" + ",".join(["0"] + ["1"] * 31) + "]", 1),
        ("([0]*3+[1]*58)", "open"),  # of another number of layers
        ("__import__('os')", "open"),
        ("[0]*9999999999", "open"),
    ],
)
def test_the_layers_with_experts_are_read_and_no_text_is_run(text: str, dense: Any) -> None:
    job = found(f"{MOE} --moe-layer-freq {shlex.quote(text)} --moe-token-dispatcher-type alltoall")
    if dense == "open":
        assert open_of(job) == {"model.num_dense_layers"}
    else:
        assert job.value("model.num_dense_layers") == dense
        assert not job.not_understood


def test_experts_of_a_fork_are_named_and_a_former_dispatcher_is_none_of_ours() -> None:
    job = found(f"{MOE} --first-k-dense-replace 1 --n-shared-experts 2")
    assert open_of(job) == {"model.num_dense_layers", "model.shared_expert_ffn_hidden_size"}
    former = found(f"{MOE} --moe-token-dispatcher-type alltoall_seq --expert-model-parallel-size 2")
    assert former.value("job.moe_dispatcher") is None
    assert not former.not_understood


@pytest.mark.parametrize(("gate", "width"), [("--swiglu", 10_880), ("--quick-geglu", 16_384)])
def test_the_default_width_is_smaller_with_swiglu_alone(gate: str, width: int) -> None:
    shape = LLAMA.replace("--ffn-hidden-size 14336", "").replace("--swiglu", gate)
    assert found(f"{shape} {PLACED}").value("model.ffn_hidden_size") == width


def test_lists_of_layers_are_read_as_python_would() -> None:
    for text in ("([1]*3+[0]*2)*2", "[0]+[1]*2+[0,1]", "(([1]))*3", "[0]*0+[1]*4"):
        assert layers_of_text(text) == eval(text)
    for text in ("", "[", "[]", "[1]*", "[2]", "1", "[1]-[0]", "(" * 5000, "[1]*20000", "[1,]"):
        assert layers_of_text(text) is None, text


@pytest.mark.parametrize(
    ("options", "environment", "kind"),
    [
        ("", {}, None),
        ("--attention-backend auto", {}, "fused"),
        ("--attention-backend flash", {}, "fused"),
        ("--attention-backend unfused", {}, "unfused"),
        ("--transformer-impl local", {}, "unfused"),
        ("--use-flash-attn", {}, "fused"),
        ("", {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, "unfused"),
        ("", {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}, None),
    ],
)
def test_attention_is_read(options: str, environment: dict[str, str], kind: str | None) -> None:
    job = found(f"{LLAMA} {PLACED} {options}", environment=environment)
    assert job.value("model.attention") == kind


def test_the_kind_of_positions_counts_over_the_former_switch() -> None:
    job = found(f"{LLAMA} {PLACED} --no-position-embedding")
    assert (job.value("model.lacks"), job.not_understood) == (None, ())
    plain = LLAMA.replace("--position-embedding-type rope", "--no-position-embedding")
    assert found(f"{plain} {PLACED}").value("model.rotary_fraction") == 0


def test_experts_are_divided_as_tp_says_also_where_it_is_not_known() -> None:
    job = found(f"{MOE} --tensor-model-parallel-size ?TP --padded-vocab-size 1024")
    assert open_of(job) == {"tp", "etp"}


def test_experts_have_the_trainer_s_defaults() -> None:
    job = found(f"{MOE} --expert-model-parallel-size 4 --moe-shared-expert-intermediate-size 2816")
    assert (job.value("ep"), job.value("etp")) == (4, 2)
    assert job.value("model.shared_expert_ffn_hidden_size") == 2816
    assert job.value("model.ffn_hidden_size") is None  # no layer is dense
    assert job.value("job.moe_dispatcher") == "allgather"
    flex = found(f"{MOE} --expert-model-parallel-size 4 --moe-token-dispatcher-type flex")
    assert flex.value("job.moe_dispatcher") == "deepep"
    assert found(f"{MOE}").value("job.moe_dispatcher") is None  # ep=1 has no exchange


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("--multi-head-latent-attention", "model.kv_lora_rank"),
        ("--mtp-num-layers 1 --mtp-use-repeated-layer", "model.num_mtp_layers"),
        ("--hybrid-layer-pattern M-*-/MM", "model.num_mtp_layers"),
        ("--hybrid-layer-pattern MD*-", "model.layer_kinds"),
        ("--is-hybrid-model --hybrid-attention-ratio 0.1", "model.layer_kinds"),
        ("--experimental-attention-variant dsa", "model.layer_kinds"),
        ("--spec my.layers spec", "model.family"),
        ("--spec megatron.core.models.gpt.gpt_layer_specs layer_spec", ""),
        ("--position-embedding-type relative", "model.family"),
        ("--window-size 128,128", "model.attention_window"),
        ("--language-model-type mistral_7b", "model.family"),
        ("--tokenizer-type HuggingFaceTokenizer --vocab-size x", "model.vocab_size"),
        ("--enable-shared-expert", "model.shared_expert_ffn_hidden_size"),
        ("--num-layer-list 8,8,8,8", "pipeline_split"),
        ("--tensor-parallel-num-weight-shards 4", "dp"),
    ],
)
def test_what_no_field_says_is_named_with_the_field_that_it_opens(options: str, name: str) -> None:
    assert open_of(found(f"{LLAMA} {PLACED} {options}")) == {name}


def test_small_differences_go_into_what_the_model_lacks() -> None:
    job = found(f"{LLAMA} {PLACED} --softmax-type off-by-one --no-rope-freq 4")
    assert job.value("model.lacks") == "attention sinks, layers without rotation of positions"
    assert not job.not_understood
    gated = GPT.replace("--hidden-size 2048", "--hidden-size 4096")
    gated += " --swiglu --micro-batch-size 1 --padded-vocab-size 256000"
    assert found(gated).value("model.lacks") == "learned positions"
    (missed,) = found(f"{gated} --num-layers 1 --max-position-embeddings 65536").not_understood
    assert missed.field == "model.family"
    assert "of the parameters, more than a shape may lack" in missed.why


@pytest.mark.parametrize(
    ("options", "window", "every"),
    [
        ("--window-size 127,0", 128, None),
        ("--window-size (127,0) --window-attn-skip-freq 2", 128, 2),
        ("--window-size 127 0", 128, None),
        ("--window-size 127,0 --window-attn-skip-freq '([1]*3+[0]*1)*8'", 128, 4),
        ("--window-size 127,0 --window-attn-skip-freq '[1]*32'", 128, None),
        ("--window-size -1,0", None, None),
    ],
)
def test_windows_count_the_token_itself(options: str, window: Any, every: Any) -> None:
    job = found(f"{LLAMA} {PLACED} {options}")
    found_values = job.value("model.attention_window"), job.value("model.full_attention_every")
    assert found_values == (window, every)
    assert not job.not_understood


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("--vocab-size 32000", 32_000),
        ("--vocab-size 32001", 32_256),  # 128 * tp=2
        ("--vocab-size 32001 --make-vocab-size-divisible-by 1", 32_002),
        ("--padded-vocab-size 152064", 152_064),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /data/gpt2-vocab.json", 50_432),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /data/vocab.json", None),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/other/tokenizer.model", None),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /llama-2-7b-hf/t.model", 32_000),
        ("--tokenizer-type Llama2Tokenizer", 32_000),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /llama-3-tok-extended/x", None),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /x/qwen2-vl-7b", None),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B", 151_808),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-7B", 151_808),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B",
            128_256,
        ),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/my-tokenizer", None),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /my --vocab-size 64000", 64_000),
        ("--tokenizer-type TikTokenizer --tokenizer-model /my", 131_072),
        ("--tokenizer-type HFTokenizer --tokenizer-model /models/llama-7b/tokenizer.model", 32_000),
        ("--tokenizer-type HFTokenizer --tokenizer-model /models/llama-4-scout", None),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ?MODEL", None),
    ],
)
def test_the_vocabulary_is_padded_and_unknown_ones_are_asked_for(
    options: str, size: int | None
) -> None:
    shape = LLAMA.replace("--tokenizer-type NullTokenizer --vocab-size 128256", "")
    job = found(f"{shape} {PLACED} {options}")
    assert job.value("model.vocab_size") == size
    assert open_of(job) == (set() if size else {"model.vocab_size"})


def test_the_vocabulary_is_known_without_tp_where_all_degrees_pad_it_alike() -> None:
    shape = LLAMA.replace("--tokenizer-type NullTokenizer --vocab-size 128256", "")
    options = f"{shape} --micro-batch-size 1 --tensor-model-parallel-size ?TP"
    named_tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B"
    same = found(f"{options} {named_tokenizer} --make-vocab-size-divisible-by 1187")
    assert same.value("model.vocab_size") == 151_936
    assert open_of(found(f"{options} {named_tokenizer}")) == {"tp", "model.vocab_size"}


@pytest.mark.parametrize(
    "tp", ["--tensor-model-parallel-size 2", "--tensor-model-parallel-size ?TP"]
)
def test_the_vocabulary_is_padded_for_the_tp_that_is_stated(tp: str) -> None:
    shape = LLAMA.replace("--vocab-size 128256", "--vocab-size 32001")
    job = found(f"{shape} {tp} --micro-batch-size 1 --global-batch-size 64 --bf16")
    for degree, size in ((1, 32_128), (4, 32_256), (8, 32_768)):
        stated = job.with_stated({"tp": degree})
        assert stated.value("model.vocab_size") == size
        assert not open_of(stated)
    own = job.with_stated({"tp": 4, "model.vocab_size": 32_000})
    assert own.value("model.vocab_size") == 32_000
    whole = found(f"{shape} {tp} --padded-vocab-size 33000 --micro-batch-size 1 --bf16")
    assert whole.with_stated({"tp": 8}).value("model.vocab_size") == 33_000


def test_a_script_without_a_shape_leaves_the_model_to_be_stated() -> None:
    job = found(f"{PLACED} --use-checkpoint-args --load ckpt --seq-length 4096 --swiglu")
    assert [name for name in job.values if name.startswith("model.")] == ["model.seq_length"]
    with pytest.raises(
        SearchSpaceError, match=r"give its config\.json, a file or a preset with --mo"
    ):
        completed(job, num_nodes=1, devices_per_node=8)
