"""Jobs of Megatron-LM from their options, as people write them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import completed
from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.megatron.megatron_jobs import read_command, read_config
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.script_jobs import read_script
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from tests.exports.legal_jobs import legal_jobs_with_settings
from tests.layout_tuner.trainers.found_jobs.megatron.command_lines import (
    GPT,
    LLAMA,
    PLACED,
    found,
    layout_in_file,
    open_of,
    words_of,
)


def read_back(
    job: TrainerJob, words: list[str], **more: Any
) -> tuple[ModelShape, Any, JobSettings]:
    done = completed(
        found(shlex.join(words), **more),
        num_nodes=job.layout.num_nodes,
        devices_per_node=job.ranks_per_node,
    )
    model = replace(job.model, name="custom")
    assert done.model == replace(model, attention_dropout=model.attention_dropout or None)
    return done.model, done.layout, done.layout.job


@settings(max_examples=100, deadline=None)
@given(job=legal_jobs_with_settings("megatron-lm"))
def test_what_is_exported_for_megatron_lm_is_read_back(job: TrainerJob) -> None:
    _, layout, job_settings = read_back(job, MEGATRON_LM.arguments(job))
    assert layout.without_job == layout_in_file(job).without_job
    assert job_settings == job.layout.job


@settings(max_examples=50, deadline=None)
@given(job=legal_jobs_with_settings("megatron-lm"))
def test_the_placement_alone_is_read_back_beside_a_model(job: TrainerJob) -> None:
    options = ["--micro-batch-size", "1", *MEGATRON_LM.placement_arguments(job)]
    if job.model.num_experts:
        options += ["--num-experts", str(job.model.num_experts)]
    options += ["--num-layers", str(job.model.num_layers)]
    done = completed(
        found(shlex.join(options)),
        model=job.model,
        num_nodes=job.layout.num_nodes,
        devices_per_node=job.ranks_per_node,
    )
    assert done.layout == layout_in_file(job)


def test_the_example_is_read_with_all_of_its_fields() -> None:
    job = found(f"{LLAMA} {PLACED} --use-distributed-optimizer --sequence-parallel")
    assert (job.format, job.trainer, job.not_understood) == ("megatron-lm", "megatron-lm", ())
    done = completed(job, num_nodes=2, devices_per_node=8)
    preset = model_preset("llama-8b")
    assert done.model == replace(preset, name="custom", attention=None)
    assert done.layout.key.startswith("n2-tp2-pp4-dp2-vpp1-mbs1-mb32-z1-rc_none-sp1-bf16")
    said = {each.field: each.said for each in job.read}
    assert said["tp"] == "--tensor-model-parallel-size 2"
    assert said["model.family"] == "--swiglu"
    why = {each.field: each.why for each in job.assumed}
    assert why["recompute"] == "Megatron-LM's default without --recompute-granularity"


def test_a_value_has_the_place_of_its_literal() -> None:
    place = TextPlace(line=1, start=3, end=4)
    words = (
        *words_of(f"pretrain_gpt.py {LLAMA} --micro-batch-size 1 --tensor-model-parallel-size"),
        Word(text="4", said="$TP", line=9, place=place),
    )
    job = read_command(ProgramCommand(words=words), JobFile(name="job.sh", text="TP=4"))
    assert job is not None
    (tp,) = [each for each in job.read if each.field == "tp"]
    assert (tp.value, tp.place, tp.said) == (4, place, "--tensor-model-parallel-size $TP")


def test_the_trainer_s_defaults_count_where_options_are_absent() -> None:
    job = found(f"{GPT} --micro-batch-size 4 --num-query-groups 4")
    done = completed(job, num_nodes=1, devices_per_node=8)
    assert done.model == ModelShape(
        name="custom",
        family="gpt",
        num_layers=24,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_heads=16,
        num_kv_heads=16,  # without --group-query-attention the groups have no effect
        seq_length=2048,
        vocab_size=50_304,  # 50,257 of GPT-2, up to a multiple of 128
        tied_embeddings=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    layout = done.layout
    assert (layout.dp, layout.num_microbatches, layout.precision) == (8, 1, "fp32")
    assert (layout.zero_stage, layout.recompute, layout.sequence_parallel) == (0, "none", False)
    swiglu = found(f"{GPT} --swiglu --micro-batch-size 4")
    assert swiglu.value("model.ffn_hidden_size") == 5440  # 2/3 of 4 * 2048, down to 64s
    assert swiglu.value("model.rotary_base") == 10_000


def test_no_field_is_wrong_in_silence_where_a_value_is_not_known() -> None:
    job = found(f"{LLAMA} --tensor-model-parallel-size ?TP --pipeline-model-parallel-size=2 --bf16")
    assert open_of(job) == {"tp", "model.vocab_size", "micro_batch_size"}
    (tp,) = [each for each in job.not_understood if each.field == "tp"]
    assert (tp.said, tp.why, tp.line) == (
        "--tensor-model-parallel-size $TP",
        "TP is not assigned",
        3,
    )
    with pytest.raises(SearchSpaceError, match=r"job.sh: not understood: tp \(--tens"):
        completed(job, num_nodes=1, devices_per_node=8)
    stated = {"tp": 2, "model.vocab_size": 128_256, "micro_batch_size": 1}
    done = completed(job.with_stated(stated), num_nodes=1, devices_per_node=8)
    assert (done.layout.tp, done.layout.pp, done.layout.dp) == (2, 2, 2)


def test_the_last_use_of_an_option_counts_and_one_under_a_condition_is_open() -> None:
    twice = f"{LLAMA} --micro-batch-size 8 {PLACED} --micro-batch-size=2"
    assert found(twice).value("micro_batch_size") == 2
    words = [*words_of(f"pretrain_gpt.py {LLAMA} {PLACED}")]
    unsure = [replace(each, is_certain=False) for each in words_of("--fp8-format hybrid --bf16")]
    job = read_command(ProgramCommand(words=(*words, *unsure)), JobFile(name="j", text="x"))
    assert job is not None
    assert open_of(job) == {"precision"}
    assert job.value("precision") is None


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", {"vpp": 4}),
        ("--num-virtual-stages-per-pipeline-rank 4", {"vpp": 4}),
        ("--pipeline-model-parallel-layout (tttttttt|)*4,ttttttttL", "vpp"),
        (
            "--pipeline-model-parallel-layout Et*8|(t*8|)*2t*8L",
            {"vpp": 1, "pipeline_split": "layers"},
        ),
        ("--pipeline-model-parallel-layout Etttt|(tttt|)*6,ttttL", {"vpp": 2}),
        (
            "--pipeline-model-parallel-layout Et*5|t*9|(t*9|)*1,t*9L",
            {"vpp": 1, "pipeline_layout": "Et*5|(t*9|)*2t*9L"},
        ),
        ("--pipeline-model-parallel-layout Et*5|t*9|t*9|mtL", None),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout "
            "Et*4|(t*4|)*5t*5|t*3L",
            {"vpp": 2, "pipeline_layout": "Et*4|(t*4|)*5t*5|t*3L"},
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 4 --pipeline-model-parallel-layout "
            "Et*4|(t*4|)*6t*4L",
            "vpp",
        ),
        ("--pipeline-model-parallel-layout t*5|Et*9|t*9|t*9L", None),
        ("--pipeline-model-parallel-layout Et*5||t*18|t*9L", None),
        ("--decoder-first-pipeline-num-layers 8", {"pipeline_split": "layers"}),
        (
            "--num-layers 30 --decoder-first-pipeline-num-layers 7 "
            "--decoder-last-pipeline-num-layers 7",
            {"pipeline_split": "embedding_and_head"},
        ),
        ("--decoder-last-pipeline-num-layers 5", {"pipeline_layout": "Et*9|(t*9|)*2t*5L"}),
        ("--account-for-loss-in-pipeline-split --num-layers 31", {"pipeline_split": "head"}),
    ],
)
def test_stages_are_read_in_every_spelling(options: str, fields: Any) -> None:
    job = found(f"{LLAMA} {PLACED} {options}")
    if not isinstance(fields, dict):
        assert open_of(job) == ({"vpp", "pipeline_split"} if fields else {"pipeline_split"})
    else:
        assert {name: job.value(name) for name in fields} == fields
        assert not job.not_understood


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ("--recompute-activations", "selective"),
        ("--recompute-granularity selective --recompute-modules core_attn", "selective"),
        (
            "--recompute-granularity selective --recompute-modules mlp core_attn",
            "core_attention+mlp",
        ),
        ("--recompute-granularity selective --recompute-modules core_attn moe", None),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", None),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", "full"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "full"),
        ("--recompute-granularity full", None),
        ("--checkpoint-activations", "full"),
        ("--checkpoint-activations --checkpoint-num-layers 4", None),
        ("--activations-checkpoint-method uniform", "full"),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", "full"),
        (
            "--recompute-granularity full --recompute-method uniform --distribute-saved-activations",
            None,
        ),
    ],
)
def test_recomputation_is_read_or_named(options: str, value: str | None) -> None:
    job = found(f"{LLAMA} {PLACED} {options}")
    assert job.value("recompute") == value
    assert open_of(job) == (set() if value else {"recompute"})


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "recompute_layers",
            "3",
        ),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 1.0", "offload", "optimizer"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "offload", None),
        ("--cpu-offloading-num-layers 4", "offload", None),
        ("--cpu-offloading-num-layers 30", "offload", "activations"),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "optimizer_states", "bf16"),
    ],
)
def test_levers_of_memory_are_read(options: str, field: str, value: str | None) -> None:
    job = found(f"{LLAMA} {PLACED} {options}")
    assert job.value(field) == value
    assert open_of(job) == (set() if value else {field})


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ("--use-distributed-optimizer", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --use-distributed-optimizer", 0),
        ("--use-custom-fsdp --data-parallel-sharding-strategy no_shard", 0),
        ("--use-torch-fsdp2", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy other", None),
        ("--use-distributed-optimizer --optimizer dist_muon", None),
    ],
)
def test_zero_is_read_or_named(options: str, stage: int | None) -> None:
    job = found(f"{LLAMA} {PLACED} {options}")
    assert job.value("zero_stage") == stage
    assert open_of(job) == (set() if stage is not None else {"zero_stage"})


@pytest.mark.parametrize(
    ("certain", "doubtful", "field"),
    [
        ("--bf16", "--fp8-format hybrid", "precision"),
        (
            "--use-distributed-optimizer",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            "zero_stage",
        ),
        (
            "--account-for-loss-in-pipeline-split",
            "--account-for-embedding-in-pipeline-split",
            "pipeline_split",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 4",
            '--pipeline-model-parallel-layout "Et*16|t*16L"',
            "vpp",
        ),
    ],
)
def test_an_option_under_a_condition_leaves_its_field_open(
    certain: str, doubtful: str, field: str
) -> None:
    script = (
        f"A=({LLAMA} {PLACED} {certain})\n"
        f'if [ "$IT" = 1 ]; then A+=({doubtful}); fi\npython pretrain_gpt.py "${{A[@]}}"'
    )
    (job,) = read_script(JobFile(name="job.sh", text=script)) or ()

    assert job.value(field) is None
    assert field in open_of(job)
    assert "if [" in job.open_fields[field].why


def test_copies_of_shards_the_order_of_ranks_and_the_exchange_of_cp_are_read() -> None:
    options = (
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
        "--use-tp-pp-dp-mapping --context-parallel-size 2"
    )
    job = found(f"{LLAMA} {PLACED} {options}")
    assert (job.value("zero_replicas"), job.value("rank_order")) == (2, "tp_cp_pp_dp")
    assert (job.value("cp"), job.value("cp_comm_type")) == (2, "p2p")
    for word, kind in (("allgather", "all_gather"), ("a2a", "a2a"), ("p2p p2p", "p2p")):
        job = found(f"{LLAMA} {PLACED} --context-parallel-size 2 --cp-comm-type {word}")
        assert job.value("cp_comm_type") == kind
    for word in ("a2a+p2p", "p2p a2a"):
        job = found(f"{LLAMA} {PLACED} --context-parallel-size 2 --cp-comm-type {word}")
        assert open_of(job) == {"cp_comm_type"}


def test_precisions_are_read_and_another_recipe_of_fp8_is_listed() -> None:
    assert found(f"{GPT} --micro-batch-size 1 --fp16").value("precision") == "fp16"
    fp8 = found(f"{LLAMA} {PLACED} --fp8-format hybrid --fp8-recipe delayed")
    assert fp8.value("precision") == "fp8"
    assert [each.said for each in fp8.not_understood] == ["--fp8-recipe delayed"]
    both = found(f"{LLAMA} {PLACED} --fp8-format hybrid --fp4-format e2m1")
    assert "precision" in open_of(both)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", "fp8"),
        ("--fp8-format hybrid --fp8-recipe blockwise", "fp8_block"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "nvfp4"),
        ("--fp4-format e2m1 --use-distributed-optimizer --fp4-param-gather", "nvfp4"),
    ],
)
def test_recipes_of_narrow_types_are_precisions(words: str, precision: str) -> None:
    job = found(f"{LLAMA} {PLACED} --bf16 {words}")
    assert (job.value("precision"), job.not_understood) == (precision, ())


def test_bf16_weights_beside_narrow_ones_are_named() -> None:
    words = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer"
    job = found(f"{LLAMA} {PLACED} --bf16 {words}")
    assert [each.said for each in job.not_understood] == ["no --reuse-grad-buf-for-mxfp8-param-ag"]


def test_an_open_recomputation_lists_no_option_of_the_trainer_as_unknown() -> None:
    options = "--recompute-granularity ?G --recompute-method block --recompute-num-layers 4"
    job = found(f"{LLAMA} {PLACED} {options}")
    assert [(each.said, each.field) for each in job.not_understood] == [
        ("--recompute-granularity $G", "recompute")
    ]


def test_options_in_quotes_are_said_to_be_one_word() -> None:
    script = 'A="--num-layers 32 --bf16"\npython pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 2 "$A"'
    (job,) = read_script(JobFile(name="job.sh", text=script)) or ()
    assert "stands in quotes" in " ".join(each.why for each in job.not_understood)


def test_batches_that_change_are_named() -> None:
    job = found(f"{LLAMA} {PLACED} --rampup-batch-size 16 16 1000000")
    assert (job.value("global_batch_size"), open_of(job)) == (64, {""})
    job = found(f"{GPT} --micro-batch-size 1 --step-batch-size-schedule '0:384 200B:768'")
    assert open_of(job) == {"global_batch_size"}


def test_settings_of_the_trainer_are_read_where_they_have_an_effect() -> None:
    zero = f"{LLAMA} {PLACED} --use-distributed-optimizer"
    job = found(f"{zero} --overlap-grad-reduce --ddp-bucket-size 80000000 --tp-comm-overlap")
    assert job.value("job.grad_overlap") is None
    assert job.value("job.param_gather_overlap") is False
    assert job.value("job.bucket_millions") == 80
    # tp_overlap needs sequence parallelism: the completed job does not have it.
    done = completed(job, num_nodes=2, devices_per_node=8)
    assert done.layout.job == JobSettings({"param_gather_overlap": False, "bucket_millions": 80})
    assert found(f"{LLAMA} {PLACED}").value("job.grad_overlap") is None
    assert found(zero).value("job.grad_overlap") is False
    graphs = found(f"{zero} --cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp")
    assert "job.cuda_graphs" in open_of(graphs)


def test_programs_of_other_families_and_other_purposes_are_none() -> None:
    file = JobFile(name="job.sh", text="x")
    for line in (
        "train.py --per_device_train_batch_size 2 --bf16",
        "tools/run_text_generation_server.py --tensor-model-parallel-size 2 --seq-length 8",
        "tools/preprocess_data.py --input x",
    ):
        assert read_command(ProgramCommand(words=words_of(line)), file) is None
    assert open_of(found(f"{GPT} --micro-batch-size 1", "pretrain_bert.py")) >= {"model.family"}
    assert "model.layer_kinds" in open_of(found(f"{GPT} --micro-batch-size 1", "pretrain_mamba.py"))


def test_values_in_a_file_of_yaml_are_all_open() -> None:
    job = found(f"{PLACED} --yaml-cfg conf.yaml")
    assert open_of(job) >= {"tp", "pp", "micro_batch_size", "global_batch_size", "precision"}


YAML: Final = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: ${PP}
  --micro-batch-size: 1
  --global-batch-size: 32
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --max-position-embeddings: 1024
  --recompute-granularity: selective
  --recompute-modules: "[core_attn]"
  --sequence-parallel: true
  --bf16: true
  --use-distributed-optimizer: false
  --tokenizer-type: null
  --log-interval: 1
"""


def test_options_as_keys_of_yaml_are_read_with_their_places() -> None:
    (job,) = read_config(JobFile(name="model_config.yaml", text=YAML)) or ()
    assert (job.value("tp"), job.value("recompute"), job.value("zero_stage")) == (2, "selective", 0)
    assert job.value("sequence_parallel") is True
    (tp,) = [each for each in job.read if each.field == "tp"]
    assert tp.place is not None
    assert (YAML[tp.place.start : tp.place.end], tp.place.line) == ("2", 4)
    assert open_of(job) == {"pp"}
    assert read_config(JobFile(name="a.yaml", text="model: {layers: 3}")) is None
    assert read_config(JobFile(name="a.sh", text=YAML)) is None
