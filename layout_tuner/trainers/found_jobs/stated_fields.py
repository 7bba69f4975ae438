"""Fields of a job that the user states beside its file, as `FIELD=VALUE`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from layout_tuner.documents.numbers import core_value
from layout_tuner.documents.reading import nearest, shown, whole_number_problem
from layout_tuner.search_spaces.layouts.job_settings import job_name_problem, job_value_problem
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.found_jobs.found_job import BATCH_FIELDS, JOB, MODEL, JobFileInvalidError

_OF_MODEL: Final = tuple(f"{MODEL}{each.name}" for each in fields(ModelShape))
STATED_FIELDS: Final = (*LAYOUT_FIELDS, *BATCH_FIELDS, *_OF_MODEL)
"""The fields that may be stated, beside job knobs (`job.NAME`)."""


def read_stated(texts: Iterable[str]) -> dict[str, Any]:
    """Values by field; JobFileInvalidError for an unknown field, or a value it cannot have."""
    stated: dict[str, Any] = {}
    for text in texts:
        name, equals, word = text.partition("=")
        if not equals or not word:
            raise JobFileInvalidError(
                f"{shown(text)} is not FIELD=VALUE, such as recompute=full or model.vocab_size=128256"
            )
        value = core_value(word)
        if (problem := _problem(name, value)) is not None:
            raise JobFileInvalidError(f"{name}: {problem}" if name in STATED_FIELDS else problem)
        if stated.get(name, value) != value:
            raise JobFileInvalidError(f"{name} is stated twice, with different values")
        stated[name] = value
    return stated


def _problem(name: str, value: Any) -> str | None:
    if name in KNOBS:
        return KNOBS[name].problem(value)
    if name in BATCH_FIELDS:
        return whole_number_problem(value)
    if name.startswith(JOB):
        return job_name_problem(name.removeprefix(JOB)) or job_value_problem(value)
    if name in STATED_FIELDS:
        return None  # the shape judges them together
    return f"unknown field {shown(name)}{nearest(name, STATED_FIELDS)}"
