"""Jobs of Primus: experiments with overrides, variables, and files that lie beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layout_tuner.trainers.found_jobs.completed_job import CompletedJob, completed
from layout_tuner.trainers.found_jobs.found_job import FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.known_models import known_model
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.recipes.primus import read_command, read_config
from layout_tuner.trainers.found_jobs.recipes.primus_presets import megatron_model

HEAD = """
work_group: ${TEAM:amd}
user_name: ${USER}
exp_name: mine
workspace: ./output
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: %s
    overrides:
"""
OVERRIDES = """
      wandb_project: "mine"
      stderr_sink_level: DEBUG
      train_iters: 50
      micro_batch_size: 2
      global_batch_size: ${GBS:128}
      seq_length: 8192
      max_position_embeddings: 8192
      lr: 1.0e-5
      tensor_model_parallel_size: ${PRIMUS_TP:4}
      pipeline_model_parallel_size: 2
      overlap_grad_reduce: true
      overlap_param_gather: true
      mock_data: true
      train_data_path: null
      save: null
      no_save_optim: null
      ckpt_format: torch
"""


def experiment(more: str = "", model: str = "llama3.1_8B.yaml") -> str:
    lines = "".join(f"      {line}\n" for line in more.splitlines())
    return HEAD % model + OVERRIDES + lines


def read(text: str, folder: Path | None = None) -> FoundJob:
    found = read_config(JobFile(name="exp.yaml", text=text, folder=folder))
    assert found is not None
    return found[0]


def test_an_experiment_names_its_trainer_and_model() -> None:
    job = read(experiment())
    read_as = (job.format, job.trainer, job.model_name)
    assert read_as == ("primus", "megatron-lm", "llama3.1_8B.yaml")
    assert not job.not_understood


@pytest.fixture(scope="module")
def on_two_nodes() -> CompletedJob:
    return completed(read(experiment()), num_nodes=2, devices_per_node=8)


def test_the_layout_of_an_experiment_is_its_overrides(on_two_nodes: CompletedJob) -> None:
    assert on_two_nodes.layout.to_mapping() == {
        "num_nodes": 2,
        "tp": 4,
        "pp": 2,
        "dp": 2,
        "vpp": 1,
        "micro_batch_size": 2,
        "num_microbatches": 32,
        "zero_stage": 1,
        "zero_replicas": 1,
        "recompute": "none",
        "sequence_parallel": True,
        "precision": "bf16",
    }


def test_the_model_of_an_experiment_is_its_file_and_overrides(on_two_nodes: CompletedJob) -> None:
    shape = {
        "num_layers": 32,
        "num_kv_heads": 8,
        "seq_length": 8192,
        "vocab_size": 128512,  # to a multiple of 128 * tp
    }
    assert {name: getattr(on_two_nodes.model, name) for name in shape} == shape


def test_fields_of_the_trainers_own_files_say_where_they_stand() -> None:
    assumed = {each.field: each.why for each in read(experiment()).assumed}
    assert assumed["precision"] == "Primus' pre_trainer.yaml, bf16: true"
    assert assumed["model.hidden_size"] == "Primus' llama3.1_8B.yaml, hidden_size: 4096"


def test_values_have_their_places_with_their_variables() -> None:
    text = experiment()
    places = {each.field: each.place for each in read(text).read}
    for field, literal in (("tp", "${PRIMUS_TP:4}"), ("pp", "2"), ("micro_batch_size", "2")):
        place = places[field]
        assert place is not None
        assert text[place.start : place.end] == literal


@pytest.mark.parametrize(
    ("algorithm", "schedule"), [("zbv", "zbv"), ("v-half", "v_half"), ("v-min", "v_min")]
)
def test_v_schedules_of_primus_have_two_chunks_a_rank(algorithm: str, schedule: str) -> None:
    stages = "num_virtual_stages_per_pipeline_rank: {}\n"
    more = f"{stages}patch_primus_pipeline: true\npp_algorithm: {algorithm}"
    job = read(experiment(more.format(2)))
    assert {each.field: each.value for each in job.assumed}["schedule"] == schedule
    assert "schedule" in read(experiment(more.format(4))).open_fields


def test_a_variable_without_a_default_leaves_its_field_open() -> None:
    job = read(experiment("context_parallel_size: ${CP}"))
    assert job.open_fields["cp"].why == "CP is set where the job runs"


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("sequence_parallel: 0", "sequence_parallel", False),
        ("sequence_parallel: 1", "sequence_parallel", True),
        ("use_distributed_optimizer: false", "zero_stage", 0),
        ("use_distributed_optimizer: false\nuse_torch_fsdp2: true", "zero_stage", 3),
        ("fp8: hybrid\nfp8_recipe: tensorwise", "precision", "fp8"),
        ("bf16: false", "precision", "fp32"),
        ("num_virtual_stages_per_pipeline_rank: 4", "vpp", 4),
        (
            "recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 16",
            "recompute",
            "full",
        ),
        (
            "recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 0",
            "recompute",
            "none",
        ),
        (
            "recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 3",
            "recompute_layers",
            "3",
        ),
        ("num_layers: ${LAYERS:16}", "model.num_layers", 16),
        ("untie_embeddings_and_output_weights: false", "model.tied_embeddings", True),
        ("qk_layernorm: true\nkv_channels: 64", "model.head_dim", 64),
        ("patch_primus_pipeline: true\npp_algorithm: zero-bubble", "schedule", "zero_bubble"),
        (
            "cross_entropy_loss_fusion: true\ncross_entropy_fusion_impl: te",
            "job.cross_entropy",
            "te",
        ),
    ],
)
def test_overrides_change_layout_model_and_knobs(more: str, field: str, value: Any) -> None:
    job = read(experiment(more))
    assert job.value(field) == value
    assert field not in job.open_fields


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ('recompute_granularity: full\nrecompute_layer_ids: "0,3"', "recompute"),
        ("decoder_pipeline_manual_split_list: [17, 15]", "pipeline_split"),
        ("virtual_pipeline_model_parallel_size: 2", "vpp"),
        ("fp4: mxfp4", "precision"),
        ("mtp_num_layers: 1\nmtp_use_repeated_layer: true", "model.num_mtp_layers"),
        ("patch_primus_pipeline: true\npp_algorithm: seq1f1b", "schedule"),
        ("lora:\n  enabled: true", "model.lacks"),
        ("tokenizer_type: HuggingFaceTokenizer\ntokenizer_model: mine/of-mine", "model.vocab_size"),
    ],
)
def test_what_has_no_counterpart_leaves_its_field_open(more: str, field: str) -> None:
    job = read(experiment(more))
    assert field in job.open_fields
    with pytest.raises(JobFileInvalidError, match="state each with"):
        completed(job, num_nodes=2, devices_per_node=8)


def test_own_knobs_are_listed_where_they_matter() -> None:
    more = "use_turbo_deepep: true\nturbo_deepep_num_cu: 64\nenable_primus_turbo: false"
    job = read(experiment(more))
    assert [each.said.rpartition(".")[2] for each in job.not_understood] == [
        "use_turbo_deepep: true"
    ]


def test_an_override_can_turn_latent_attention_off() -> None:
    latent = read(experiment(model="deepseek_v2_lite.yaml"))
    assert set(latent.open_fields) == {"model.vocab_size"}
    assert (latent.value("model.kv_lora_rank"), latent.value("model.q_lora_rank")) == (512, None)
    plain = read(experiment("multi_latent_attention: false", model="deepseek_v2_lite.yaml"))
    assert set(plain.open_fields) == {"model.vocab_size"}
    values = plain.values
    assert (values["model.head_dim"], values["model.num_dense_layers"]) == (128, 1)
    assert values["model.shared_expert_ffn_hidden_size"] == 2816
    assert values["ep"] == 8  # of the model's own file


def test_a_model_that_is_not_known_is_asked_for() -> None:
    job = read(experiment("expert_model_parallel_size: 8", model="mine.yaml"))
    assert job.model_name == "mine.yaml"
    assert (job.value("ep"), job.value("etp")) == (8, 4)
    with pytest.raises(JobFileInvalidError, match="--model"):
        completed(job, num_nodes=2, devices_per_node=8)


def test_files_that_lie_beside_are_read(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("num_layers: 8\nhidden_size: 512\nswiglu: true\n")
    (tmp_path / "mine.yaml").write_text(
        "extends: base.yaml\nnum_layers: 12\nnum_attention_heads: ${HEADS:8}\n"
        "ffn_hidden_size: 1024\nvocab_size: 1000\nnormalization: RMSNorm\n"
        "position_embedding_type: rope\nadd_bias_linear: false\n"
    )
    job = read(experiment(model="mine.yaml"), tmp_path)
    values = job.values
    assert values["model.num_layers"] == 12
    assert (values["model.hidden_size"], values["model.num_heads"]) == (512, 8)
    assert values["model.vocab_size"] == 1024


def test_experiments_extend_each_other(tmp_path: Path) -> None:
    (tmp_path / "exp0.yaml").write_text(experiment())
    text = (
        "extends: [exp0.yaml]\nmodules:\n  pre_trainer:\n    overrides:\n"
        "      micro_batch_size: 1\n"
    )
    job = read(text, tmp_path)
    assert (job.value("micro_batch_size"), job.value("tp")) == (1, 4)
    with pytest.raises(JobFileInvalidError, match=r"exp0\.yaml does not lie beside"):
        read_config(JobFile(name="exp.yaml", text=text))


def test_what_a_missing_file_may_state_is_open() -> None:
    job = read("extends: other.yaml\n" + experiment())
    assert "precision" in job.open_fields
    assert "tp" not in job.open_fields


def test_files_that_extend_each_other_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("extends: exp.yaml\n" + experiment())
    with pytest.raises(JobFileInvalidError, match="extend each other"):
        read_config(JobFile.open(tmp_path / "exp.yaml"))


TITAN = """
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: llama3.1_8B-fp8.yaml
    overrides:
      training: {local_batch_size: 4, seq_len: 4096, steps: 10}
      parallelism: {tensor_parallel_degree: 2}
      primus_turbo: {enable_primus_turbo: true}
"""


def test_sections_of_torchtitan_are_read_by_its_reader() -> None:
    job = read(TITAN)
    assert (job.format, job.trainer) == ("primus", "torchtitan-0.2")
    values = job.values
    assert (values["tp"], values["micro_batch_size"], values["model.seq_length"]) == (2, 4, 4096)
    assert (values["model.num_layers"], values["model.hidden_size"]) == (32, 4096)
    assert values["precision"] == "fp8"
    assert values["job.compile"] is True
    assert values["recompute"] == "none"  # of Primus; torchtitan's own default is another


@pytest.mark.parametrize("name", ["maxtext", "megatron_bridge"])
def test_another_framework_is_refused_by_its_name(name: str) -> None:
    text = f"modules: {{pre_trainer: {{framework: {name}, model: a.yaml, overrides: {{}}}}}}\n"
    with pytest.raises(JobFileInvalidError, match=f"'{name}', the framework of pre_trainer"):
        read_config(JobFile(name="exp.yaml", text=text))


def test_modules_are_jobs_of_their_own() -> None:
    second = experiment().split("modules:\n")[1].replace("pre_trainer:", "second:", 1)
    found = read_config(JobFile(name="exp.yaml", text=experiment() + second))
    assert found is not None
    assert [each.name for each in found] == ["pre_trainer", "second"]


@pytest.mark.parametrize("text", ["modules: 3\n", "model: {}\n", "extends: []\n", "a: 1\n"])
def test_other_files_are_left_to_their_readers(text: str) -> None:
    assert read_config(JobFile(name="exp.yaml", text=text)) is None


def test_a_command_names_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(experiment())
    words = [
        "primus/cli/main.py",
        "train",
        "pretrain",
        "--config",
        "exp.yaml",
        "--micro_batch_size",
        "1",
    ]
    command = ProgramCommand(words=tuple(Word(text=w, said=w, line=1) for w in words))
    job = read_command(command, JobFile(name="job.sh", text="x", folder=tmp_path))
    assert job is not None
    assert (job.file, job.value("tp")) == ("job.sh", 4)
    assert job.value("micro_batch_size") == 1
    with pytest.raises(JobFileInvalidError, match="does not lie beside"):
        read_command(command, JobFile(name="job.sh", text="x"))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama2_70B.yaml", "meta-llama/Llama-2-70b-hf"),
        ("llama3.1_405B", "Llama-3.1-405B"),
        ("qwen2.5_72B.yaml", "Qwen/Qwen2.5-72B"),
        ("mixtral_8x22B_v0.1.yaml", "mistralai/Mixtral-8x22B-v0.1"),
        ("qwen3_235B_A22B.yaml", "Qwen/Qwen3-235B-A22B"),
    ],
)
def test_models_of_primus_have_the_published_widths(name: str, published: str) -> None:
    arguments, shape = megatron_model(name), known_model(published)
    assert arguments is not None
    assert shape is not None
    widths = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")
    assert [arguments[each] for each in widths] == [
        shape.num_layers,
        shape.hidden_size,
        shape.num_heads,
        shape.num_kv_heads,
    ]
