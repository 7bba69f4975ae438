"""`layout-tuner plan --from` and `layout-tuner campaign from`: jobs that run today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.cli.main import main
from layout_tuner.documents.json_and_yaml import read_file
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.tables import read_table
from layout_tuner.trainers.program import ProgramTrainer, read_trainers

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
export NCCL_DEBUG=WARN
touch ran $(touch ran)
TP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tokenizer-type NullTokenizer --vocab-size 31999
)
PARALLEL="--tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --sequence-parallel"
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" $PARALLEL \\
    --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer \\
    --overlap-grad-reduce --overlap-param-gather \\
    --data-path /data/text --save /ckpt --train-iters 90000 --lr 1e-4
"""
NANOTRON = """
parallelism: {dp: 4, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: ALL_REDUCE}
tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 8}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config: {is_llama_config: true, hidden_size: 2048, intermediate_size: 8192,
    num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 32000,
    tie_word_embeddings: true, max_position_embeddings: 2048}
optimizer: {zero_stage: 1}
"""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
ON_H100 = ("--cluster", "h100-sxm")


@pytest.fixture(autouse=True)
def no_constants_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "none"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def nanotron(tmp_path: Path) -> Path:
    path = tmp_path / "llama.yaml"
    path.write_text(NANOTRON)
    return path


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def printed(*words: object) -> str:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result.output


def plan_of(*words: object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(printed("plan", *words, "--json"))
    return found


def log(folder: Path, seconds: float) -> Path:
    path = folder / "train.log"
    path.write_text(
        "\n".join(
            f"iteration: {step} / 900 | time_per_iteration_ms: {seconds * 1e3:.4g} | lm_loss: 8.25"
            for step in range(1, 31)
        )
    )
    return path


def test_one_command_ranks_the_job_of_a_script_and_runs_nothing(script: Path) -> None:
    found = plan_of("--from", script, *ON_H100, "--top", 3)
    baseline = found["baseline"]["planned"]
    assert baseline["layout"] | {"tp": 4, "pp": 2, "dp": 4, "num_nodes": 4} == baseline["layout"]
    assert baseline["rank"] >= 1
    assert found["trainer"] == "megatron-lm"
    read = {each["field"]: each["value"] for each in found["found_job"]["read"]}
    assert (read["tp"], read["global_batch_size"], read["num_nodes"]) == (4, 128, 4)
    assert found["log"] is None
    assert not (script.parent / "ran").exists()


def test_a_script_and_a_config_json_take_one_command(script: Path) -> None:
    config = script.parent / "config.json"
    config.write_text(json.dumps(CONFIG))
    found = plan_of("--from", script, *ON_H100, "--model", config, "--top", 1)
    assert found["baseline"]["planned"]["layout"]["tp"] == 4


def test_settings_that_most_layouts_cannot_have_stay_with_those_like_the_job(script: Path) -> None:
    small = (("--num-layers 32", "--num-layers 4"), ("--pipeline-model-parallel-size 2", ""))
    text = SCRIPT.replace("--bf16", "--bf16 --tp-comm-overlap")
    for before, after in small:
        text = text.replace(before, after)
    script.write_text(text)
    found = plan_of("--from", script, *ON_H100, "--top", 1000)
    assert found["baseline"]["planned"]["layout"]["job"] == {"tp_overlap": True}
    layouts = [each["layout"] for each in found["layouts"]]
    assert {each["tp"] for each in layouts} == {1, 4}  # one device suffices for the others
    has = [each for each in layouts if each["job"]]
    assert has
    assert all(each["tp"] == 4 and each["sequence_parallel"] for each in has)


def test_settings_of_the_job_are_those_of_other_layouts(script: Path) -> None:
    script.write_text(SCRIPT.replace("--bf16", "--bf16 --tp-comm-overlap"))
    layouts = plan_of("--from", script, *ON_H100, "--top", 1000)["layouts"]
    has = [each["layout"] for each in layouts if each["layout"].get("job") == {"tp_overlap": True}]
    assert has
    assert all(each["tp"] > 1 and each["sequence_parallel"] for each in has)
    assert not any(
        each["layout"]["sequence_parallel"] and not each["layout"].get("job") for each in layouts
    )


def test_people_read_what_was_found_before_the_plan(nanotron: Path) -> None:
    text = printed("plan", "--from", nanotron, *ON_H100, "--set", "recompute=none")
    head = "llama.yaml: a job of nanotron"
    assert text.startswith(head)
    order = (head, "\nread: ", "\nassumed:\n", "\nplan of llama for nanotron")
    assert [*order] == sorted(order, key=text.index)
    assert "recompute = none" in text
    assert "stated by the user" in text
    assert "the baseline" in text


def test_a_log_says_what_it_changes(nanotron: Path) -> None:
    text = printed("plan", "--from", nanotron, *ON_H100, "--log", log(nanotron.parent, 0.5))
    assert "train.log: a step takes 0.5 s (median of" in " ".join(text.split())
    assert "were predicted: measured is" in " ".join(text.split())
    assert "runs" not in text
    path = nanotron.parent / "train.log"
    path.write_text(f"{path.read_text()}\n{path.read_text()}")
    text = printed("plan", "--from", nanotron, *ON_H100, "--log", path)
    assert "train.log: in the last of 2 runs a step takes 0.5 s" in " ".join(text.split())
    found = plan_of("--from", nanotron, *ON_H100, "--log", path)
    assert found["log"]["step_time_s"] == 0.5
    assert found["log"]["factor"] == pytest.approx(0.5 / found["log"]["predicted_step_time_s"])
    assert found["knowledge"]["num_step_times"] == 1


def test_nodes_are_those_of_the_job_and_of_the_training(nanotron: Path) -> None:
    more = ("--set", "dp=8", "--nodes", 4, "--tokens", "10B")
    found = plan_of("--from", nanotron, *ON_H100, *more)
    assert found["baseline"]["planned"]["layout"]["num_nodes"] == 4
    assert found["baseline"]["planned"]["job"]["duration"]["days"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give the file of a campaign, or a job's with --from"),
        (("c.yaml", "--from", "job.yaml"), "one of the two"),
        (("c.yaml", "--log", "x.log", "--set", "tp=1"), "--set, --log: only with --from"),
        (("--from", "job.yaml"), "name it with --cluster"),
        (("train.sh",), "is it a job's file? Give it with --from"),
        (("--from", "config.json", *ON_H100), "it is a model: give it with --model"),
        (("--from", "gone.yaml", *ON_H100), "gone.yaml: cannot be read"),
        (("--from", "job.yaml", *ON_H100, "--set", "tpp=1"), "unknown field 'tpp'"),
        (("--from", "job.yaml", *ON_H100, "--job", "2"), "job.yaml has no job 2"),
        (("--from", "job.yaml", *ON_H100, "--nodes", "5"), "state the nodes with --nodes"),
        (("--from", "job.yaml", *ON_H100, "--log", "gone.log"), "gone.log: cannot be read"),
    ],
)
def test_wrong_input_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(NANOTRON)
    (tmp_path / "c.yaml").write_text("name: c\n")
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = run("plan", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.count("Error: ") == 1


@dataclass(frozen=True, kw_only=True)
class WrittenCampaign:
    """What `campaign from` printed of the script, and the campaign and the entry that it wrote."""

    folder: Path
    printed: str
    file: str
    spec: CampaignSpec
    trainer: ProgramTrainer


@pytest.fixture
def campaign(script: Path) -> WrittenCampaign:
    out = script.parent / "campaign.yaml"
    text = printed("campaign", "from", script, *ON_H100, "--out", out)
    [trainer] = read_trainers(read_file(script.parent / "campaign-trainers.yaml")).values()
    return WrittenCampaign(
        folder=script.parent,
        printed=text,
        file=out.read_text(),
        spec=CampaignSpec.from_document(read_file(out)),
        trainer=trainer,
    )


def test_the_job_is_the_baseline_of_its_campaign(campaign: WrittenCampaign) -> None:
    baseline = campaign.spec.baseline
    assert baseline is not None
    assert (baseline.tp, baseline.dp, baseline.num_nodes) == (4, 4, 4)


def test_a_campaign_of_a_job_has_its_name_trainer_and_cluster(campaign: WrittenCampaign) -> None:
    spec = campaign.spec
    assert (spec.name, spec.probe.trainer, spec.cluster.name) == ("job", "megatron-lm", "h100-sxm")
    assert spec.probe.fidelity == "auto"  # the entry has {num_layers}


def test_a_campaign_of_a_job_says_what_was_read(campaign: WrittenCampaign) -> None:
    comments = [line for line in campaign.file.splitlines() if line.startswith("#")]
    assert any("--global-batch-size 128" in line for line in comments)


def test_the_entry_of_a_job_is_one_that_a_worker_reads(campaign: WrittenCampaign) -> None:
    trainer = campaign.trainer
    assert trainer.name == campaign.spec.probe.trainer
    assert {"{layout_arguments}", "/data/text"} <= set(trainer.command)
    assert trainer.environment["NCCL_DEBUG"] == "WARN"
    assert trainer.working_directory == str(campaign.folder)


def test_a_probe_leaves_out_saving_and_what_the_tuner_sets(campaign: WrittenCampaign) -> None:
    assert not {"--save", "--micro-batch-size", "--bf16"} & set(campaign.trainer.command)
    assert "--save" in campaign.printed


def test_nothing_of_a_script_is_executed(campaign: WrittenCampaign) -> None:
    assert not (campaign.folder / "ran").exists()


def test_a_measured_step_is_written_as_a_table(nanotron: Path) -> None:
    out = nanotron.parent / "mine.yaml"
    words = (*ON_H100, "--out", out, "--log", log(nanotron.parent, 0.5))
    printed("campaign", "from", nanotron, *words)
    table = nanotron.parent / "mine-log.csv"
    # The entry runs all layers of the model, whatever a probe asks for.
    assert CampaignSpec.from_document(read_file(out)).probe.fidelity == "full"
    [row] = read_table(table).rows
    assert (row.step_time_s, row.layout.tp) == (0.5, 2)
    calibrated = printed("plan", out, "--calibrate-from", table)
    assert "predicted from 1 stored measurement (1 step time, 0 peaks)" in calibrated


def test_files_that_are_there_are_not_overwritten_unasked(nanotron: Path) -> None:
    out = nanotron.parent / "campaign.yaml"
    trainers = nanotron.parent / "campaign-trainers.yaml"
    trainers.write_text("mine")
    words = ("campaign", "from", nanotron, *ON_H100, "--out", out)
    refused = run(*words)
    assert refused.exit_code == 1
    assert f"{trainers} exists; choose another --trainers-out" in " ".join(refused.output.split())
    assert (trainers.read_text(), out.exists()) == ("mine", False)
    printed(*words, "--force")
    assert yaml.safe_load(trainers.read_text())["trainers"][0]["name"] == "nanotron"


def test_a_file_that_starts_nothing_gives_the_campaign_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 2},
                "bf16": {"enabled": True},
            }
        )
    )
    out = tmp_path / "campaign.yaml"
    more = ("--model", "llama-8b", "--seq-length", 4096, "--nodes", 2, "--set", "recompute=full")
    text = printed("campaign", "from", path, *ON_H100, *more, "--out", out)
    assert "no entry of a trainer: ds.json starts no program" in " ".join(text.split())
    assert not (tmp_path / "campaign-trainers.yaml").exists()
    baseline = CampaignSpec.from_document(read_file(out)).baseline
    assert baseline is not None
    assert (baseline.dp, baseline.num_microbatches, baseline.zero_stage) == (16, 2, 2)


def test_the_space_has_no_choices_of_knobs_that_the_entry_does_not_pass_on(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    path = tmp_path / "job.sh"
    path.write_text(
        "deepspeed --num_nodes 1 --num_gpus 8 train.py --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 4 --deepspeed ds.json --gradient_checkpointing True\n"
    )
    more = ("--model", "llama-8b", "--seq-length", 4096)
    for out in (tmp_path / "a.yaml", tmp_path / "b.yaml"):  # two campaigns in one folder
        text = printed("campaign", "from", path, *ON_H100, *more, "--out", out)
        assert "every probe has the job's" in " ".join(text.split())
    document = read_file(tmp_path / "b.yaml")
    assert document["space"]["recompute"] == document["baseline"]["recompute"] == "full"
    assert document["space"]["pp"] == 1
    assert "zero_stage" not in document["space"]
    assert len(CampaignSpec.from_document(document).legal_set()) > 1
