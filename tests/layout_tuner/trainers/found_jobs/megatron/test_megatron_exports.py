"""Exports for Megatron-LM and Megatron-DeepSpeed, read back from their scripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob, completed
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.registry import ADAPTERS
from tests.exports.exported_files import write_export
from tests.exports.legal_jobs import legal_jobs_with_settings
from tests.layout_tuner.trainers.found_jobs.megatron import (
    test_megatron_with_deepspeed as of_deepspeed,
)

JOBS = {
    "megatron-lm": legal_jobs_with_settings("megatron-lm"),
    "megatron-deepspeed": of_deepspeed.jobs_with_settings(),
}


def read_back(trainer: str, job: TrainerJob) -> CompletedJob:
    with TemporaryDirectory() as folder:
        write_export(Path(folder), trainer, job)
        found = read_job(JobFile.open(Path(folder) / f"{trainer}.sh"))
    assert found.trainer == trainer
    assert {each.field for each in found.not_understood} <= {""}
    return completed(found)


def as_read(model: ModelShape, trainer: str, read: ModelShape) -> ModelShape:
    """The model as a script states it: without its name, and with the kernel that it asks for."""
    attention = model.attention if trainer == "megatron-lm" else read.attention
    dropout = model.attention_dropout or None
    return replace(model, name="custom", attention=attention, attention_dropout=dropout)


@pytest.mark.parametrize("trainer", JOBS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_script_and_the_files_beside_it_are_read_back(
    trainer: str, data: st.DataObject
) -> None:
    job = data.draw(JOBS[trainer])
    done = read_back(trainer, job)
    assert done.layout == job.layout
    assert done.model == as_read(job.model, trainer, done.model)


@pytest.mark.parametrize("trainer", ["megatron-lm", "megatron-bridge"])
@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_an_exported_preset_is_read_back(name: str, trainer: str) -> None:
    model = MODEL_PRESETS[name]
    layout = Layout(num_nodes=1, micro_batch_size=1, num_microbatches=1, precision="bf16")
    job = TrainerJob(model=model, layout=layout)
    refusals = ADAPTERS[trainer].refusals(job)
    assert ("qk_norm=width" in str(refusals)) == bool(refusals) == (model.qk_norm == "width")
    if not refusals:
        done = read_back(trainer, job)
        same = {"name": "custom", "lacks": "", "attention_dropout": 0.0}
        assert replace(done.model, attention_dropout=0.0) == replace(model, **same)
        assert done.layout == layout
