"""Job knobs in a worker's file of trainers: added, narrowed, allowed, and refused."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob
from layout_tuner.trainers.program import (
    ProgramTrainer,
    read_trainers,
)

FUSED = {
    "kind": "switch",
    "default": False,
    "when": "tp > 1",
    "touches": ["compute"],
    "effects": [{"value": True, "factor": 0.9, "log_sd": 0.1, "source": "our notes"}],
    "losses": "rounding",
    "arguments": ["--fused-mlp"],
}
CHUNK = {
    "kind": "count",
    "values": [8, 64],
    "default": 8,
    "writings": [
        {"value": 64, "environment": {"BIG": True}, "keys": {"a.big": True}},
        {"arguments": ["--chunk={value}"], "keys": {"a.chunk": "{value}"}},
    ],
}
COMMAND = ["{python}", "train.py", "{arguments}", "--values={values_file}"]


def trainer(command: list[str] | None = None, **fields: Any) -> ProgramTrainer:
    entry = {"name": "ours", "version": "1", "command": command or COMMAND, **fields}
    return read_trainers({"trainers": [entry]})["ours"]


def job(**settings: Any) -> TrainerJob:
    layout = Layout(tp=2, dp=4, ep=4, sequence_parallel=True, job=JobSettings(settings))
    return TrainerJob(model=model_preset("mixtral-8x7b"), layout=layout)


@pytest.fixture(scope="module")
def extended() -> TrainerAdapter:
    """The adapter of Megatron-LM with two knobs of a worker's file."""
    return trainer(adapter="megatron-lm", knobs={"fused_mlp": FUSED, "chunk": CHUNK}).of


def test_a_file_adds_knobs_to_those_of_the_adapter(extended: TrainerAdapter) -> None:
    assert {"moe_dispatcher", "fused_mlp", "chunk"} <= extended.job_knobs.keys()
    assert not extended.all_lacking(job(fused_mlp=True, chunk=32, moe_dispatcher="deepep"))


def test_an_added_knob_has_its_condition_and_effect(extended: TrainerAdapter) -> None:
    knob = extended.job_knobs["fused_mlp"]
    assert knob.when is not None
    assert knob.when.text == "tp > 1"
    effect = knob.effect(True)
    assert effect is not None
    assert (effect.factor, effect.source) == (0.9, "our notes")


def test_added_knobs_are_written_beside_the_adapters(extended: TrainerAdapter) -> None:
    chosen = job(fused_mlp=True, chunk=32, moe_dispatcher="deepep")
    added = set(extended.arguments(chosen)) - set(extended.arguments(job()))
    assert added == {"--fused-mlp", "--chunk=32", "flex", "--moe-flex-dispatcher-backend", "deepep"}
    assert extended.values(chosen) == {"a": {"chunk": 32}}


def test_one_value_of_an_added_knob_is_written_otherwise(extended: TrainerAdapter) -> None:
    assert extended.environment(job(chunk=64)) == {"BIG": "true"}
    assert extended.values(job(chunk=64)) == {"a": {"big": True}}


def test_a_file_narrows_a_knob_and_says_which_campaigns_may_set() -> None:
    narrow = {"cuda_graphs": {"values": ["attn"]}, "bucket_millions": {"maximum": 200}}
    of = trainer(adapter="megatron-lm", knobs=narrow).of
    graphs = of.job_knobs["cuda_graphs"]
    assert graphs.values == ("none", "attn")
    assert graphs.effect("attn") is not None
    assert not of.all_lacking(job(cuda_graphs="attn", bucket_millions=200))
    lacking = of.all_lacking(job(cuda_graphs="moe_router", bucket_millions=800))
    assert set(lacking) == {"cuda_graphs", "bucket_millions"}
    assert of.job_knobs["bucket_millions"].values == (0, 80, 200)
    some = trainer(adapter="megatron-lm", knobs_allowed=["moe_dispatcher"]).of
    assert not some.all_lacking(job(moe_dispatcher="deepep"))
    assert set(some.all_lacking(job(ep_overlap=True))) == {"ep_overlap"}
    none = trainer(adapter="megatron-lm", knobs_allowed=[]).of
    assert set(none.all_lacking(job(moe_dispatcher="deepep"))) == {"moe_dispatcher"}


def test_a_knob_that_the_command_would_not_pass_on_is_not_offered() -> None:
    of = trainer(["train.py", "--tp={tp}"], adapter="megatron-lm").of
    assert set(of.all_lacking(job(moe_dispatcher="deepep"))) == {"moe_dispatcher"}
    bridge = trainer(["train.py", "{arguments}"], adapter="megatron-bridge").of
    assert not bridge.all_lacking(job(moe_dispatcher="deepep"))
    titan = trainer(["train.py", "{values_file}"], adapter="torchtitan-0.3").of
    assert not titan.all_lacking(job(compile=True))
    any_program = trainer(["train.py"]).of
    assert set(any_program.all_lacking(job(compile=True))) == {"compile"}
    switch = trainer(["train.py", "--compile={compile}"], adapter="torchtitan-0.3").of
    assert set(switch.all_lacking(job(compile=True))) == {"compile"}  # {compile} is the probe's
    placed = trainer(["train.py", "--chunk={chunk}"], knobs={"chunk": {**CHUNK, "writings": []}})
    assert not placed.of.all_lacking(job(chunk=64))


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tp": FUSED}, "knobs.tp.name: tp is a field of the layout"),
        ({"x": {**FUSED, "kind": "dial", "values": [1]}}, "knobs.x.kind: 'dial' is unknown"),
        ({"x": {**FUSED, "when": "import os"}}, "knobs.x.when: 'import os' is not a condition"),
        ({"x": {**FUSED, "default": None}}, "knobs.x.default: the field is missing"),
        ({"x": {**FUSED, "touches": ["soul"]}}, "knobs.x.touches: 'soul' is unknown"),
        ({"x": {**FUSED, "shell": "rm"}}, "knobs.x: unknown field of a knob 'shell'"),
        ({"x": {**FUSED, "arguments": "--x"}}, "knobs.x.arguments: '--x' is not a list of texts"),
        (
            {"x": {**FUSED, "arguments": ["-c", "run {value}"]}},
            "knobs.x.arguments: the value would be read as code in the text after -c",
        ),
        (
            {"x": {**FUSED, "environment": {"LAYOUT_TUNER_X": "1"}}},
            "knobs.x.environment: 'LAYOUT_TUNER_X' is not the name of a variable",
        ),
        ({"x": {**FUSED, "keys": {"a": [1]}}}, r"knobs.x.keys.'a': \[1\] is not a text"),
        ({"x": {**FUSED, "ran": "("}}, "knobs.x.ran: .* is not a regular expression"),
        ({"x": {**FUSED, "ran": 5}}, "knobs.x.ran: 5 is not a regular expression"),
        ({"x": {**FUSED, "when": "tpp > 1"}}, "knobs.x.when: 'tpp' in 'tpp > 1' is unknown"),
        ({"x": {**FUSED, "since": "abc"}}, "knobs.x.since: 'abc' is not a version such as"),
        ({"x": {**FUSED, "since": 1.10}}, "knobs.x.since: 1.1 is not a version such as"),
        ({"bucket_millions": {"maximum": -1}}, "knobs.bucket_millions.maximum: -1 is not true"),
        ({"bucket_millions": {"minimum": 80}}, "knobs.bucket_millions.default: 0 is not from 80"),
        (
            {"bucket_millions": {"values": [800]}},
            "knobs.bucket_millions: unknown field of a count of the adapter 'values'",
        ),
        ({"x": {**FUSED, "ran": "x=."}}, "knobs.x.ran: .* with a group `value`"),
        ({"cuda_graphs": {"values": ["attm"]}}, "knobs.cuda_graphs.values: 'attm' is not one of"),
        ({"cuda_graphs": {"values": []}}, "knobs.cuda_graphs.values: it is not a list of values"),
        (
            {"cuda_graphs": {"arguments": ["--x"]}},
            "knobs.cuda_graphs: unknown field of a knob of the adapter 'arguments'",
        ),
        (
            {"x": {**FUSED, "arguments": []}},
            "knobs.x: it has neither arguments nor keys nor environment",
        ),
        (
            {"x": {"kind": "switch", "default": False}},
            "knobs.x: the program would not get it: write it with `arguments`",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_place(knobs: Any, said: str) -> None:
    with pytest.raises(SearchSpaceError, match=f"trainers.ours.{said}"):
        trainer(adapter="megatron-lm", knobs=knobs)


def test_an_unknown_name_among_the_allowed_is_refused() -> None:
    with pytest.raises(SearchSpaceError, match=r"knobs_allowed: .*'moe_dispacher'.*moe_disp"):
        trainer(adapter="megatron-lm", knobs_allowed=["moe_dispacher"])
    with pytest.raises(SearchSpaceError, match=r"knobs.x: there is a parameter"):
        trainer(knobs={"x": FUSED}, parameters={"x": {"type": "bool", "default": True}})
