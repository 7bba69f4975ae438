"""What DeepSpeed adds to a job of Megatron: its options, and its configuration beside the script.

The defaults are those of Megatron-DeepSpeed's megatron/arguments.py at f4157bea.
"""

from __future__ import annotations

from typing import Final

from layout_tuner.trainers.found_jobs.found_job import Findings, Stated
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments
from layout_tuner.trainers.found_jobs.own_scripts.deepspeed import note_engine
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    note_count,
    statements_of,
    whole_number,
)
from layout_tuner.trainers.found_jobs.positioned import positioned
from layout_tuner.trainers.megatron_deepspeed import CONTEXT_FLAG, ZERO_FLAG

_CONFIG: Final = "--deepspeed-config"
DEEPSPEED_OPTIONS: Final = frozenset(
    ("--deepspeed", _CONFIG, ZERO_FLAG, CONTEXT_FLAG, "--no-pipeline-parallel")
)
"""Options that Megatron-LM does not have, with hyphens."""

_ZERO: Final = "zero_optimization"
_STAGE: Final = "zero_optimization.stage"
_BATCHES: Final = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}
_CHANGING: Final = (
    ("--num-layers-per-virtual-pipeline-stage", "stages that DeepSpeed's pipeline does not have"),
    ("--use-distributed-optimizer", "an optimizer that DeepSpeed's replaces"),
    ("--curriculum-learning", "a length that changes during the training"),
    ("--data-efficiency-curriculum-learning", "a length that changes during the training"),
    ("--random-ltd", "tokens that skip layers"),
    ("--cpu-optimizer", "an optimizer on the host"),
    ("--remote-device", "weights on the host"),
    ("--checkpoint-in-cpu", "activations on the host"),
    ("--memory-centric-tiled-linear", "products in tiles"),
)
"""What changes time or memory and has no counterpart here."""


def read_engine(arguments: Arguments, file: JobFile) -> None:
    """Notes what DeepSpeed decides, after the options that both trainers have."""
    findings = arguments.findings
    if arguments.whole("cp", CONTEXT_FLAG) not in (None, 1):
        arguments.note("cp_comm_type", "a2a", arguments.options[CONTEXT_FLAG])  # Ulysses
    _read_experts(arguments)
    arguments.is_given("--deepspeed", "--no-pipeline-parallel")
    activations = "--deepspeed-activation-checkpointing"
    if arguments.is_given(activations) and findings.value("recompute") == "none":
        why = "it has no effect without --checkpoint-activations"
        arguments.miss(arguments.options[activations], why)
    arguments.is_given("--contigious-checkpointing")
    divided = arguments.switch("recompute", "--partition-activations")
    if divided is not None and findings.value("recompute") == "full":
        arguments.miss(divided, "activations that are divided over tp", "recompute")
    for name, what in _CHANGING:
        if (option := arguments.switch("", name)) is not None:
            arguments.miss(option, f"{what}: it has no counterpart here")
    if (option := arguments.switch("schedule", "--enable-zbh1-pipeline")) is not None:
        arguments.miss(option, "this schedule was not compared with those here", "schedule")
    stage = arguments.whole("zero_stage", ZERO_FLAG)
    stated = _statements(arguments, file)
    if stated is not None:
        _read_config(arguments, stated, stage)
    arguments.assume("zero_stage", 1, ZERO_FLAG)


def _read_experts(arguments: Arguments) -> None:
    if arguments.findings.value("model.num_experts") is None:
        arguments.is_given("--moe-expert-parallel-size", "--enable-expert-tensor-parallelism")
        return
    arguments.whole("ep", "--moe-expert-parallel-size")
    arguments.assume("ep", 1, "--moe-expert-parallel-size")
    divided = arguments.switch("etp", "--enable-expert-tensor-parallelism")
    tp = arguments.findings.value("tp")
    if divided is not None and tp is not None:
        arguments.note("etp", tp, divided)
    arguments.assume("etp", 1, "--enable-expert-tensor-parallelism")
    kind = arguments.word("model.num_experts", "--mlp-type")
    if kind is not None and kind[1].text == "residual":
        what = "a dense feed-forward beside the experts: no shape of a model says it"
        arguments.miss(kind[0], what, "model.num_experts")
    if len((option := arguments.options["--num-experts"]).values) > 1:
        arguments.miss(option, "layers with different numbers of experts", "model.num_experts")


def _statements(arguments: Arguments, file: JobFile) -> dict[str, Stated] | None:
    """Keys of DeepSpeed's configuration, of the script or beside it; None: it cannot be read."""
    if not arguments.is_given(_CONFIG):
        return None
    option = arguments.options[_CONFIG]
    value = option.values[0] if option.values else None
    found = None
    if value is not None:
        path = value.said if value.text is None else value.text
        found = file.beside(path) or file.beside(path.rpartition("/")[2])
    if found is None:
        is_stated = arguments.is_given(ZERO_FLAG)
        why = "it is not beside the script, and says what of ZeRO is right"
        arguments.miss(option, why, "" if is_stated else "zero_stage")
        return None
    return statements_of(positioned(found), named=found.name)


def _read_config(arguments: Arguments, stated: dict[str, Stated], stage: int | None) -> None:
    """What the file says counts, also over the options."""
    findings = arguments.findings
    stated.pop("gradient_accumulation_steps", None)  # it follows from the batches
    for key, name in _BATCHES.items():
        if (each := stated.pop(key, None)) is not None:
            _compare_batch(findings, name, each)
    of_file = stated.get(_STAGE)
    if of_file is not None and "$" in str(of_file.value):
        del stated[_STAGE]
        if not findings.is_open("zero_stage"):
            findings.miss(of_file.said, "its variable is not known", name="zero_stage")
    elif of_file is None and _ZERO not in stated:
        if stage:
            said = arguments.options[ZERO_FLAG].said
            why = "DeepSpeed's file, which counts, states no stage"
            findings.miss(said, why, name="zero_stage")
    elif of_file is not None and stage is not None and whole_number(of_file) == stage:
        del stated[_STAGE]  # the option has the place of its value
    note_engine(findings, stated, is_filled=True)


def _compare_batch(findings: Findings, name: str, stated: Stated) -> None:
    if findings.value(name) is None and not findings.is_open(name):
        note_count(findings, name, stated)
    elif findings.value(name) not in (None, whole_number(stated)):
        why = f"DeepSpeed refuses it beside {name}={findings.value(name)} of the options"
        findings.miss(stated.said, why, name=name)
