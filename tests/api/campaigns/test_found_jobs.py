"""Jobs are read from uploaded files; nothing of them is executed or stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.api.campaigns.found_jobs import JobUpload, UploadedJob, read_upload
from layout_tuner.predictions.job_plan import JobAsked, job_campaign
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError

SCRIPT = """\
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
TP=4
torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 \\
    --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm \\
    --disable-bias-linear --position-embedding-type rope \\
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --vocab-size 32000 \\
    --tensor-model-parallel-size $TP --micro-batch-size 2 --global-batch-size 64 --bf16 \\
    --sequence-parallel --use-distributed-optimizer
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def upload(text: str = SCRIPT, name: str = "job.sh", **stated: Any) -> UploadedJob:
    return read_upload(JobUpload(name=name, text=text, **stated))


def h100(**changes: Any) -> Cluster:
    return resolve_cluster({"preset": "h100-sxm", **changes})[0]


def test_what_is_not_understood_is_listed_and_can_be_stated() -> None:
    text = SCRIPT.replace("--micro-batch-size 2", "--micro-batch-size $(cat size)")

    job = upload(text)
    assert job.completed is None
    assert "micro_batch_size" in str(job.problem)

    stated = upload(text, stated={"micro_batch_size": 1})
    assert stated.completed is not None
    assert stated.completed.layout.num_microbatches == 16


def test_a_model_comes_from_its_config_json() -> None:
    text, config = json.dumps(DEEPSPEED), json.dumps(CONFIG)
    machine = {"num_nodes": 2, "cluster": h100()}

    assert "model" in str(upload(text, "ds_config.json", **machine).problem)
    assert "length" in str(upload(text, "ds_config.json", config=config, **machine).problem)
    job = upload(text, "ds_config.json", config=config, seq_length=2048, **machine)
    assert job.completed is not None
    assert (job.completed.model.seq_length, job.completed.layout.dp) == (2048, 16)


def test_a_script_with_two_jobs_names_them() -> None:
    text = SCRIPT + SCRIPT.partition("TP=4\n")[2].replace("-size 64", "-size 128")
    job = upload(text)
    assert len(job.jobs) == 2
    assert job.jobs[0] in str(job.problem)

    second = upload(text, job=job.jobs[1])
    assert second.completed is not None
    assert second.completed.layout.num_microbatches == 16


def test_nothing_of_a_script_is_executed_and_no_file_beside_the_service_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    marker = tmp_path / "marker"
    text = f"X=$(touch {marker})\n`touch {marker}`\nsource ds.json\n{SCRIPT}"
    text = text.replace("--bf16", "--bf16 --deepspeed --deepspeed_config ds.json")

    job = upload(text)

    assert not marker.exists()
    assert job.found is not None
    assert "ds.json" in " ".join(each.said for each in job.found.not_understood)


HUGGING_FACE = """\
accelerate launch --num_processes 8 --mixed_precision bf16 train.py \\
    --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 4 --bf16 True --max_seq_length 4096
"""


@pytest.mark.parametrize(
    ("text", "config"), [(HUGGING_FACE, ""), (SCRIPT, json.dumps(CONFIG | {"vocab_size": 50000}))]
)
def test_an_upload_is_the_same_job_as_that_of_the_commands(
    tmp_path: Path, text: str, config: str
) -> None:
    (path := tmp_path / "job.sh").write_text(text)
    model = None
    if config:
        (model := tmp_path / "config.json").write_text(config)
    stated = {"zero_stage": 1}
    named = None if model is None else str(model)
    asked = JobAsked(cluster="h100-sxm", model=named, stated=stated)
    of_command = job_campaign(path, asked)

    of_page = upload(text, config=config, cluster=h100(), stated=stated)

    assert of_page.completed is not None
    assert of_page.completed.layout == of_command.job.layout
    shapes = [each.model.to_mapping() for each in (of_page.completed, of_command.job)]
    assert [{**each, "name": ""} for each in shapes] == [{**shapes[0], "name": ""}] * 2
    assert len(of_page.remarks) == len(of_command.remarks) == 1


def test_ranks_that_are_not_those_of_a_node_are_refused() -> None:
    job = upload(cluster=h100(devices_per_node=4))
    assert "runs 8 ranks on each node" in str(job.problem)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": ""}, "it is empty"),
        ({"text": "echo nothing\n"}, "starts no training"),
        ({"text": "a\0b"}, "NUL"),
        ({"text": "x" * ((1 << 20) + 1)}, "1 MB"),
    ],
)
def test_a_wrong_upload_is_refused_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(JobFileInvalidError, match=says):
        upload(**changes)
