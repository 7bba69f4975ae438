"""Jobs of Megatron-Bridge: what we export is read back; what people write is read, or named."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import settings_in_effect
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.found_jobs.recipes.bridge import read_config
from layout_tuner.trainers.found_jobs.recipes.bridge_command import read_command
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE
from tests.exports.exported_files import exported_texts
from tests.exports.legal_jobs import LAYOUT_SAYS, legal_jobs
from tests.layout_tuner.trainers.found_jobs.megatron.command_lines import layout_in_file

DENSE = ModelShape.from_mapping(
    {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_heads": 4,
        "seq_length": 2048,
        "vocab_size": 512,
    }
)
RECIPES = "/bridge/scripts/training/run_recipe.py"


@st.composite
def jobs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> TrainerJob:
    """A random legal job with random job knobs."""
    job: TrainerJob = draw(legal_jobs("megatron-bridge"))
    drawn = {
        name: draw(st.sampled_from(knob.every_value))
        for name, knob in MEGATRON_BRIDGE.job_knobs.items()
        if name not in LAYOUT_SAYS and draw(st.booleans())
    }
    knobs = MEGATRON_BRIDGE.job_knobs
    stated = {name: value for name, value in drawn.items() if not knobs[name].is_default(value)}
    kept = settings_in_effect(stated, MEGATRON_BRIDGE.knobs, job.layout, job.model)
    return replace(job, layout=replace(job.layout, job=JobSettings(kept)))


def as_trained(model: ModelShape) -> ModelShape:
    """The model without what an export does not state: its name, and the default of attention."""
    dropout = model.attention_dropout or 0.0
    return replace(model, name="custom", attention=None, attention_dropout=dropout)


def yaml_of(job: TrainerJob) -> JobFile:
    name = "megatron-bridge.yaml"
    return JobFile(name=name, text=exported_texts("megatron-bridge", job)[name])


def read(text: str, name: str = "job.yaml") -> FoundJob:
    found = read_config(JobFile(name=name, text=text))
    assert found is not None
    return found[0]


def command(*words: str | Word, program: str = RECIPES) -> FoundJob:
    """The job of a command; a word is its text, or a `Word` that is not known."""
    text = shlex.join([program, *(each for each in words if isinstance(each, str))])
    each_word = [
        each if isinstance(each, Word) else Word(text=each, said=each, line=1)
        for each in (program, *words)
    ]
    file = JobFile(name="job.sh", text=text)
    found = read_command(ProgramCommand(words=tuple(each_word)), file)
    assert found is not None
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=jobs())
def test_an_exported_yaml_is_read_back(job: TrainerJob) -> None:
    found = read_config(yaml_of(job))
    assert found is not None
    devices = job.layout.num_devices // job.layout.num_nodes
    job_read = completed(found[0], num_nodes=job.layout.num_nodes, devices_per_node=devices)
    assert as_trained(job_read.model) == as_trained(job.model)
    assert job_read.layout == layout_in_file(job)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=jobs())
def test_an_exported_script_is_read_back(job: TrainerJob) -> None:
    text = exported_texts("megatron-bridge", job)["megatron-bridge.sh"]
    file = JobFile(name="job.sh", text=text)
    job_read = completed(read_job(file))  # the script says its nodes and ranks
    assert as_trained(job_read.model) == as_trained(job.model)
    assert job_read.layout == layout_in_file(job)


def said(job: FoundJob) -> dict[str, Any]:
    """The values that are read or assumed, of fields that are not open."""
    return {name: value for name, value in job.values.items() if name not in job.open_fields}


def stated(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values.get(name) for name in names}


OVERRIDES = """
model:
  seq_length: 2048
  tensor_model_parallel_size: 2   # a comment
  pipeline_model_parallel_size: 1
  context_parallel_size: 1
  sequence_parallel: true
train: {micro_batch_size: 2, global_batch_size: 64, train_iters: 10}
dataset:
  seq_length: 2048
optimizer:
  lr: 3e-4
"""


def test_overrides_of_an_unknown_recipe_leave_open_what_only_it_says() -> None:
    job = read(OVERRIDES)
    assert stated(said(job), "tp", "pp", "cp", "sequence_parallel") == {
        "tp": 2,
        "pp": 1,
        "cp": 1,
        "sequence_parallel": True,
    }
    assert (job.value("micro_batch_size"), job.value("global_batch_size")) == (2, 64)
    assert job.value("model.seq_length") == 2048
    assert set(job.open_fields) == {"ep", "etp", "recompute", "zero_stage", "precision"}
    with pytest.raises(JobFileInvalidError, match="only the recipe says it"):
        completed(job, model=DENSE, num_nodes=1, devices_per_node=8)


def test_values_have_their_places() -> None:
    file = JobFile(name="job.yaml", text=OVERRIDES)
    found = read_config(file)
    assert found is not None
    places = {each.field: each.place for each in found[0].read}
    for field, literal in (("tp", "2"), ("sequence_parallel", "true"), ("micro_batch_size", "2")):
        place = places[field]
        assert place is not None
        assert file.text[place.start : place.end] == literal
        assert file.line_of(place.start) == place.line


def test_a_dense_model_makes_degrees_of_experts_moot() -> None:
    stated_by_user = {"recompute": "none", "zero_stage": 1, "precision": "bf16"}
    job = read(OVERRIDES).with_stated(stated_by_user)
    assert completed(job, model=DENSE, num_nodes=1, devices_per_node=8).layout.dp == 4
    mixture = replace(DENSE, num_experts=8, experts_per_token=2, moe_ffn_hidden_size=128)
    with pytest.raises(JobFileInvalidError, match=r"ep \("):
        completed(job, model=mixture, num_nodes=1, devices_per_node=8)


def test_lengths_that_differ_are_not_understood() -> None:
    job = read(OVERRIDES.replace("dataset:\n  seq_length: 2048", "dataset:\n  seq_length: 4096"))
    assert job.open_fields["model.seq_length"].why == "the two must agree"


SAVED = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama3ModelProvider
  num_layers: 16
  hidden_size: 2048
  ffn_hidden_size: 8192
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 64
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  normalization: RMSNorm
  position_embedding_type: rope
  rotary_base: 500000
  add_bias_linear: false
  add_qkv_bias: false
  share_embeddings_and_output_weights: true
  seq_length: 4096
  vocab_size: 128256
  should_pad_vocab: true
  make_vocab_size_divisible_by: 128
  attention_backend:
    _target_: megatron.core.transformer.enums.AttnBackend
    _call_: true
    _args_: [5]
    _name_: auto
  params_dtype: &dtype {_target_: torch.bfloat16, _call_: false}
  pipeline_dtype: *dtype
  init_method:
    _target_: megatron.core.utils.init_method_normal
    _partial_: true
    _args_: []
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  context_parallel_size: 2
  cp_comm_type: a2a
  expert_model_parallel_size: 1
  expert_tensor_parallel_size: null
  sequence_parallel: true
  recompute_granularity: selective
  recompute_method: null
  recompute_num_layers: null
  recompute_modules: [core_attn]
  account_for_embedding_in_pipeline_split: false
  account_for_loss_in_pipeline_split: true
  moe_token_dispatcher_type: allgather
  moe_flex_dispatcher_backend: deepep
  moe_grouped_gemm: false
  cross_entropy_loss_fusion: true
  cross_entropy_fusion_impl: te
  cuda_graph_impl: none
  cuda_graph_modules: [attn]
  cpu_offloading: false
  num_moe_experts: null
  hidden_dropout: 0.0
  attention_dropout: 0.0
  mtp_num_layers: null
  multi_latent_attention: false
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  micro_batch_size: 1
  global_batch_size: 128
ddp:
  _target_: megatron.bridge.training.config.DistributedDataParallelConfig
  use_distributed_optimizer: true
  use_megatron_fsdp: false
  data_parallel_sharding_strategy: optim_grads_params
  num_distributed_optimizer_instances: 2
  overlap_grad_reduce: true
  overlap_param_gather: false
  check_for_nan_in_grad: true
dist: {_target_: megatron.bridge.training.config.DistributedInitConfig, use_tp_pp_dp_mapping: true}
dataset: {seq_length: 4096}
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  fp16: false
  fp8: hybrid
  fp8_recipe: tensorwise
  params_dtype: *dtype
peft: null
"""


def test_a_saved_configuration_states_the_whole_job() -> None:
    job = read(SAVED)
    assert not job.not_understood
    whole_job = completed(job, num_nodes=4, devices_per_node=8)
    assert whole_job.layout.to_mapping() == {
        "num_nodes": 4,
        "tp": 4,
        "cp": 2,
        "pp": 2,
        "dp": 2,
        "vpp": 4,
        "cp_comm_type": "a2a",
        "pipeline_split": "head",
        "rank_order": "tp_cp_pp_dp",
        "micro_batch_size": 1,
        "num_microbatches": 64,
        "zero_stage": 1,
        "zero_replicas": 2,
        "recompute": "selective",
        "sequence_parallel": True,
        "precision": "fp8",
        "job": {"cross_entropy": "te", "param_gather_overlap": False},
    }
    model = whole_job.model
    assert (model.family, model.num_kv_heads, model.tied_embeddings) == ("llama", 8, True)
    assert model.vocab_size == 128512  # to a multiple of 128 * tp
    assert model.rotary_base == 5e5


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ("recompute_modules: [core_attn]", "recompute_modules: [moe, core_attn]", "recompute"),
        ("selective\n  recompute_method: null", "full\n  recompute_method: block", "recompute"),
        (
            "mtp_num_layers: null",
            "mtp_num_layers: 1\n  mtp_use_repeated_layer: true",
            "model.num_mtp_layers",
        ),
        ("mtp_num_layers: null", "is_hybrid_model: true", "model.layer_kinds"),
        ("cp_comm_type: a2a", "cp_comm_type: a2a+p2p", "cp_comm_type"),
        ("fp8: hybrid", "fp8: hybrid\n  fp4: e2m1", "precision"),
        ("cpu_offloading: false", "pipeline_model_parallel_layout: Et*7|t*9L", "pipeline_split"),
        ("  cpu_offloading: false", "  num_layers_in_first_pipeline_stage: 7", "pipeline_split"),
        ("_size: 4\n", "_size: ${oc.env:TP}\n", "tp"),
        ("rope\n", "learned_absolute\n", "model.family"),
        ("peft: null", "peft: {dim: 32}", "model.lacks"),
    ],
)
def test_what_has_no_counterpart_is_named(before: str, after: str, field: str) -> None:
    assert before in SAVED
    text = SAVED.replace(before, after, 1)
    job = read(text)
    assert any(name.startswith(field) for name in job.open_fields)
    with pytest.raises(JobFileInvalidError, match="state each with"):
        completed(job, num_nodes=4, devices_per_node=8)


KEYS = re.findall(r"(?m)^  (\w+): \w[\w.]*$", SAVED)
ODD = ("[1, 2]", "{a: 1}", "-1", "'x y'", "1e30", ".inf", "!!set {}", "~", "0", "true", "9" * 30)


@settings(max_examples=80, deadline=None)
@given(key=st.sampled_from(KEYS), odd=st.sampled_from(ODD))
def test_odd_values_end_in_no_other_error_than_a_sentence(key: str, odd: str) -> None:
    text = re.sub(rf"(?m)^(  {key}): .*$", rf"\1: {odd}", SAVED)
    with contextlib.suppress(JobFileInvalidError):
        completed(read(text), num_nodes=4, devices_per_node=8)


def test_levers_without_a_counterpart_are_listed() -> None:
    job = read(SAVED.replace("cpu_offloading: false", "cpu_offloading: true"))
    assert [each.said for each in job.not_understood] == ["model.cpu_offloading: true"]


@pytest.mark.parametrize(
    ("ddp", "stage"),
    [
        ("use_distributed_optimizer: false", 0),
        ("use_distributed_optimizer: true", 1),
        ("use_megatron_fsdp: true, data_parallel_sharding_strategy: optim_grads", 2),
        ("use_megatron_fsdp: true, data_parallel_sharding_strategy: optim_grads_params", 3),
    ],
)
def test_the_sharding_gives_the_zero_stage(ddp: str, stage: int) -> None:
    begin, end = SAVED.index("ddp:"), SAVED.index("dist:")
    text = f"{SAVED[:begin]}ddp: {{{ddp}}}\n{SAVED[end:]}"
    assert read(text).value("zero_stage") == stage


def test_a_recipe_says_its_model_and_precision() -> None:
    job = command(
        *[
            "--recipe",
            "qwen3_8b_pretrain_config",
            "--mode",
            "pretrain",
            "-tp",
            "4",
            "-pp=2",
            "-cp",
            "1",
            "-mb",
            "1",
            "-gb",
            "64",
        ],
        *["-sl", "4096", "++model.sequence_parallel=true", "model.recompute_granularity=null"],
        *["model.virtual_pipeline_model_parallel_size=3", "~model.pipeline_dtype"],
        *["model.account_for_loss_in_pipeline_split=false"],
    )
    assert set(job.open_fields) == {"pipeline_split", "model.vocab_size"}
    assert next(each.said for each in job.read if each.field == "tp") == "-tp 4"
    layout = completed(
        job.with_stated({"pipeline_split": "layers", "model.vocab_size": 151680}),
        num_nodes=2,
        devices_per_node=8,
    )
    assert (layout.layout.tp, layout.layout.pp, layout.layout.vpp) == (4, 2, 3)
    assert (layout.layout.zero_stage, layout.layout.precision) == (1, "bf16")
    assert layout.layout.recompute == "none"
    assert layout.model.num_layers == 36
    assert layout.model.seq_length == 4096


def test_the_vocabulary_of_a_recipe_may_be_its_tokenizers() -> None:
    words = ("-tp", "4", "-pp", "1", "-cp", "1")
    pretraining = command("--recipe", "llama3_8b_pretrain_config", *words)
    assert "tokenizer" in pretraining.open_fields["model.vocab_size"].why
    null = command("--recipe", "llama3_8b_pretrain_config", *words, "tokenizer.vocab_size=32001")
    assert null.value("model.vocab_size") == 32256  # to a multiple of 128 * tp
    own = "tokenizer.use_tokenizer_vocab_size=false"
    for recipe, more in (
        ("llama3_8b_pretrain_config", own),
        ("llama3_8b_sft_config", "rng.seed=1"),
    ):
        assert command("--recipe", recipe, *words, more).value("model.vocab_size") == 128256


def test_performance_scripts_state_devices_and_precision() -> None:
    job = command(
        *[
            "-m",
            "llama",
            "-mr",
            "llama3_8b",
            "--task",
            "pretrain",
            "-g",
            "h100",
            "-c",
            "fp8_cs",
            "-ng",
            "16",
            "-tp",
            "1",
            "-pp",
            "1",
        ],
        *[
            "-cp",
            "2",
            "-vp",
            "None",
            "-mb",
            "1",
            "-gb",
            "128",
            "--seq_length",
            "8192",
            "-wdk",
            "secret",
            "--log_dir",
            "x",
        ],
        program="scripts/performance/run_script.py",
    )
    values = said(job)
    assert stated(values, "num_devices", "devices_per_node", "precision", "zero_stage", "cp") == {
        "num_devices": 16,
        "devices_per_node": 8,
        "precision": "fp8",
        "zero_stage": 1,
        "cp": 2,
    }
    assert values["model.num_layers"] == 32
    assert "secret" not in str(job.not_understood)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("mixed_precision.fp8=hybrid", "fp8"),
        ("mixed_precision=bf16_with_fp8_subchannel_scaling_mixed", "fp8_block"),
        ("mixed_precision=bf16_with_mxfp8_mixed", "mxfp8"),
        ("mixed_precision=bf16_with_nvfp4_mixed", "nvfp4"),
        ("mixed_precision=fp16_mixed", "fp16"),
        ("mixed_precision=null", "fp32"),
        ("mixed_precision.grad_reduce_in_fp32=false", "bf16"),
    ],
)
def test_overrides_of_the_precision_win_over_the_name(words: str, precision: str) -> None:
    job = command("--recipe", "llama3_8b_pretrain_config", words)
    assert job.value("precision") == precision
    named = command("--recipe", "llama3_8b_pretrain_8gpu_h100_fp8cs_config", words)
    other = {"mixed_precision.grad_reduce_in_fp32=false": "fp8"}
    assert named.value("precision") == other.get(words, precision)


@pytest.mark.parametrize(
    ("ending", "precision"), [("fp8mx", "mxfp8"), ("fp8sc", "fp8_block"), ("nvfp4", "nvfp4")]
)
def test_names_of_recipes_end_in_the_precision(ending: str, precision: str) -> None:
    named = command("--recipe", f"llama3_8b_pretrain_8gpu_b200_{ending}_config")
    assert named.value("precision") == precision


def test_a_recipe_of_low_precision_has_a_name_of_its_own() -> None:
    low = command("--recipe", "llama3_8b_low_precision_pretrain_config")
    assert low.model_name == "llama3_8b_low_precision"
    assert low.value("model.num_layers") is None


def test_blackwells_recipes_may_share_weights() -> None:
    words = "--recipe llama3_70b_pretrain_64gpu_gb200_bf16_config -tp 1 -pp 1 -cp 1"
    job = command(*words.split())
    assert "zero_stage" in job.open_fields
    assert (job.value("num_devices"), job.value("devices_per_node")) == (64, 4)
    # The batch of a recipe grows with the devices, and is not one micro-batch for each.
    assert "global_batch_size" in job.open_fields
    assert job.value("num_microbatches") is None


def test_recipes_of_adapters_are_named() -> None:
    job = command("--model", "llama3_8b", "--mode", "lora", "-tp", "1", "-pp", "1", "-cp", "1")
    assert "adapters" in job.open_fields["model.lacks"].why


def test_an_own_program_with_overrides_is_one_of_the_trainer() -> None:
    job = command(
        "--recipe",
        "llama32_1b_pretrain_config",
        "model.tensor_model_parallel_size=2",
        program="pretrain_mine.py",
    )
    assert job.value("tp") == 2
    other = ProgramCommand(words=(Word(text="train.py", said="train.py", line=1),))
    assert read_command(other, JobFile(name="job.sh", text="python train.py")) is None


def test_words_that_are_not_known_leave_their_field_open() -> None:
    unknown = Word(
        text=None,
        said="model.tensor_model_parallel_size=$1",
        line=3,
        why="$1 comes from outside",
        prefix="model.tensor_model_parallel_size=",
    )
    many = Word(text=None, said="${MORE[@]}", line=4, why="MORE is not assigned")
    certain = Word(
        text="train.micro_batch_size=2",
        said="train.micro_batch_size=2",
        line=5,
        is_certain=False,
    )
    job = command("--recipe", "llama3_8b_pretrain_config", unknown, many, certain)
    assert job.open_fields["tp"].why == "$1 comes from outside"
    assert "condition" in job.open_fields["micro_batch_size"].why
    assert any(each.said == "${MORE[@]}" for each in job.not_understood)


def test_later_overrides_win_over_options_and_files(tmp_path: Any) -> None:
    (tmp_path / "over.yaml").write_text(OVERRIDES)
    words = ["--config-file", "over.yaml", "-tp", "4", "model.tensor_model_parallel_size=8"]
    text = [Word(text=each, said=each, line=1) for each in ("pretrain.py", *words)]
    file = JobFile(name="job.sh", text=" ".join(words), folder=tmp_path)
    job = read_command(ProgramCommand(words=tuple(text)), file)
    assert job is not None
    assert (job.value("tp"), job.value("micro_batch_size")) == (8, 2)
    assert job.value("model.seq_length") == 2048


def test_a_file_may_name_its_recipe_and_its_nodes() -> None:
    job = read(
        "run:\n  data: blend:latest\n  env: {executor: slurm, nodes: 4, gpus_per_node: 8}\n"
        "recipe:\n  _target_: megatron.bridge.recipes.qwen.qwen3.qwen3_8b_pretrain_config\n"
        "  data_args: ${art:data,path}/blend.json\n"
        "train: {train_iters: 1700, global_batch_size: 32}\n"
        "model: {tensor_model_parallel_size: 4, seq_length: '${art:data,pack_size}'}\n"
    )
    assert job.model_name == "qwen3_8b"
    values = said(job)
    assert stated(values, "num_nodes", "devices_per_node", "global_batch_size", "tp") == {
        "num_nodes": 4,
        "devices_per_node": 8,
        "global_batch_size": 32,
        "tp": 4,
    }
    assert "variable" in job.open_fields["model.seq_length"].why
    assert values["model.num_layers"] == 36


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("_target_: nemo.collections.llm.api.pretrain\nmodel: {}\ntrainer: {}\n", "NeMo 2"),
        ("model: {_target_: nemo.collections.llm.GPTModel}\ntrainer: {devices: 8}\n", "NeMo 2"),
        ("trainer: {devices: 8}\nexp_manager: {}\nmodel: {micro_batch_size: 1}\n", "NeMo 1"),
    ],
)
def test_nemo_is_refused_by_its_name(text: str, sentence: str) -> None:
    with pytest.raises(JobFileInvalidError, match=sentence):
        read_config(JobFile(name="job.yaml", text=text))


@pytest.mark.parametrize(
    "text",
    [
        "parallelism: {tp: 2}\ntokens: {micro_batch_size: 1}\n",
        "modules: {pre_trainer: {framework: megatron}}\n",
        "model: {name: llama3}\ntraining: {seq_len: 8}\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n",
        "model: gpt\ntrain: {lr: 1}\n",
        "[1, 2]\n",
    ],
)
def test_other_formats_are_left_to_their_readers(text: str) -> None:
    assert read_config(JobFile(name="job.yaml", text=text)) is None
