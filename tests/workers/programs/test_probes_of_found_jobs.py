"""Probes with the entries that are written from users' own scripts and configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.predictions.job_plan import JobAsked, job_campaign, probe_entry_of
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.found_jobs.probing.probe_entry import ProbeEntry
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.launchers.local import LocalNodes
from tests.kit.local_ranks import make_cluster
from tests.workers.programs.programs import left_behind, run

pytestmark = pytest.mark.ranks

CLUSTER = make_cluster(peak_flops_per_s={"fp32": 2e12, "bf16": 2e12})
PLAYED = """
import json, os, sys, time

with open(os.environ.get("SAID", "said.json") + os.environ["RANK"], "w") as file:
    json.dump({"argv": sys.argv[1:], "folder": os.getcwd()}, file)

def option(name):
    for at, word in enumerate(sys.argv):
        if word == name:
            return sys.argv[at + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]

def play(steps, line):
    for step in range(1, int(steps) + 1):
        begin = time.monotonic()
        time.sleep(0.02)
        print(line(step, time.monotonic() - begin), flush=True)
"""
"""The beginning of a program that plays a trainer's log back, for as many steps as it is asked."""
MEGATRON_LINE = """
play(option("--train-iters"), lambda step, took: (
    f" [2031-04-05 06:07:08] iteration {step:8d}/ 1000 | consumed samples: 8 | elapsed time per iteration "
    f"(ms): {1e3 * took:.1f} | learning rate: 1.0E-04 | global batch size: 8 | lm loss: 9.0E+00 | loss "
    "scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"))
"""
SHAPE = """--num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 255
    --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear --swiglu
    --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights"""
MEGATRON = f"""#!/bin/bash
export SAID=said-
TP=2
ARGS=(
    --tensor-model-parallel-size $TP --micro-batch-size 2 --global-batch-size 8
    {SHAPE.replace(chr(10), " ")}
    --make-vocab-size-divisible-by 1 --lr 1.0e-4 --train-iters 500 --lr-warmup-iters 100
    --data-path /data/text --save /ckpt --load /ckpt --eval-iters 9
)
torchrun --nproc_per_node 2 pretrain_gpt.py "${{ARGS[@]}}"
"""
NANOTRON = """
general: {project: a, run: b, seed: 1}
parallelism: {dp: 1, tp: 2, pp: 1, pp_engine: 1f1b, tp_mode: ALL_REDUCE}
tokens: {sequence_length: 32, micro_batch_size: 2, batch_accumulation_per_replica: 4, train_steps: 500}
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config: {is_llama_config: true, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 4,
    num_attention_heads: 4, num_key_value_heads: 4, vocab_size: 256, tie_word_embeddings: false,
    max_position_embeddings: 32}
optimizer: {zero_stage: 0}
data_stages: [{name: all, data: {dataset: /data/text}}]
"""
NANOTRON_LINE = """
values = json.load(open(option("--config-file")))
with open("values.json", "w") as file:
    json.dump(values, file)
play(values["tokens"]["train_steps"], lambda step, took: (
    f"iteration: {step} / 500 | consumed_tokens: 3.2K | elapsed_time_per_iteration_ms: {1e3 * took:.3g} "
    "| tokens_per_sec: 9.9K | lm_loss: 8.25 | lr: 0.1"))
"""


def entry_of(path: Path) -> tuple[CampaignSpec, ProgramTrainer, ProbeEntry]:
    """The campaign of a job, and the trainer that probes it with the interpreter of the tests."""
    found = job_campaign(path, JobAsked(cluster=CLUSTER.to_mapping()))
    entry = probe_entry_of(found, path)
    assert isinstance(entry, ProbeEntry), entry
    python, *words = entry.entry["command"]
    assert python == "python"
    fields = {**entry.entry, "command": ["{python}", *words]}
    return found.spec, ProgramTrainer.from_mapping(fields), entry


def probe(nodes: LocalNodes, spec: CampaignSpec, trainer: ProgramTrainer, **knobs: Any) -> Outcome:
    assert spec.baseline is not None
    layout = replace(spec.baseline, **knobs)
    settings = {"model": spec.model, "layout": layout, "iterations": 3, "deadline_s": 100.0}
    return run(nodes, trainer, cluster=CLUSTER, **settings)


def said_by(folder: Path, rank: int = 0, name: str = "said-") -> list[str]:
    said = json.loads((folder / f"{name}{rank}").read_text())
    assert Path(said["folder"]) == folder  # the script's own folder
    return list(said["argv"])


def test_a_script_of_megatron_is_probed_with_its_own_command(
    nodes: LocalNodes, tmp_path: Path
) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(PLAYED + MEGATRON_LINE)
    script = tmp_path / "job.sh"
    script.write_text(MEGATRON)
    spec, trainer, _ = entry_of(script)
    outcome = probe(nodes, spec, trainer)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    assert outcome.measurement.step_time_s >= 0.02
    assert len(outcome.measurement.iterations) >= 3 + spec.probe.warmup
    words = said_by(tmp_path)
    at = words.index("--tensor-model-parallel-size")
    assert words[at + 1] == "2"
    for kept in ("--data-path", "/data/text", "--hidden-size", "1.0e-4"):
        assert kept in words
    assert not {"--save", "--load"} & set(words)
    assert f"--train-iters={2 + 8 + 3}" in words
    assert "--lr-decay-iters=500" in words
    assert left_behind(nodes) == []


def test_the_same_entry_probes_another_layout(nodes: LocalNodes, tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(PLAYED + MEGATRON_LINE)
    script = tmp_path / "job.sh"
    script.write_text(MEGATRON)
    spec, trainer, _ = entry_of(script)
    knobs = {"tp": 1, "dp": 2, "micro_batch_size": 1, "num_microbatches": 4, "zero_stage": 1}
    outcome = probe(nodes, spec, trainer, **knobs, recompute="full")
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    words = said_by(tmp_path)
    for option, value in (
        ("--tensor-model-parallel-size", "1"),
        ("--micro-batch-size", "1"),
        ("--recompute-granularity", "full"),
    ):
        assert words[words.index(option) + 1] == value
        assert words.count(option) == 1
    assert "--use-distributed-optimizer" in words


def test_a_configuration_of_nanotron_is_probed_with_its_data(
    nodes: LocalNodes, tmp_path: Path
) -> None:
    (tmp_path / "run_train.py").write_text(PLAYED + NANOTRON_LINE)
    path = tmp_path / "llama.yaml"
    path.write_text(NANOTRON)
    spec, trainer, _ = entry_of(path)
    outcome = probe(nodes, spec, trainer, tp=1, dp=2, num_microbatches=2)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    values = json.loads((tmp_path / "values.json").read_text())
    assert (values["parallelism"]["dp"], values["parallelism"]["tp"]) == (2, 1)
    assert values["tokens"]["train_steps"] == 2 + 8 + 3
    assert values["tokens"]["batch_accumulation_per_replica"] == 2
    assert values["data_stages"][0]["data"] == {"dataset": "/data/text"}
    assert said_by(tmp_path, name="said.json")[0] == "--config-file"


TORCH = '''
"""Data-parallel training of a small network, with options and lines of Megatron-LM."""

import argparse, os, time
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size",
             "global-batch-size", "train-iters", "num-layers", "hidden-size"):
    parser.add_argument("--" + name, type=int, default=1)
asked, _ = parser.parse_known_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
width = asked.hidden_size
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(asked.num_layers)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
samples = torch.randn(asked.micro_batch_size, width)
replicas = dist.get_world_size() // asked.tensor_model_parallel_size
num_microbatches = asked.global_batch_size // asked.micro_batch_size // replicas
for step in range(1, asked.train_iters + 1):
    begin = time.monotonic()
    optimizer.zero_grad()
    for _ in range(num_microbatches):
        loss = model(samples).square().mean()
        (loss / num_microbatches).backward()
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
        weights.grad /= dist.get_world_size()
    optimizer.step()
    if dist.get_rank() == dist.get_world_size() - 1:
        took_ms = 1e3 * (time.monotonic() - begin)
        print(f" iteration {step:8d}/ {asked.train_iters} | elapsed time per iteration (ms): "
              f"{took_ms:.2f} | lm loss: {float(loss):.6E} | loss scale: 1.0 |", flush=True)
dist.destroy_process_group()
'''


@pytest.mark.slow
def test_a_real_program_of_torch_is_probed_by_its_script(nodes: LocalNodes, tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(TORCH)
    script = tmp_path / "job.sh"
    script.write_text(MEGATRON.replace("TP=2", "TP=1"))
    spec, trainer, _ = entry_of(script)
    assert spec.baseline == replace(spec.baseline or Layout(), tp=1, dp=2)
    outcome = probe(nodes, spec, trainer)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    first, *_, last = [each.loss for each in outcome.measurement.iterations]
    assert first is not None
    assert last is not None
    assert last < first
    assert left_behind(nodes) == []
