"""One real campaign, from HTTP to a training job, with the way of each outcome to its row."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.e2e.conftest import Service, started

pytestmark = pytest.mark.ranks

NUM_TRIALS = 4
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny.yaml"
FOLDERS = ("layout_tuner", "api", "results_db", "search_spaces", "tuner", "workers")

HOOKS = """
import importlib.machinery, json, os, sys

def loading(loader, module, load=importlib.machinery.SourceFileLoader.exec_module):
    file = os.path.realpath(loader.path)
    if file.startswith(tuple(os.environ.get("SOURCES", "-").split(":"))):
        with open("/proc/self/cmdline", "rb") as words:
            ran = (words.read().decode().split("\\0-m\\0")[1:] or ["-"])[0].split("\\0")[0]
        with open(os.environ["NOTES"] + ".modules", "a") as notes:
            notes.write(f"{os.getpid()} {ran} {module.__name__} {file}\\n")
    load(loader, module)

importlib.machinery.SourceFileLoader.exec_module = loading

from layout_tuner.protocol.outcome import Outcome

def note(what):
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode().replace("\\0", " ")
    names = {"zygote": "rank", "RayAgent": "agent", "-m layout_tuner worker": "worker", "-m layout_tuner serve": "api"}
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
"""Every Python process of the service notes when it encodes, decodes or checks the measurement, and
each module of the product that it loads: its process, what `-m` started, its name, its file."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service whose processes write notes."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(HOOKS)
    service = Service(tmp_path / "data", "--launcher", "ray")
    notes = {
        "PYTHONPATH": str(tmp_path / "hooks"),
        "NOTES": str(tmp_path / "notes"),
        "SOURCES": ":".join(f"{ROOT}/{folder}/" for folder in FOLDERS),
    }
    service.environment |= notes
    with started(service):
        for name in notes:  # commands write none
            del service.environment[name]
        yield service


def assert_outcomes_are_encoded_thrice_and_checked_twice(notes: Path, number: int) -> None:
    """Each outcome passes a rank, an agent and a worker on its way to the service."""
    noted = [line.split() for line in notes.read_text().splitlines()]
    until_posted = [(pid, name, what) for pid, name, what in noted if name != "api"]
    assert {name for _, name, _ in until_posted} == {"rank", "agent", "worker"}
    assert len({pid for pid, name, _ in until_posted if name != "rank"}) == 2
    encodings = Counter(name for _, name, what in until_posted if what == "encodes")
    assert encodings == {"rank": number, "agent": number, "worker": number}
    checks = Counter(name for _, name, what in noted if what == "checks")
    assert checks == {"worker": number, "api": number}


def assert_every_module_has_one_name(notes: Path) -> None:
    """In `up`, service, driver, worker, agent and ranks; as the program that -m ran, too."""
    noted = [line.split() for line in notes.read_text().splitlines()]
    # Alembic runs its environment and the migrations as scripts, by their paths.
    scripts = ("migrations/env.py", "migrations/versions/")
    noted = [each for each in noted if not any(script in each[3] for script in scripts)]
    names: dict[str, set[str]] = {}
    for pid, ran, name, file in noted:
        assert name.split(".")[0] == "layout_tuner", (pid, ran, name)
        assert name != ran or ran == "layout_tuner", (
            f"process {pid} ran {ran} as a program and loaded it as a module"
        )
        names.setdefault(file, set()).add(name)
    assert all(len(each) == 1 for each in names.values())
    loaded = {name for each in names.values() for name in each}
    started = {ran for _, ran, _, _ in noted}
    assert "layout_tuner.workers.ranks.zygote" in started, "a rank's parent noted what it loads"
    for folder in ("api.app", "tuner.driver.driver", "workers.trainer.probe.probe"):
        assert f"layout_tuner.{folder}" in loaded


@pytest.mark.timeout(280)
def test_a_campaign_goes_from_http_to_a_training_job(service: Service, tmp_path: Path) -> None:
    # All sixteen trials of it run in the tests of the tutorial.
    spec = tmp_path / "tiny.yaml"
    spec.write_text(TINY.read_text().replace("trials: 16", f"trials: {NUM_TRIALS}"))
    service.done("campaign", "submit", str(spec), "--json")
    service.done("campaign", "watch", "tiny")

    campaign = service.get("/campaigns/tiny")
    assert (campaign["state"], campaign["reason"]) == ("COMPLETED", "budget")
    completed = service.trials("tiny", state="COMPLETED")
    assert len(completed) == NUM_TRIALS, service.logs()
    assert_outcomes_are_encoded_thrice_and_checked_twice(tmp_path / "notes", NUM_TRIALS)
    assert_every_module_has_one_name(tmp_path / "notes.modules")

    board = service.get("/campaigns/tiny/leaderboard")["trials"]
    figures = [trial["value"] for trial in board]
    assert figures == sorted(figures, reverse=True)
    assert len(board) == len({trial["layout_key"] for trial in completed}), "repeats count together"
    # How far a guided search goes in four trials follows the machine; one layout is too few.
    assert len(board) > 1
    best = service.get(f"/trials/{board[0]['id']}")
    kinds = [i["kind"] for i in best["iterations"]]
    assert kinds == ["warmup"] * max(2, len(kinds) - 10) + ["timed"] * 10
    assert best["environment"]["torch_version"]

    service.done("export", "tiny", "--format", "trainer", "--out", str(tmp_path / "job"))
    job = tmp_path / "job" / "job.json"
    written = Layout.from_mapping(json.loads(job.read_text())["layout"])
    assert written == Layout.from_mapping(board[0]["layout"])
    result = json.loads(service.done("train", "--config", str(job), "--steps", "20", "--json"))
    assert result["steps"] == 20
    assert result["final_loss"] < best["iterations"][0]["loss"]
    assert result["tokens_per_s"] > 0
