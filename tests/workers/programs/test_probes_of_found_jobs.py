"""Probes with the entries that are written from users' own scripts and configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
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


def entry_of(path: Path, **asked: Any) -> tuple[CampaignSpec, ProgramTrainer, ProbeEntry]:
    """The campaign of a job, and the trainer that probes it with the interpreter of the tests."""
    found = job_campaign(path, JobAsked(cluster=CLUSTER.to_mapping(), **asked))
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


@dataclass(frozen=True, kw_only=True)
class ProbedScript:
    """The outcome of a probe of a script, and the words that its program got."""

    spec: CampaignSpec
    outcome: Outcome
    words: list[str]
    left: list[str]
    """Processes and folders of the probe that stayed."""


@pytest.fixture(scope="module")
def of_megatron(nodes: LocalNodes, tmp_path_factory: pytest.TempPathFactory) -> ProbedScript:
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "pretrain_gpt.py").write_text(PLAYED + MEGATRON_LINE)
    (script := folder / "job.sh").write_text(MEGATRON)
    spec, trainer, _ = entry_of(script)
    outcome = probe(nodes, spec, trainer)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    return ProbedScript(spec=spec, outcome=outcome, words=said_by(folder), left=left_behind(nodes))


def test_a_script_of_megatron_is_measured(of_megatron: ProbedScript) -> None:
    measurement = of_megatron.outcome.measurement
    assert measurement.step_time_s >= 0.02
    assert len(measurement.iterations) >= 3 + of_megatron.spec.probe.warmup


def test_a_script_of_megatron_is_probed_with_its_own_command(of_megatron: ProbedScript) -> None:
    words = of_megatron.words
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2"
    assert {"--data-path", "/data/text", "--hidden-size", "1.0e-4"} <= set(words)


def test_a_probe_of_a_script_runs_few_steps_and_saves_none(of_megatron: ProbedScript) -> None:
    words = set(of_megatron.words)
    assert not {"--save", "--load"} & words
    assert {f"--train-iters={2 + 8 + 3}", "--lr-decay-iters=500"} <= words


def test_a_probe_of_a_script_leaves_nothing_behind(of_megatron: ProbedScript) -> None:
    assert of_megatron.left == []


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


BRIDGE = """#!/bin/bash
export SAID=said-
torchrun --nproc_per_node 2 scripts/training/run_recipe.py --recipe llama32_1b_pretrain_config \\
    -tp 2 -mb 2 -gb 8 -sl 32 --save_dir /ckpt model.num_layers=4 model.hidden_size=64 \\
    model.ffn_hidden_size=256 model.num_attention_heads=4 model.num_query_groups=4 \\
    train.train_iters=500 scheduler.lr_warmup_iters=100 ++checkpoint.load=/ckpt optimizer.lr=1e-4
"""
BRIDGE_RUN = """
import argparse

parser = argparse.ArgumentParser(allow_abbrev=False)
for names in (("--recipe",), ("-tp", "--tensor_model_parallel_size"), ("-sl", "--seq_length"),
              ("-mb", "--micro_batch_size"), ("-gb", "--global_batch_size"),
              ("-ms", "--max_steps"), ("--save_dir",)):
    parser.add_argument(*names)
options, overrides = parser.parse_known_args()
FIELDS = {  # some of the fields of its ConfigContainer: Hydra refuses others
    "model": "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel num_layers "
        "virtual_pipeline_model_parallel_size recompute_granularity recompute_method hidden_size "
        "recompute_num_layers ffn_hidden_size num_attention_heads num_query_groups",
    "train": "micro_batch_size global_batch_size train_iters eval_iters",
    "ddp": "use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
        "num_distributed_optimizer_instances use_megatron_fsdp average_in_collective "
        "data_parallel_sharding_strategy",
    "dist": "use_megatron_fsdp", "optimizer": "use_distributed_optimizer lr",
    "checkpoint": "save load ckpt_format", "logger": "log_interval",
    "scheduler": "lr_decay_iters lr_warmup_iters",
}
values = {"checkpoint.save": options.save_dir}
for word in overrides:
    path, equals, value = word.lstrip("+").partition("=")
    section, _, field = path.partition(".")
    if not equals or path != "mixed_precision" and field not in FIELDS[section].split():
        sys.exit(f"Failed to parse Hydra overrides: {word}")
    values[path] = value
if int(values["scheduler.lr_warmup_iters"]) >= int(
    values.get("scheduler.lr_decay_iters") or values["train.train_iters"]
):
    sys.exit("lr_warmup_steps < lr_decay_steps")
with open("values.json", "w") as file:
    json.dump(values, file)
play(values["train.train_iters"], lambda step, took: (
    f" [2031-04-05 06:07:08] iteration {step:8d}/     500 | consumed samples:            8 | elapsed "
    f"time per iteration (ms): {1e3 * took:.1f} | throughput per GPU (TFLOP/s/GPU): 1.0 | learning "
    "rate: 1.000000E-04 | global batch size:     8 | lm loss: 9.000000E+00 | loss scale: 1.0 | grad "
    "norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"))
"""
OF_RECIPE = {"pp": 1, "vpp": 1, "cp": 1, "sequence_parallel": False, "model.vocab_size": 256}
"""What only the recipe says."""


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (
            {},
            {
                "model.tensor_model_parallel_size": "2",
                "train.micro_batch_size": "2",
                "model.recompute_granularity": "null",
            },
        ),
        (
            {"tp": 1, "dp": 2, "num_microbatches": 2, "zero_stage": 3, "recompute": "full"},
            {
                "model.tensor_model_parallel_size": "1",
                "ddp.data_parallel_sharding_strategy": "optim_grads_params",
                "model.recompute_granularity": "full",
            },
        ),
    ],
)
def test_a_recipe_of_bridge_is_probed(
    nodes: LocalNodes, tmp_path: Path, knobs: dict[str, Any], expected: dict[str, str]
) -> None:
    (program := tmp_path / "scripts/training/run_recipe.py").parent.mkdir(parents=True)
    program.write_text(PLAYED + BRIDGE_RUN)
    script = tmp_path / "job.sh"
    script.write_text(BRIDGE)
    spec, trainer, _ = entry_of(script, stated={**OF_RECIPE, "recompute": "none"})
    outcome = probe(nodes, spec, trainer, **knobs)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    values = json.loads((tmp_path / "values.json").read_text())
    kept = {"model.hidden_size": "64", "optimizer.lr": "1e-4", "scheduler.lr_decay_iters": "500"}
    saved = {"checkpoint.save": "null", "checkpoint.load": "null", "train.eval_iters": "0"}
    expected |= kept | saved | {"train.train_iters": str(2 + 8 + 3), "train.global_batch_size": "8"}
    assert {name: values[name] for name in expected} == expected


TITAN = """
[job]
dump_folder = "out"
[profiling]
enable_profiling = true
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
global_batch_size = 8
seq_len = 32
steps = 500
dataset = "c4"
[parallelism]
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
[validation]
enable = true
[metrics]
log_freq = 10
"""
TITAN_RUN = """
import tomllib

values, words, at = {}, sys.argv[1:], 0
switches = {"checkpoint": ["enable"], "validation": ["enable"], "profiling": ["enable_profiling"]}
while at < len(words):
    path, equals, value = words[at].removeprefix("--").partition("=")
    section, _, name = path.partition(".")
    at += 1
    if (switch := name.removeprefix("no-")) in switches.get(section, ()):
        value = not name.startswith("no-")
    elif not equals:
        value, at = words[at], at + 1
    values[section, switch] = value
with open(values["job", "config_file"], "rb") as file:
    for section, each in tomllib.load(file).items():
        values = {(section, name): value for name, value in each.items()} | values
with open("values.json", "w") as file:
    json.dump({".".join(name): value for name, value in values.items()}, file)
if not os.environ["RANK"].strip("0"):
    for section, (switch,) in switches.items():
        assert not values[section, switch], section
    play(values["training", "steps"], lambda step, took: (
        f"[titan] 2031-04-05 06:07:08,123 - root - INFO - step: {step:2}  loss: 12.25000  grad_norm: "
        f" 1.2500  memory:  1.04GiB(1.31%)  tps: {round(128 / took):,}  tflops: 1.00  mfu: 1.00%"
        if step == 1 or step % int(values["metrics", "log_freq"]) == 0 else ""))
"""
LLAMA = {
    "name": "own",
    "family": "llama",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 256,
    "seq_length": 32,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, {"parallelism.data_parallel_shard_degree": "2"}),
        (
            {"tp": 2, "dp": 1, "zero_stage": 0, "num_microbatches": 4, "precision": "fp32"},
            {
                "parallelism.tensor_parallel_degree": "2",
                "parallelism.data_parallel_shard_degree": "1",
                "training.mixed_precision_param": "float32",
            },
        ),
    ],
)
def test_a_configuration_of_torchtitan_is_probed(
    nodes: LocalNodes, tmp_path: Path, knobs: dict[str, Any], expected: dict[str, str]
) -> None:
    (program := tmp_path / "torchtitan/train.py").parent.mkdir()
    program.write_text(PLAYED + TITAN_RUN)
    path = tmp_path / "llama.toml"
    path.write_text(TITAN)
    spec, trainer, _ = entry_of(path, model=LLAMA, num_nodes=1)
    knobs = {"sequence_parallel": True, **knobs} if knobs else knobs
    outcome = probe(nodes, spec, trainer, **knobs)
    assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
    assert outcome.measurement.step_time_s >= 0.02
    values = json.loads((tmp_path / "values.json").read_text())
    expected |= {"training.dataset": "c4", "training.steps": str(2 + 8 + 3)}
    assert {name: values[name] for name in expected} == expected
    assert values["job.dump_folder"] != "out"


HUGGING_FACE = """
def size(name):
    return int(option("--" + name))

def switch(name):
    return "--" + name in sys.argv and option("--" + name) != "False"

world_size = int(os.environ["WORLD_SIZE"])
args = {
    "train_micro_batch_size_per_gpu": size("per_device_train_batch_size"),
    "gradient_accumulation_steps": size("gradient_accumulation_steps"),
    "bf16": switch("bf16"),
}
args["train_batch_size"] = (
    world_size * args["train_micro_batch_size_per_gpu"] * args["gradient_accumulation_steps"]
)
config = json.load(open(option("--deepspeed"))) if option("--deepspeed") else {}
for name, own in args.items():
    given = config.get(name, "auto")
    given = given if name != "bf16" or given == "auto" else given["enabled"]
    if given not in ("auto", own):
        sys.exit(f"Please correct the following DeepSpeed config values: {name}={given} vs hf {own}")
with open("values.json", "w") as file:
    json.dump({"config": config, **args}, file)
if os.environ["RANK"] == "0":
    quote = "'" * ("--quoted" in sys.argv)
    def line(step, took):
        if config.get("steps_per_print") == 1 and not quote:
            print(f"[2031-04-05 06:07:08,123] [INFO] [logging.py:107:log_dist] [Rank 0] step={step}, "
                  "skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]")
        return ("{'loss': %s9.25%s, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.01}"
                % (quote, quote))
    assert option("--logging_steps") == "1" and "--logging_strategy" not in sys.argv
    play(option("--max_steps"), line)
    print("{'train_runtime': 1.5, 'train_samples_per_second': 9.9, 'train_loss': 9.25}")
open(os.path.join(option("--output_dir"), "model.bin"), "w").close()
"""
ENGINE = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
TRAINER = (
    "run_clm.py --model_name_or_path own/model --per_device_train_batch_size 2 --bf16 True "
    "--gradient_accumulation_steps 2 --do_train True --num_train_epochs 3 --block_size 32 "
    "--output_dir out --logging_strategy epoch --gradient_checkpointing False"
)


@pytest.mark.parametrize(
    ("launch", "stages"),
    [
        (f"deepspeed --num_gpus 2 {TRAINER} --deepspeed ds.json", (2, 3)),
        (f"accelerate launch --num_processes 2 --num_machines 1 {TRAINER} --quoted", (0, 0)),
    ],
    ids=["deepspeed", "accelerate"],
)
def test_a_script_of_hugging_face_is_probed(
    nodes: LocalNodes, tmp_path: Path, launch: str, stages: tuple[int, int]
) -> None:
    (tmp_path / "run_clm.py").write_text(PLAYED + HUGGING_FACE)
    (tmp_path / "ds.json").write_text(json.dumps(ENGINE))
    (tmp_path / "out").mkdir()
    script = tmp_path / "job.sh"
    script.write_text(f"export SAID=said-\n{launch}\n")
    spec, trainer, _ = entry_of(
        script, model=LLAMA, num_nodes=1, stated={} if stages[0] else {"zero_stage": 0}
    )
    for stage, size in zip(stages, (2, 1), strict=True):
        knobs = {"micro_batch_size": size, "num_microbatches": 4 // size, "zero_stage": stage}
        outcome = probe(nodes, spec, trainer, **knobs)
        assert outcome.measurement is not None, (outcome.message, outcome.log_tail)
        assert len(outcome.measurement.iterations) >= 3 + spec.probe.warmup
        assert outcome.measurement.iterations[-1].loss == 9.25
        values = json.loads((tmp_path / "values.json").read_text())
        assert (values["train_micro_batch_size_per_gpu"], values["train_batch_size"]) == (size, 8)
        config = values["config"]
        assert config == {} or config["zero_optimization"] == {"stage": stage, "overlap_comm": True}
    assert list((tmp_path / "out").iterdir()) == []  # nothing is saved over the job's model


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
