"""Job knobs that are read from options, keys and variables as adapters write them."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.found_jobs.found_job import Findings, Stated, TextPlace
from layout_tuner.trainers.found_jobs.knob_settings import (
    TrainerDefaults,
    note_settings,
    settings_in_effect,
)
from layout_tuner.trainers.knobs.deepspeed import DEEPSPEED_KNOBS
from layout_tuner.trainers.knobs.megatron import MEGATRON_LM_KNOBS
from layout_tuner.trainers.trainer_knob import TrainerKnob

OF_DEEPSPEED = TrainerDefaults(
    of_trainer={"zero_optimization.contiguous_gradients": True},
    of_knobs={"zero_optimization.overlap_comm": True},
)


def keys(**values: Any) -> dict[str, Stated]:
    named = {f"zero_optimization.{name}": value for name, value in values.items()}
    return {name: Stated(value=value, said=f"{name}: {value}") for name, value in named.items()}


def read(stated: dict[str, Stated]) -> Findings:
    findings = Findings()
    note_settings(findings, DEEPSPEED_KNOBS, stated, OF_DEEPSPEED, trainer="DeepSpeed")
    return findings


@pytest.mark.parametrize("knob", DEEPSPEED_KNOBS, ids=lambda each: each.knob.name)
def test_keys_that_are_written_for_a_value_are_read_as_it(knob: TrainerKnob) -> None:
    for value in knob.knob.values:
        writing = knob.writing(value)
        assert writing is not None
        stated = {name: Stated(value=each, said=name) for name, each in dict(writing.keys).items()}
        stated.setdefault("zero_optimization.overlap_comm", Stated(value=True, said=""))
        findings = read(stated)
        is_default = knob.knob.is_default(value)
        assert findings.value(f"job.{knob.knob.name}") == (None if is_default else value)
        assert not findings.not_understood


def test_a_number_counts_in_every_spelling_and_null_is_not_stated() -> None:
    assert read(keys(reduce_bucket_size=1e8)).value("job.reduce_bucket_millions") == 100
    assert read(keys(reduce_bucket_size=5e8)).value("job.reduce_bucket_millions") is None
    findings = read(keys(reduce_bucket_size=None))
    assert "job.reduce_bucket_millions" not in findings.read
    assert not findings.not_understood


def test_a_value_that_no_knob_has_is_open_and_what_is_absent_is_the_trainer_s() -> None:
    findings = read(keys(reduce_bucket_size=123_456, overlap_comm=True))
    (missed,) = findings.not_understood
    assert missed.field == "job.reduce_bucket_millions"
    assert missed.said == "zero_optimization.reduce_bucket_size: 123456"
    found = read({}).assumed["job.overlap_comm"]
    assert (found.value, found.why) == (
        False,
        "DeepSpeed's default without zero_optimization.overlap_comm",
    )


def test_a_value_that_is_not_known_leaves_its_knob_open() -> None:
    bucket = Stated(value=None, said="--ddp-bucket-size $B", line=7, unknown="$B is not assigned")
    findings = Findings()
    note_settings(
        findings,
        MEGATRON_LM_KNOBS,
        {"--ddp-bucket-size": bucket},
        TrainerDefaults(),
        trainer="Megatron-LM",
    )
    (missed,) = [each for each in findings.not_understood if each.field == "job.bucket_millions"]
    assert (missed.said, missed.why, missed.line) == (bucket.said, bucket.unknown, 7)


def test_one_option_gives_the_place_of_its_value() -> None:
    place = TextPlace(line=2, start=30, end=39)
    option = Stated(value=("80000000",), said="--ddp-bucket-size 80000000", place=place)
    findings = Findings()
    note_settings(
        findings,
        MEGATRON_LM_KNOBS,
        {"--ddp-bucket-size": option},
        TrainerDefaults(),
        trainer="Megatron-LM",
    )
    found = findings.read["job.bucket_millions"]
    assert (found.value, found.place) == (80, place)


def test_settings_without_effect_are_left_out_and_those_that_need_them() -> None:
    stated = JobSettings({"ep_overlap": True, "delay_wgrad": True, "cuda_graphs": "attn"})
    model = model_preset("tiny-moe")
    layout = Layout(dp=4, ep=4, precision="bf16")
    assert settings_in_effect(stated, MEGATRON_LM_KNOBS, layout, model) == stated
    alone = settings_in_effect(stated, MEGATRON_LM_KNOBS, Layout(dp=4, precision="bf16"), model)
    assert alone == JobSettings({"cuda_graphs": "attn"})
