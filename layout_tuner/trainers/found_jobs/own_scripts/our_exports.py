"""What this project writes and nobody else: job.json, and variables LAYOUT_*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Final

from layout_tuner.documents.reading import shown
from layout_tuner.search_spaces.layouts.job_settings import value_of_word
from layout_tuner.search_spaces.layouts.layout import DEGREES, LAYOUT_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.embedded import EMBEDDED, JOB_FORMAT, JOB_VERSION
from layout_tuner.trainers.found_jobs.found_job import (
    JOB,
    MODEL,
    Findings,
    FoundJob,
    JobFileInvalidError,
)
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.own_scripts.named_values import (
    Statements,
    is_on,
    miss,
    names,
    note,
    statements_of,
)
from layout_tuner.trainers.found_jobs.positioned import plain_value, root_of
from layout_tuner.trainers.placeholders import ENVIRONMENT_PREFIX, MODEL_NAME

_MODEL_FIELDS: Final = tuple(each.name for each in fields(ModelShape))
_OF_RUN: Final = names("format version seed steps warmup")


def read_config(file: JobFile) -> Sequence[FoundJob] | None:
    """The job of a job.json; None: it is another file.

    Raises:
        JobFileInvalidError: it is of another version.
    """
    root = root_of(file, ".json")
    if root is None:
        return None
    if (form := root.get("format")) is not None and form.value == JOB_FORMAT:
        version = root.get("version")
        if version is None or version.value != JOB_VERSION:
            given = "none" if version is None else version.written
            raise JobFileInvalidError(
                f"{file.name}: the version of the job is {given}, not {JOB_VERSION}; export it anew"
            )
        findings = Findings()
        _note_job(findings, Statements(statements_of(root)))
        return (findings.job(file=file.name, format="layout-tuner", trainer=EMBEDDED.name),)
    return None


def _note_job(findings: Findings, left: Statements) -> None:
    for prefix, known in (("model.", _MODEL_FIELDS), ("layout.", LAYOUT_FIELDS)):
        for name in known:
            if (each := left.take(f"{prefix}{name}")) is not None:
                field = f"{MODEL}{name}" if prefix == "model." else name
                if each.unknown:
                    miss(findings, each, each.unknown, name=field)
                else:
                    note(findings, field, each, each.value)
    for name, each in left.take_all("layout.job."):
        note(findings, f"{JOB}{name.removeprefix('layout.job.')}", each, each.value)
    compiled = left.take("compile")
    if compiled is not None and is_on(compiled) is None:
        miss(findings, compiled, "it is not a switch", name=f"{JOB}compile")
    elif is_on(compiled):
        assert compiled is not None
        note(findings, f"{JOB}compile", compiled, value=True)
    degrees = [findings.value(name) or 1 for name in DEGREES]
    if all(isinstance(each, int) for each in degrees):
        findings.assume("num_devices", prod(degrees), "the product of the degrees")
    left.list_rest(findings, _OF_RUN)


def note_environment(findings: Findings, environment: Mapping[str, str]) -> None:
    """Notes the variables LAYOUT_* of an export, where nothing else states their fields."""
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name.startswith("job_"):
            field, value = f"{JOB}{name.removeprefix('job_')}", value_of_word(text)
        elif name in LAYOUT_FIELDS:
            field, value = name, plain_value(text)
        elif name == MODEL_NAME:
            field, value = f"{MODEL}name", text
        elif name in _MODEL_FIELDS:
            is_text = name in ("family", "attention", "lacks")
            field, value = f"{MODEL}{name}", text if is_text else plain_value(text)
        else:
            continue
        if field not in findings.read:
            findings.note(field, value, f"{variable}={shown(text)[1:-1]}")
