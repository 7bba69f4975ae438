"""Whatever job an adapter does not refuse first, its trainer's own builder accepts."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from layout_tuner.trainers.adapter import TrainerJob
from tests.exports.conftest import FOR_THE_READER
from tests.exports.exported_files import ENVIRONMENTS, READERS, written_job
from tests.exports.legal_jobs import legal_jobs
from tests.exports.trainer_environments import (
    NEWEST,
    PYTHON,
    Ask,
    NewestUnavailableError,
    newest,
    pinned,
    reading,
)

pytestmark = [pytest.mark.exports, pytest.mark.timeout(600)]

FORMATS = [name for name in READERS if name != "torchtitan-main"]
JOBS = 200

NEWEST_READERS = {
    "deepspeed": READERS["deepspeed"][1],
    "accelerate": READERS["accelerate"][1],
    "nanotron": READERS["nanotron"][1],
    "torchtitan-0.3": READERS["torchtitan-0.3"][1],
    "axonn": READERS["axonn"][1],
    "megatron-lm": "read_megatron_training.py",  # the whole program, which the pinned one lacks
    "megatron-bridge": READERS["megatron-bridge"][1],
}
"""By format, what reads it with the newest release of its trainer."""
LATER_THAN_PINNED = {
    "megatron-core": ("Gated delta net does not support context parallel for now",)
}
"""By environment, refusals of the pinned release that the adapters' target version has not; their
notes say since when."""
READ_BY_OLDER_PYTHON = ("megatron-core",)
"""Environments whose readers put in what an older Python lacks."""


def differences_over_random_jobs(
    name: str, folder: Path, ask: Ask, *others: Ask, known: Sequence[str] = ()
) -> Counter[str]:
    """Asks for random jobs of a format, the same ones in each run, which must all be accepted.

    Returns how many answers of the others differ, by the field that differs. Few are refused by
    one of the known texts.
    """
    asked, different = 0, Counter[str]()

    @settings(
        max_examples=JOBS,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(legal_jobs(name))
    def accepts(job: TrainerJob) -> None:
        nonlocal asked
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        file = written_job(target, name, job)
        answer = ask(file, job.layout.num_devices)
        if any(text in answer.get("refused", "") for text in known):
            return
        assert not {"refused", "failed"} & set(answer), (answer, job.layout.key, job.model)
        for other in others:
            beside = other(file, job.layout.num_devices)
            different.update(key for key in set(answer) & set(beside) if answer[key] != beside[key])
            different.update(set(beside) & {"refused"})
        asked += 1

    accepts()
    assert asked >= JOBS - (JOBS // 20 if known else 0)
    return different


@pytest.mark.parametrize("name", FORMATS)
def test_the_pinned_release_accepts_what_is_not_refused_first(name: str, tmp_path: Path) -> None:
    environment = ENVIRONMENTS.get(name, name)
    known = LATER_THAN_PINNED.get(environment, ())
    with reading(environment, READERS[name][1]) as ask:
        differences_over_random_jobs(name, tmp_path, ask, known=known)


@pytest.mark.parametrize("name", NEWEST_READERS)
def test_the_newest_release_accepts_what_is_not_refused_first(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    environment = ENVIRONMENTS.get(name, name)
    package, ours = pinned(environment)
    try:
        found, is_for_newer_python = newest(environment)
    except NewestUnavailableError as error:
        pytest.skip(f"{package}: {error}; the pinned release {ours} was read")
    record_property(FOR_THE_READER, f"{name}: newest {package} is {found}, pinned {ours}")
    if found == ours:
        return
    if is_for_newer_python and environment not in READ_BY_OLDER_PYTHON:
        pytest.skip(f"{package} {found} needs a newer Python than {PYTHON}")
    reader = NEWEST_READERS[name]
    with (
        reading(f"{environment}{NEWEST}", reader) as ask,
        reading(environment, READERS[name][1]) as ask_pinned,
    ):
        different = differences_over_random_jobs(name, tmp_path, ask, ask_pinned)
    fields = ", ".join(f"{field} ({count})" for field, count in different.items()) or "none"
    record_property(FOR_THE_READER, f"{name}: of {JOBS} answers differ: {fields}")
