"""Exporters: what the files say, and that a shell and the frameworks' rules accept them."""

import json
from dataclasses import replace

import pytest

from api.exporters import FORMATS, ExportFormatUnknownError, ExportSource, export
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from workers.trainer.job.job import TrainJob

GPT, LLAMA = model_preset("tiny"), model_preset("tiny-llama")


def make_source(model: ModelShape = GPT, **layout: object) -> ExportSource:
    return ExportSource(
        campaign="wide", trial=7, job=TrainerJob(model=model, layout=Layout.from_mapping(layout))
    )


def test_the_trainer_reads_the_exported_job_and_writes_it_back() -> None:
    source = make_source(dp=2, zero_stage=1, precision="bf16")
    (file,) = export("trainer", source).files
    exported = json.loads(file.content)
    job = TrainJob.from_mapping(exported)
    assert (job.model, job.layout) == (source.job.model, source.job.layout)
    assert exported.items() <= job.to_mapping().items()
    more = {"data": {"tokens": "t.npy"}, "checkpoint": {"directory": "saved"}}
    extended = TrainJob.from_mapping({**exported, **more})
    assert TrainJob.from_mapping(extended.to_mapping()) == extended

    source = make_source(LLAMA, tp=2, dp=2, zero_stage=1, micro_batch_size=4)
    (file,) = export("trainer", source).files
    job = json.loads(file.content)
    assert file.name == "job.json"
    assert Layout.from_mapping(job["layout"]) == source.job.layout
    assert ModelShape.from_mapping(job["model"]) == LLAMA
    assert (job["seed"], job["warmup"]) == (0, 2)


def test_a_compiled_probe_is_exported_as_a_compiled_job() -> None:
    plain = make_source(LLAMA)
    source = replace(plain, job=replace(plain.job, compile=True))
    (file,) = export("trainer", source).files
    assert TrainJob.from_mapping(json.loads(file.content)).compile
    assert not any("compile" in note for note in export("megatron-lm", make_source()).notes)
    assert any("compile=true has no flag" in note for note in export("megatron-lm", source).notes)


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ExportFormatUnknownError, match=rf"'nemo'.*{', '.join(FORMATS)}"):
        export("nemo", make_source())
