"""Values of job knobs, by which trials and ranked layouts are filtered and sorted.

A setting that a job leaves out has the trainer's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from layout_tuner.documents.reading import nearest
from layout_tuner.results_db.errors import TrialFilterInvalidError
from layout_tuner.results_db.trials.filter import TrialFilter, job_knob_name
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX, JobSettings

Knobs = Mapping[str, JobKnob]
"""The job knobs of a campaign by name (`StoredCampaign.job_knobs`)."""
NO_KNOBS: Final[Knobs] = MappingProxyType({})


def knob_of(name: str, knobs: Knobs) -> JobKnob:
    """The knob of a field or sort key; TrialFilterInvalidError where no job of the campaign has it.

    The name is one of which `job_knob_name` knows the knob.
    """
    knob = job_knob_name(name) or ""
    if knob not in knobs:
        has = f"; there are {', '.join(knobs)}" if knobs else "; there is none"
        raise TrialFilterInvalidError(
            f"{JOB_PREFIX}{knob} is no job knob of this campaign{nearest(knob, knobs) or has}"
        )
    return knobs[knob]


def job_number(knob: JobKnob, settings: JobSettings) -> int:
    """The value as a number to sort by: a word's place among the values; -1: there is none."""
    value = knob.value_of(settings)
    if isinstance(value, str):
        return (*knob.every_value, value).index(value)
    return -1 if value is None else int(value)


def job_condition(wanted: TrialFilter, knobs: Knobs) -> Callable[[JobSettings], bool]:
    """Whether the settings of a job meet a filter.

    Raises:
        TrialFilterInvalidError: the campaign has no such knob, or the knob no such value.
    """
    conditions = [_condition(name, stated, knobs) for name, stated in wanted.of_jobs.items()]
    return lambda settings: all(holds(settings) for holds in conditions)


def _condition(name: str, stated: Any, knobs: Knobs) -> Callable[[JobSettings], bool]:
    knob = knob_of(name, knobs)
    if name.startswith(JOB_PREFIX):
        for value in stated:
            if problem := knob.problem(value):
                raise TrialFilterInvalidError(f"{name}: {problem}")
        return lambda settings: knob.value_of(settings) in stated
    if knob.kind != "count":
        raise TrialFilterInvalidError(f"{name}: {knob.name} is a {knob.kind}, which has no bounds")
    if name.startswith("min_"):
        return lambda settings: job_number(knob, settings) >= stated
    return lambda settings: 0 <= job_number(knob, settings) <= stated
