"""torchtitan's TOML files and commands, read as jobs."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob, completed
from layout_tuner.trainers.found_jobs.found_job import (
    FoundJob,
    JobFileInvalidError,
    Stated,
    job_lines,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts.named_values import statements_of
from layout_tuner.trainers.found_jobs.positioned import positioned
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.found_jobs.torchtitan import job_of, read_command
from layout_tuner.trainers.registry import ADAPTERS
from tests.exports.exported_files import exported_texts, write_export
from tests.exports.legal_jobs import legal_jobs

NEW = """
[job]
description = 'my run'

[model]
name = 'llama3'
flavor = "8B"

[training]
local_batch_size = 2
seq_len = 8_192  # tokens
steps = 10_000

[parallelism]
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "full"
"""
OLD = """
[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"

[training]
batch_size = 8
seq_len = 4096
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 4
compile = true

[experimental]
pipeline_parallel_degree = 4
pipeline_parallel_split_points = ["layers.20", "layers.40", "layers.60"]
enable_async_tensor_parallel = true

[float8]
enable_float8_linear = true

[activation_checkpoint]
mode = 'none'
"""


def found(text: str, *changes: tuple[str, str]) -> FoundJob:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return read_job(JobFile(name="job.toml", text=text))


def with_section(section: str, *lines: str) -> tuple[str, str]:
    """Puts lines below a section of NEW."""
    return f"[{section}]\n", "\n".join((f"[{section}]", *lines, ""))


def on(num_nodes: int, job: FoundJob) -> Layout:
    return completed(job, num_nodes=num_nodes, devices_per_node=8).layout


def exported(folder: Path, job: TrainerJob) -> tuple[CompletedJob, CompletedJob]:
    """The job as its TOML file says it, and as its script does."""
    write_export(folder, "torchtitan-0.2", job)
    of_file = read_job(JobFile.open(folder / "torchtitan.toml"))
    of_script = read_job(JobFile.open(folder / "torchtitan.sh"))
    return completed(of_file, num_nodes=job.layout.num_nodes), completed(of_script)


@st.composite
def jobs_with_settings(draw: Any) -> TrainerJob:
    job = draw(legal_jobs("torchtitan-0.2"))
    layout = replace(job.layout, sequence_parallel=job.layout.tp > 1)
    if draw(st.booleans()) and layout.precision == "bf16":
        layout = replace(layout, precision=draw(st.sampled_from(("fp8", "mxfp8"))))
    job = replace(job, layout=layout)
    assume(not ADAPTERS["torchtitan-0.2"].all_lacking(job))
    chosen = {"compile": True}
    if draw(st.booleans()) and job.layout.recompute == "none":
        chosen["memory_budget"] = draw(st.sampled_from((10, 25, 50, 75, 99)))
    if draw(st.booleans()) and job.layout.sequence_parallel:
        chosen["async_tp"] = True
    return replace(job, layout=replace(job.layout, job=JobSettings(chosen if job.compile else {})))


@given(jobs_with_settings())
@settings(max_examples=40, suppress_health_check=[*HealthCheck], deadline=None)
def test_what_is_exported_is_read_back(tmp_path: Path, job: TrainerJob) -> None:
    for read in exported(tmp_path, job):
        assert read.layout == job.layout
        as_read = {"name": read.model.name, "attention": None, "attention_dropout": None}
        assert read.model == replace(job.model, **as_read)
        assert not read.found.open_fields


def test_an_export_in_fp8_is_toml() -> None:
    layout = Layout(dp=8, zero_stage=3, precision="fp8")
    job = TrainerJob(model=model_preset("llama-8b"), layout=layout)
    toml = tomllib.loads(exported_texts("torchtitan-0.2", job)["torchtitan.toml"])
    assert toml["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise"}


def test_the_remaining_ranks_are_the_shards() -> None:
    job = completed(found(NEW), num_nodes=4, devices_per_node=8)
    assert job.layout == Layout(
        num_nodes=4,
        tp=2,
        dp=16,
        zero_stage=3,
        micro_batch_size=2,
        recompute="full",
        sequence_parallel=True,
        precision="bf16",
    )
    assert replace(job.model, name="llama-8b") == model_preset("llama-8b")


def test_values_have_the_place_of_their_literals() -> None:
    job = found(NEW)
    places = {each.field: each.place for each in job.read if each.place is not None}
    words = {name: NEW[each.start : each.end] for name, each in places.items()}
    assert words["tp"] == "2"
    assert words["model.seq_length"] == "8_192"
    assert words["recompute"] == '"full"'


def test_keys_of_2024_are_read_where_they_stood() -> None:
    job = found(OLD)
    assert on(16, job) == Layout(
        num_nodes=16,
        tp=4,
        pp=4,
        dp=8,
        zero_stage=2,
        zero_replicas=2,
        micro_batch_size=2,
        num_microbatches=4,
        sequence_parallel=True,
        precision="fp8",
        job=JobSettings({"compile": True, "async_tp": True}),
    )
    assert job.version == "0.1 or older"


@pytest.mark.parametrize(
    ("section", "lines", "expected"),
    [
        ("parallelism", ("fsdp_reshard_after_forward = 'never'",), {"zero_stage": 2}),
        ("parallelism", ("data_parallel_replicate_degree = 4",), {"zero_replicas": 4}),
        (
            "parallelism",
            ("context_parallel_degree = 2", "context_parallel_rotate_method = 'alltoall'"),
            {"cp": 2, "dp": 8, "cp_comm_type": "p2p"},
        ),
        ("training", ("global_batch_size = 64",), {"num_microbatches": 2}),
        ("training", ("mixed_precision_param = 'float32'",), {"precision": "fp32"}),
        ("model", ("converters = ['float8']",), {"precision": "fp8"}),
        ("model", ("converters = ['quantize.linear.mx']",), {"precision": "mxfp8"}),
    ],
)
def test_a_value_sets_its_fields(section: str, lines: Any, expected: dict[str, Any]) -> None:
    layout = on(4, found(NEW, with_section(section, *lines)))
    assert {name: getattr(layout, name) for name in expected} == expected


def test_pure_data_parallelism_without_shards_is_ddp() -> None:
    ddp = ("data_parallel_shard_degree = 1", "data_parallel_replicate_degree = 8")
    text = found(NEW, ("tensor_parallel_degree = 2", "\n".join(ddp)))
    layout = on(1, text)
    assert (layout.dp, layout.zero_stage, layout.zero_replicas) == (8, 0, 1)


def test_shards_over_one_rank_are_none() -> None:
    layout = on(1, found(NEW, ("tensor_parallel_degree = 2", "tensor_parallel_degree = 8")))
    assert (layout.dp, layout.zero_stage) == (1, 0)


def test_one_replica_beside_tp_is_in_fp32() -> None:
    one = ("tensor_parallel_degree = 2", "tensor_parallel_degree = 8")
    job = completed(found(NEW, one), num_nodes=1, devices_per_node=8)
    assert job.layout.precision == job.found.value("precision") == "fp32"
    [why] = [each.why for each in job.found.assumed if each.field == "precision"]
    assert "not with dp=1" in why
    assert on(2, found(NEW, one)).precision == "bf16"
    assert on(1, found(NEW, one).with_stated({"precision": "bf16"})).precision == "bf16"
    eight = found(NEW, one, with_section("model", "converters = ['float8']"))
    with pytest.raises(JobFileInvalidError, match=r"precision: .*--set precision="):
        on(1, eight)


def test_types_are_not_mixed_beside_tp_without_fsdp() -> None:
    job = found(NEW, with_section("parallelism", "data_parallel_shard_degree = 1"))
    assert job.value("precision") == "fp32"
    assert "precision" in {each.field for each in job.assumed}
    old = "[training]\nbatch_size = 1\ndata_parallel_shard_degree = 1\n[model]\nflavor = '8B'\n"
    assert found(old).value("precision") == "fp32"


PIPELINE = (
    "pipeline_parallel_degree = 2",
    "data_parallel_shard_degree = 2",
    "pipeline_parallel_microbatch_size = 1",
)


def test_the_stages_of_a_pipeline_count_embedding_and_head_by_default() -> None:
    layout = on(1, found(NEW, with_section("parallelism", *PIPELINE)))
    assert (layout.pp, layout.vpp, layout.pipeline_split) == (2, 1, "embedding_and_head")
    assert (layout.micro_batch_size, layout.num_microbatches, layout.zero_stage) == (1, 2, 2)


@pytest.mark.parametrize(
    ("lines", "vpp", "split"),
    [
        (
            (
                "pipeline_parallel_schedule = 'Interleaved1F1B'",
                "pipeline_parallel_layers_per_stage = 4",
                "pipeline_parallel_first_stage_less_layers = 0",
                "pipeline_parallel_last_stage_less_layers = 0",
            ),
            4,
            "layers",
        ),
        (
            ("pipeline_parallel_last_stage_less_layers = 0",),
            1,
            "layers",
        ),
        (
            (
                "module_fqns_per_model_part = [['tok_embeddings', "
                + ", ".join(f"'layers.{i}'" for i in range(16))
                + "], ["
                + ", ".join(f"'layers.{i}'" for i in range(16, 32))
                + ", 'norm', 'output']]",
            ),
            1,
            "layers",
        ),
    ],
)
def test_stages_are_read_where_a_split_here_has_them(
    lines: tuple[str, ...], vpp: int, split: str
) -> None:
    job = found(NEW, with_section("parallelism", *PIPELINE, *lines))
    assert job.value("vpp") == vpp
    assert job.value("pipeline_split") == split


@pytest.mark.parametrize(
    ("schedule", "fields"),
    [
        ("Interleaved1F1B", {"schedule": "1f1b"}),
        ("ZBVZeroBubble", {"schedule": "zbv"}),
    ],
)
def test_stages_that_no_split_has_are_written_out(schedule: str, fields: dict[str, Any]) -> None:
    line = f"pipeline_parallel_schedule = '{schedule}'"
    job = found(NEW, with_section("parallelism", *PIPELINE, line))
    expected = fields | {"vpp": 2, "pipeline_layout": "Et*8|t*9|t*8|t*7L"}
    assert {name: job.value(name) for name in expected} == expected
    assert not job.open_fields


@pytest.mark.parametrize(
    "line",
    [
        "pipeline_parallel_layers_per_stage = 34",
        "pipeline_parallel_layers_per_stage = 9",
        "pipeline_parallel_split_points = ['first']",
        "module_fqns_per_model_part = [1, 2]",
    ],
)
def test_stages_that_the_ranks_do_not_have_are_refused(line: str) -> None:
    with pytest.raises(JobFileInvalidError, match="for each of 2"):
        found(NEW, with_section("parallelism", *PIPELINE, line))


def test_a_pipeline_that_is_filled_anew_in_a_step_is_open() -> None:
    changes = (
        with_section("parallelism", *PIPELINE),
        with_section("training", "global_batch_size = 32"),
    )
    assert "num_microbatches" in found(NEW, *changes).open_fields


@pytest.mark.parametrize(
    ("section", "lines", "field"),
    [
        ("training", ("dtype = 'bfloat16'",), "precision"),
        ("training", ("enable_cpu_offload = true",), "zero_stage"),
        ("model", ("converters = ['powersgd']",), "precision"),
        (
            "model",
            ("converters = ['float8']", "[float8]", "filter_fqns = ['feed_forward.w1']"),
            "precision",
        ),
        ("parallelism", (*PIPELINE, "pipeline_parallel_schedule = 'DualPipeV'"), "schedule"),
        ("parallelism", (*PIPELINE, "pipeline_parallel_schedule_csv = 'a.csv'"), "schedule"),
        ("parallelism", ("expert_data_parallel_degree = 2",), "dp"),
        ("model", ("norm_type = 'np_layernorm'",), "model.family"),
        ("model", ("n_layers = 8",), "model.name"),
    ],
)
def test_what_has_no_counterpart_leaves_its_field_open(
    section: str, lines: tuple[str, ...], field: str
) -> None:
    job = found(NEW, with_section(section, *lines))
    assert field in job.open_fields
    with pytest.raises(JobFileInvalidError, match=r"--set|--model"):
        on(4, job)


@pytest.mark.parametrize("lines", [("mode = 'selective'", "selective_ac_option = '2'"), ()])
def test_checkpointing_of_some_layers_is_open(lines: tuple[str, ...]) -> None:
    job = found(NEW, ('mode = "full"', "\n".join(lines)))
    assert "one layer in 2" in job.open_fields["recompute"].why
    assert on(4, job.with_stated({"recompute": "none"})).recompute == "none"


@pytest.mark.parametrize(("option", "recompute"), [("op", "selective"), ("1", "full")])
def test_selective_checkpointing_is_by_operator_or_of_every_layer(
    option: str, recompute: str
) -> None:
    lines = f"mode = 'selective'\nselective_ac_option = '{option}'"
    assert found(NEW, ('mode = "full"', lines)).value("recompute") == recompute


def test_experts_are_shared_over_tp_where_ep_is_1() -> None:
    moe = (("'llama3'", "'qwen3'"), ('"8B"', "'30B-A3B'"))
    layout = on(4, found(NEW, *moe))
    assert (layout.ep, layout.etp) == (1, 2)
    layout = on(4, found(NEW, *moe, with_section("parallelism", "expert_parallel_degree = 8")))
    assert (layout.ep, layout.etp) == (8, 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tensor_parallel_degree = 'two'", "whole number"),
        ("tensor_parallel_degree = 0", "whole number"),
        ("tensor_parallel_degree = true", "whole number"),
        ("tensor_parallel_degree = 2.0", "whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(line: str, said: str) -> None:
    with pytest.raises(JobFileInvalidError, match=f"tensor_parallel_degree.*{said}"):
        found(NEW, ("tensor_parallel_degree = 2", line))


@pytest.mark.parametrize(
    "arguments",
    [
        "Arguments(dim=64, n_layers=2, n_heads=4)",
        "TransformerModelArgs(dim=64, n_layers=2, n_heads=4, q_lora_rank=8)",
        "TransformerModelArgs(dim=WIDTH, n_layers=2, n_heads=4)",
        "TransformerModelArgs(dim=64, n_layers=2, n_heads=4, multiple_of=0)",
        "TransformerModelArgs(n_layers=2, n_heads=4)",
    ],
)
def test_a_module_with_other_than_literal_arguments_gives_no_shape(
    tmp_path: Path, arguments: str
) -> None:
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\na['8B'] = {arguments}\n"
    )
    text = NEW + "[experimental]\ncustom_import = 'mine'\n"
    job = read_job(JobFile(name="job.toml", text=text, folder=tmp_path))
    assert "model.name" in job.open_fields
    assert not (tmp_path / "ran").exists()


ODD: tuple[Any, ...] = (
    *(0, -1, 3, 10**12, 0.5, 1e300, "", "x", "op", "a,b", True, False),
    *([], [1], ["a"], [["layers.0"]], [["layers.0"], ["layers.1"]]),
)
KEYS = (
    "experimental.custom_import",
    "fault_tolerance.enable",
    "float8.filter_fqns",
    *(f"model.{key}" for key in ("name", "flavor", "converters", "norm_type")),
    *(f"training.{key}" for key in ("seq_len", "local_batch_size", "global_batch_size", "dtype")),
    *(f"activation_checkpoint.{key}" for key in ("mode", "memory_budget", "selective_ac_option")),
    *(f"compile.{key}" for key in ("enable", "components")),
    *(
        f"parallelism.{key}"
        for key in (
            *("data_parallel_shard_degree", "data_parallel_replicate_degree"),
            *("pipeline_parallel_degree", "pipeline_parallel_layers_per_stage"),
            *("pipeline_parallel_microbatch_size", "pipeline_parallel_schedule"),
            *("pipeline_parallel_split_points", "module_fqns_per_model_part"),
            *("context_parallel_degree", "context_parallel_rotate_method"),
            *("fsdp_reshard_after_forward", "expert_parallel_degree"),
        )
    ),
)


@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ODD), max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_whatever_a_value_is_it_is_read_or_refused(odd: dict[str, Any], is_new: bool) -> None:
    file = JobFile(name="job.toml", text=NEW if is_new else OLD)
    stated = statements_of(positioned(file))
    stated |= {key: Stated(value=value, said=key) for key, value in odd.items()}
    with suppress(JobFileInvalidError):
        on(2, job_of(stated, file))


def command(words: str, **environment: str) -> ProgramCommand:
    return ProgramCommand(
        words=tuple(
            Word(text=None if each.startswith("$") else each, said=each, line=1)
            for each in words.split()
        ),
        environment=environment,
    )


def started(folder: Path, words: str, **environment: str) -> FoundJob:
    (folder / "mine.toml").write_text(NEW)
    file = JobFile(name="run.sh", text=words, folder=folder)
    job = read_command(command(words, **environment), file)
    assert job is not None
    return job


def test_options_count_before_the_file(tmp_path: Path) -> None:
    job = started(
        tmp_path,
        "torchtitan.train --job.config_file ./train_configs/mine.toml --training.local-batch-size=4 "
        "--compile.enable --parallelism.tensor_parallel_degree 4",
    )
    layout = on(2, job)
    assert (layout.tp, layout.micro_batch_size, layout.recompute) == (4, 4, "full")
    assert layout.job == {"compile": True}


def test_the_variables_of_run_train_are_read(tmp_path: Path) -> None:
    variables = {"CONFIG_FILE": "mine.toml", "NGPU": "4"}
    job = started(tmp_path, "./run_train.sh --training.seq_len 4096", **variables)
    assert completed(job).layout.num_devices == 4
    assert (job.value("tp"), job.value("model.seq_length")) == (2, 4096)


def test_a_configuration_in_python_is_refused() -> None:
    text = "from torchtitan.trainer import Trainer\n"
    with pytest.raises(JobFileInvalidError, match="Python"):
        read_job(JobFile(name="layout.py", text=text))


def test_an_option_whose_value_is_not_known_leaves_its_field_open(tmp_path: Path) -> None:
    job = started(
        tmp_path,
        "torchtitan.train --job.config_file mine.toml --parallelism.tensor_parallel_degree $TP",
    )
    assert {"tp", "sequence_parallel"} <= set(job.open_fields)


@pytest.mark.parametrize(
    ("words", "trainer"),
    [
        ("./run_train.sh --training.seq_len 64", "torchtitan-0.2"),
        ("train.py --job.config_file elsewhere/other.toml --training.seq_len 64", "torchtitan-0.2"),
        (
            "torchtitan.train --module llama3 --config llama3_8b --training.seq_len 64",
            "torchtitan-0.3",
        ),
    ],
)
def test_a_configuration_that_is_not_there_leaves_all_fields_open(
    tmp_path: Path, words: str, trainer: str
) -> None:
    job = started(tmp_path, words)
    assert job.trainer == trainer
    assert job.value("model.seq_length") == 64
    assert {"tp", "pp", "cp", "recompute", "precision", "zero_stage", "micro_batch_size"} <= set(
        job.open_fields
    )
    assert not job.assumed


def test_the_script_of_torchtitan_is_a_program(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(NEW)
    script = 'export NGPU=4\nCONFIG_FILE="./mine.toml" bash ./run_train.sh --compile.enable\n'
    job = read_job(JobFile(name="job.sh", text=script, folder=tmp_path))
    assert completed(job).layout.num_devices == 4
    assert job.value("job.compile") is True
    assert job.command is not None


def test_options_that_count_tokens_are_of_the_main_branch(tmp_path: Path) -> None:
    job = started(tmp_path, "torchtitan.train --config llama3_8b --training.max_context_length 64")
    assert (job.trainer, job.model_name) == ("torchtitan-main", "llama3_8b")


def test_another_program_is_none() -> None:
    file = JobFile(name="run.sh", text="x")
    assert read_command(command("train.py --lr 1"), file) is None


@pytest.mark.parametrize("key", ["enable_fp8_linear", "enable_float8_linear"])
def test_products_in_8_bits_of_2024_are_read(key: str) -> None:
    text = OLD.replace("[float8]\nenable_float8_linear = true\n", "")
    job = found(text, ("compile = true", f"{key} = true"))
    assert job.value("precision") == "fp8"


@pytest.mark.parametrize("line", ["fp8_recipe = 'rowwise'", "weights_dtype = 'float16'"])
def test_an_unknown_key_of_types_leaves_the_precision_open(line: str) -> None:
    assert "precision" in found(NEW, with_section("training", line)).open_fields


def test_another_optimizer_than_adam_is_named() -> None:
    for name, expected in {"SGD": ["optimizer.name: 'SGD'"], "Adam": [], "AdamW": []}.items():
        job = found(NEW, ("[training]", f"[optimizer]\nname = '{name}'\n[training]"))
        assert [each.said for each in job.not_understood] == expected


def test_a_default_that_is_not_understood_is_named_with_its_field() -> None:
    job = found(NEW, ('mode = "full"', ""))
    assert job.open_fields["recompute"].said == "torchtitan's default of recompute"


def test_a_file_that_is_not_there_is_one_line() -> None:
    words = (Word(text="run_train.sh", said="run_train.sh", line=1),)
    job = read_command(ProgramCommand(words=words), JobFile(name="job.sh", text=""))
    assert job is not None
    (line,) = (each for each in job_lines(job) if "configuration of its own" in each)
    assert "precision" in line
    assert not any("exchange of tokens" in each.why for each in job.not_understood)
