"""The one text that a campaign's file brings to a real probe has no effect.

Python's audit hooks record for every process of the probe which files it opens, where it connects,
and what it starts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from search_spaces.spec.presets.models import resolve_model
from tests.kit.python_process import ROOT, run_python

pytestmark = pytest.mark.ranks

NAMES = {"plain": "a model", "hostile": "../../qzxjkv;$(touch qzxjkv)`id`|http://203.0.113.9/{0}%s"}

WATCH = """
import json, os, sys
_log = os.open(os.environ["WATCHED_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
_WATCHED = {"open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system",
            "os.exec", "os.posix_spawn", "exec", "compile", "import", "ctypes.dlopen", "os.mkdir", "os.rename"}
def _watch(event, args):
    if event in _WATCHED:
        said = [str(arg)[:500] for arg in args[:3]] if event not in ("exec", "import") else [str(args[0])[:200]]
        line = json.dumps({"pid": os.getpid(), "event": event, "args": said}) + chr(10)
        os.write(_log, line.encode(errors="replace"))
sys.addaudithook(_watch)
"""


def watched_probe(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a probe of a model of that name measured, and what its processes did."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WATCH)
    model = {**resolve_model("tiny").to_mapping(), "name": name}
    (folder / "model.json").write_text(json.dumps(model))
    log = folder / "events"
    words = ["--tp", "2", "--num-microbatches", "1", "--steps", "2", "--json"]
    done = run_python(
        "import sys; from api.cli import main; main(sys.argv[1:])",
        *("probe", "--model", str(folder / "model.json"), *words),
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
        WATCHED_LOG=str(log),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_a_hostile_name_opens_connects_and_starts_nothing(tmp_path: Path) -> None:
    found = {kind: watched_probe(tmp_path / kind, name) for kind, name in NAMES.items()}
    for measured, events in found.values():
        assert measured["step_times_s"]
        # Watched were the command, its zygote, and the ranks that it forked.
        assert len({event["pid"] for event in events}) >= 4
        assert any(event["event"] == "open" for event in events)
    _, events = found["hostile"]
    for event in events:
        text = " ".join(event["args"])
        for part in ("qzxjkv", "203.0.113.9"):
            assert part not in text, event
        if event["event"] in ("socket.connect", "socket.getaddrinfo"):
            assert "127.0.0.1" in text or "localhost" in text, event
    started = {
        kind: {
            event["args"][0]
            for event in events
            if event["event"] in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
        }
        for kind, (_, events) in found.items()
    }
    assert started["hostile"] == started["plain"]
    assert not list(tmp_path.rglob("qzxjkv"))
