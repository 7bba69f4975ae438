"""Follows one outcome from the rank to its row, through every process that reads or writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Service

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

HOOKS = """
import json, os
from search_spaces.protocol.outcome import Outcome

def note(what):
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode().replace("\\0", " ")
    names = {"zygote": "rank", "RayAgent": "agent", "api.cli worker": "worker", "api.cli serve": "api"}
    name = next((names[part] for part in names if part in words), words)
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.getpid()} {name} {what}\\n")

def noting(function, what, text_of):
    def noted(*arguments, **options):
        result = function(*arguments, **options)
        text = text_of(arguments, result)
        if "warmup_settled" in (text.decode(errors="replace") if isinstance(text, bytes) else text):
            note(what)
        return result
    return noted

def checked(self, check=Outcome.__post_init__):
    check(self)
    if self.measurement is not None:
        note("checks")

json.dumps = noting(json.dumps, "encodes", lambda arguments, result: result)
json.loads = noting(json.loads, "decodes", lambda arguments, result: arguments[0])
Outcome.__post_init__ = checked
"""
"""Every Python process of the service notes when it encodes, decodes or checks the measurement."""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def noting_service(tmp_path: Path, notes: Path) -> Iterator[Service]:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(HOOKS)
    service = Service(tmp_path / "data")
    service.environment |= {"PYTHONPATH": str(tmp_path / "hooks"), "NOTES": str(notes)}
    service.start()
    yield service
    service.stop()
    service.http.close()


def test_an_outcome_passes_an_agent_and_a_worker_is_encoded_thrice_and_checked_twice(
    noting_service: Service, notes: Path
) -> None:
    campaign = noting_service.submit(budget={"trials": 1})["id"]
    noting_service.wait_for_completed(campaign, 1)
    noted = [line.split() for line in notes.read_text().splitlines()]
    until_posted = [(pid, name, what) for pid, name, what in noted if name != "api"]
    assert {name for _, name, _ in until_posted} == {"rank", "agent", "worker"}
    assert len({pid for pid, _, _ in until_posted}) == 3
    encodings = Counter(name for _, name, what in until_posted if what == "encodes")
    assert encodings == {"rank": 1, "agent": 1, "worker": 1}
    checks = Counter(name for _, name, what in noted if what == "checks")
    assert checks == {"worker": 1, "api": 1}
