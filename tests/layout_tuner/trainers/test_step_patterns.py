"""The lines that trainers print for a step, a sample of each version's form."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest

from layout_tuner.trainers.log_patterns import (
    LONGEST_LINE,
    LogPatterns,
    NearestLines,
    StepPattern,
    says_skipped,
)
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.trainers.registry import ADAPTERS

COUNTS = "number of skipped iterations:   {} | number of nan iterations:   0 |"
OLD = " iteration        7/      40 | elapsed time per iteration (ms): 310.5 | learning rate: 2.000E-04 | "
NEW = (
    " [2031-04-05 06:07:08.123456] iteration        7/      40 | consumed samples:           56 | "
    "elapsed time per iteration (ms): 310.5 | throughput per GPU (TFLOP/s/GPU): 9.0 | "
    "learning rate: 2.000000E-04 | global batch size:     8 | "
)
MIDDLE = NEW.replace(".123456", "")
PRIMUS = "[rank-7/8][INFO ] : " + MIDDLE.replace("310.5", "310.5/312.0").partition("] ")[2]
STEP = {"index": 7, "step_time_ms": 310.5}
SCALED = {"loss": 8.25, "loss_scale": 4096}
TITAN = "step:  7  loss:  8.25000  {}memory:  2.50GiB(3.10%)  {}: 2,048  tflops: 1.00  mfu: {}"
READ = {"index": 7, "loss": 8.25, "peak_memory_gib": 2.5, "tokens_per_s_per_device": 2048}
NANOTRON = "iteration: 7 / 40 | consumed_tokens: 3.2K | {}: 41 | tokens_per_sec: 9.9K | "
OVERFLOW = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 512, reducing to 256"

SAMPLES = {
    "Megatron-LM 1.0": ("megatron-lm", OLD + "lm loss: 8.25E+00 | loss scale: 4096.0 |", STEP | SCALED),
    "Megatron-LM 2.0": (
        "megatron-lm",
        OLD + "global batch size:    8 | lm loss: 8.25E+00 | loss scale: 4096.0 | " + COUNTS.format(0),
        STEP | SCALED | {"skipped": 0},
    ),
    "core 0.7": (
        "megatron-lm",
        MIDDLE + "lm loss: 8.25E+00 | loss scale: 4096.0 | grad norm: 1.0 | " + COUNTS.format(0),
        STEP | SCALED | {"skipped": 0},
    ),
    "core 0.16": (
        "megatron-lm",
        NEW + "lm loss: 8.25E+00 | mtp_1 loss: 9.0E+00 | loss scale: 4096.0 | " + COUNTS.format(0),
        STEP | SCALED | {"skipped": 0},
    ),
    "a step that was skipped": (
        "megatron-lm",
        NEW + "mtp_1 loss: 9.0E+00 | loss scale: 4096.0 | " + COUNTS.format(1),
        STEP | {"loss_scale": 4096, "skipped": 1},
    ),
    "Bridge": (
        "megatron-bridge",
        MIDDLE + "lm loss: 8.25E+00 | loss scale: 4096.0 | max attention logit: 3.0 | " + COUNTS.format(2),
        STEP | SCALED | {"skipped": 2},
    ),
    "NeMo 2": (
        "megatron-bridge",
        "Training epoch 0, iteration 7/39 | lr: 0.0002 | global_batch_size: 8 | global_step: 7 | "
        "reduced_train_loss: 8.25 | train_step_timing in s: 0.3105 | consumed_samples: 64",
        {"index": 7, "loss": 8.25, "step_time_s": 0.3105},
    ),
    "Megatron-DeepSpeed": (
        "megatron-deepspeed",
        OLD + "lm loss: 8.25E+00 | loss scale: 4096.0 | actual seqlen:   128 | " + COUNTS.format(0)
        + " samples per second: 25.765 | tokens per gpu per second (tgs): 412.2 | TFLOPs: 1.00 |",
        STEP | SCALED | {"skipped": 0, "tokens_per_s_per_device": 412.2},
    ),
    "Primus": (
        "megatron-lm",
        PRIMUS + "lm loss: 8.25E+00 | loss scale: 4096.0 | " + COUNTS.format(0),
        STEP | SCALED | {"skipped": 0},
    ),
    "Primus 26": (
        "megatron-lm",
        PRIMUS.replace("throughput per GPU (TFLOP/s/GPU): 9.0", "compute per GPU (TFLOP/s/GPU): 9.0 (avg 8.9) ")
        + "lm loss: 8.25E+00 | loss scale: 4096.0 | " + COUNTS.format(0)
        + " hip mem usage/free/total/usage_ratio: 1.00GB/3.00GB/4.00GB/25.00%",
        STEP | SCALED | {"skipped": 0},
    ),
    "Primus, a mean in brackets": (
        "megatron-lm", PRIMUS.replace("/312.0", " (avg 312.0)") + "lm loss: 8.25E+00 |", STEP | {"loss": 8.25}
    ),
    "torchtitan of 2024": ("torchtitan-main", TITAN.format("", "wps", "1.00%"), READ),
    "torchtitan 0.1.0": ("torchtitan-main", TITAN.format("", "tps", "1.00%"), READ),
    "torchtitan 0.2": ("torchtitan-0.2", TITAN.format("grad_norm:  5.9444  ", "tps", "1.00%"), READ),
    "torchtitan main": ("torchtitan-main", TITAN.format("grad_norm:  5.9444  ", "tps", "N/A"), READ),
    "torchtitan, a stage that has no loss": (
        "torchtitan-main",
        TITAN.format("", "tps", "N/A").replace(" 8.25000", "-4.00000"),
        {name: figure for name, figure in READ.items() if name != "loss"},
    ),
    "torchtitan validates": ("torchtitan-main", "validate " + TITAN.format("", "tps", "1.00%"), None),
    "nanotron 0.4": (
        "nanotron",
        NANOTRON.format("elapsed_time_per_iteration_ms") + "lm_loss: 8.25 | lr: 0.0002 | grad_norm: 1.25",
        {"index": 7, "loss": 8.25},
    ),
    "nanotron main": (
        "nanotron",
        NANOTRON.format("time_per_iteration_ms") + "grad_norm: 1.25 | lm_loss: 9.1e-05 | z_loss: 0.1",
        {"index": 7, "loss": 9.1e-05},
    ),
    "nanotron without a rate": ("nanotron", NANOTRON.format("a") + "lm_loss: 8.25", {"index": 7, "loss": 8.25}),
    "nanotron, infinite": ("nanotron", NANOTRON.format("a") + "lm_loss: infE | lr: 1", {"index": 7, "loss": math.inf}),
    "nanotron, thousands": ("nanotron", NANOTRON.format("a") + "lm_loss: 1.2K | lr: 1", {"index": 7}),
    "DeepSpeed's pipeline": (
        "deepspeed",
        "steps: 7 loss: 8.2500 iter time (s): 0.311 samples/sec: 25.723",
        {"index": 7, "loss": 8.25, "step_time_s": 0.311},
    ),
    "DeepSpeed's pipeline with further losses": (
        "deepspeed",
        "steps: 7 loss: 8.2500 moe: 0.0100 mtp: 9.0000 iter time (s): 0.311 samples/sec: 25.723",
        {"index": 7, "loss": 8.25, "step_time_s": 0.311},
    ),
    "DeepSpeed's engine": (
        "deepspeed",
        "[2031-04-05 06:07:08,123] [INFO] [logging.py:128:log_dist] [Rank 0] step=7, skipped=3, lr=[0.1], mom=[0.9]",
        {"index": 7, "skipped_total": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_each_version_of_a_trainers_line_is_read(name: str) -> None:
    adapter, line, figures = SAMPLES[name]
    assert ADAPTERS[adapter].log.read(line) == figures


def test_each_variant_names_its_source_and_has_a_sample() -> None:
    found = {
        (adapter, variant[0].source)
        for adapter, line, figures in SAMPLES.values()
        if (variant := ADAPTERS[adapter].log.find(line)) is not None
    }
    known = {
        (name, variant.source) for name, each in ADAPTERS.items() for variant in each.log.variants
    }
    assert {source for _, source in known} == {source for _, source in found}
    assert all(source for _, source in known)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"[2031-04-05 06:07:08,123] [INFO] [loss_scaler.py:190:update_scale] {OVERFLOW}", True),
        ("[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite.", True),
        (
            "[deepscale] OVERFLOW! Rank 3 Skipping step. Attempted loss scale: 8, reducing to 4",
            True,
        ),
        ("[default0]:Grad overflow on iteration 5", True),
        ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0", True),
        ("OVERFLOW! Skipping step. Attempted loss scale: 8, reducing to 4", True),
        ("NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0", True),
        ("overflow detected - reducing loss scaleto 32768.0", True),
        ("OVERFLOW within closure! Skipping step. Attempted loss scale: 8", False),
        ("Reducing dynamic loss scale from 8 to 4", False),
    ],
)
def test_trainers_say_before_the_line_of_a_step_that_they_skip_it(line: str, says: bool) -> None:
    assert says_skipped(line) is says


@pytest.mark.parametrize("quoted", ["8.25", "'8.25'", '"8.25"'])
def test_a_number_may_stand_in_quotes_as_in_the_log_of_transformers_5(quoted: str) -> None:
    patterns = LogPatterns(variants=(StepPattern(pattern="'loss': (?P<loss>[^,]+), 'grad_norm'"),))
    assert patterns.read(f"{{'loss': {quoted}, 'grad_norm': '1.25'}}") == {"loss": 8.25}


def test_an_entry_may_have_several_patterns_of_which_the_first_that_matches_counts() -> None:
    entry = {"name": "theirs", "version": "1", "command": ["train"]}
    steps = ["at (?P<index>\\d+) took (?P<step_time_s>\\S+)", "at (?P<index>\\d+)"]
    log = ProgramTrainer.from_mapping({**entry, "log": {"step": steps}}).patterns
    assert log.read("at 3 took 0.5") == {"index": 3, "step_time_s": 0.5}
    assert log.read("at 3") == {"index": 3}
    assert ProgramTrainer.from_mapping({**entry, "log": {"step": steps[1]}}).patterns.read("at 3")


def test_hostile_lines_cost_no_exponential_time() -> None:
    # A pattern that takes exponential time never gets through these lines.
    pieces = (
        "x: y ",
        "a:",
        "| ",
        "| lm loss: 1",
        "steps: 1 loss: 2 ",
        "step: 1 loss: 2 memory: ",
        " ",
    )
    heads = ("", *(line[: len(line) * 2 // 3] for _, line, _ in SAMPLES.values()))
    for adapter in ADAPTERS.values():
        for head in heads:
            for piece in pieces:
                line = head + piece * (LONGEST_LINE // len(piece))
                with suppress(ValueError):  # of a number that is cut
                    adapter.log.find(line)
                says_skipped(line)


def test_the_nearest_lines_are_those_with_the_most_words_of_the_pattern() -> None:
    nearest = NearestLines(ADAPTERS["megatron-lm"].log.variants)
    line = OLD.replace(": 310.5 |", ": fast |") + COUNTS.format(0)
    lines = ["loading", "read 5 of 9 files", "iteration 3", line, line.replace("7/", "8/"), "a 1 2"]
    said = [nearest.take(each) for each in lines]
    assert said[0] is None
    assert said[4] is None  # it differs from the one before in its numbers alone
    assert said[3]["lines"][0] == line
    assert said[3]["pattern"] in {each.pattern for each in ADAPTERS["megatron-lm"].log.variants}
    assert said[3]["lines"] == [line, "iteration 3", "read 5 of 9 files"]
    assert NearestLines(()).take(line) is None
