"""job.json and variables LAYOUT_*: what we export is read back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.found_jobs.completed_job import CompletedJob, completed
from layout_tuner.trainers.found_jobs.found_job import Findings, FoundJob, JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.knob_settings import settings_in_effect
from layout_tuner.trainers.found_jobs.own_scripts.our_exports import note_environment
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.placeholders import environment_values
from tests.exports.exported_files import exported_texts
from tests.exports.legal_jobs import legal_jobs, legal_jobs_with_settings

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def read(document: Any, name: str = "job.json") -> FoundJob:
    text = document if isinstance(document, str) else json.dumps(document)
    return read_job(JobFile(name=name, text=text))


def with_compile(job: TrainerJob) -> Layout:
    """The layout with the job's switch as the knob that is the same."""
    knobs = {**job.layout.job, **({"compile": True} if job.compile else {})}
    return replace(job.layout, job=settings_in_effect(knobs, EMBEDDED.knobs, job.layout, job.model))


@RANDOM
@given(job=legal_jobs_with_settings("embedded"))
def test_an_exported_job_is_read_back(job: TrainerJob) -> None:
    found = completed(read(exported_texts("embedded", job)["job.json"]))
    assert found.model == job.model
    assert found.layout == with_compile(job)
    assert found.found.not_understood == ()
    assert found.found.trainer == "embedded"


@RANDOM
@given(job=legal_jobs("command"), knobs=st.dictionaries(st.sampled_from("abc"), st.booleans()))
def test_the_environment_of_an_export_is_read_back(job: TrainerJob, knobs: dict[str, bool]) -> None:
    job = replace(job, layout=replace(job.layout, job=JobSettings(knobs)))
    findings = Findings()
    note_environment(findings, environment_values(job))
    found = completed(findings.job(file="command.sh", format="command", trainer="command"))
    assert found.model == job.model
    assert found.layout == job.layout


JOB = {
    "format": "layout-tuner/trainer",
    "version": 1,
    "model": model_preset("tiny-llama").to_mapping(),
    "layout": Layout(dp=2, zero_stage=1).to_mapping(),
    "seed": 0,
    "steps": 100,
    "warmup": 2,
    "compile": False,
}


def job(**changes: Any) -> CompletedJob:
    return completed(read({**JOB, **changes}))


def test_the_job_of_a_file_is_read() -> None:
    assert job().layout == Layout(dp=2, zero_stage=1)
    assert job(compile=True).layout.job == {"compile": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "the version of the job is 2, not 1"),
        ({"layout": {"dp": "two"}}, "dp='two'"),
        ({"layout": {"dp": 2, "tp": 0}}, "tp=0"),
        ({"model": {"name": "m"}}, "does not state the shape"),
        ({"model": {**JOB["model"], "num_layers": 1.5}}, "num_layers"),  # type: ignore[dict-item]
        ({"compile": "maybe"}, "compile"),
    ],
)
def test_a_wrong_job_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobFileInvalidError, match=words) as error:
        job(**changes)
    assert "\n" not in str(error.value)


def test_fields_of_other_versions_are_named() -> None:
    found = read({**JOB, "layout": {"dp": 2, "new_degree": 4}, "speed": "fast"})
    said = [each.said for each in found.not_understood]
    assert said == ["layout.new_degree: 4", 'speed: "fast"']
