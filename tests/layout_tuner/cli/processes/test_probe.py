"""`layout-tuner probe`: what it prints, with trainers too, and of a model of a hostile name.

The command that a trial's page shows is read by the command line that it is for.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.api.report.probe_command import MODEL_FILE, probe_command
from layout_tuner.cli.processes.worker import probe, probe_document, probe_text, worker
from layout_tuner.documents.json_and_yaml import described
from layout_tuner.protocol.measurement import Iteration
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.cluster_presets import (
    CLUSTER_PRESETS,
    LOCAL_CPU,
    resolve_cluster,
)
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.layouts.stated_layout import stated_layout
from layout_tuner.search_spaces.models.model_presets import (
    MODEL_PRESETS,
    model_preset,
    resolve_model,
)
from tests.kit.api import ends
from tests.kit.campaigns import spec_of
from tests.kit.python_process import ROOT, run_python
from tests.kit.store import completed, make_iterations

REQUEST = ProbeRequest(model=model_preset("tiny"), layout=Layout(tp=2))


def test_a_report_says_where_a_step_went_and_whether_the_probe_was_compiled() -> None:
    text = probe_text(REQUEST, completed())
    where = "compute 50.0%, tp 20.0%, pp 10.0%, dp 10.0%, optimizer 6.2%, unexplained 3.8%"
    assert where in text
    assert "compiled" not in text
    assert "of a step" not in probe_text(REQUEST, completed(breakdown=None))
    document = probe_document(REQUEST, completed())
    assert document["breakdown"]["compute_s"] == 0.064
    assert document["compile"] is False
    compiled = replace(REQUEST, compile=True)
    assert probe_document(compiled, completed())["compile"] is True
    assert ", compiled, on 2 devices" in probe_text(compiled, completed())


def skipping(number: int) -> tuple[Iteration, ...]:
    """Iterations of which the first ones overflowed."""
    iterations = make_iterations(0.5)
    return tuple(replace(it, grad_norm=None) if it.index < number else it for it in iterations)


def test_a_report_names_what_makes_a_figure_doubtful() -> None:
    plain = probe_text(REQUEST, completed())
    for word in ("unsettled", "skipped", "oversubscribed"):
        assert word not in plain
    doubtful = completed(warmup_settled=False, iterations=skipping(3), oversubscribed=True)
    text = probe_text(REQUEST, doubtful)
    for sentence in (
        "unsettled: step times still changed when timing began",
        "3 steps were skipped: their gradients overflowed",
        "oversubscribed: ranks shared devices",
    ):
        assert sentence in text
    one = probe_text(REQUEST, completed(iterations=skipping(1)))
    assert "1 step was skipped: its gradients overflowed" in one


FILE = """
trainers:
  - name: mine
    version: "2"
    command: ["{python}", "{trainers_directory}/train.py", "{steps}", "{rate}"]
    parameters:
      rate: {type: float, minimum: 0, maximum: 1}
"""
OTHER = """
  - {name: other, version: "1", command: ["true"]}
"""
PROGRAM = """
import sys, time
from layout_tuner import report_step
for _ in range(int(sys.argv[1])):
    time.sleep(0.1)
    report_step(step_time_s=0.1, loss=float(sys.argv[2]))
"""
"""It only says that it trained: slowly enough for any core, or it would be refused."""


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    path = tmp_path / "trainers.yaml"
    path.write_text(FILE)
    (tmp_path / "train.py").write_text(PROGRAM)
    return path


def run(*arguments: str) -> Result:
    layout = ("--model", "tiny", "--num-microbatches", "1", "--steps", "3", "--json")
    return CliRunner().invoke(probe, [*layout, *arguments])


@pytest.mark.ranks
def test_a_probe_runs_the_only_trainer_of_a_file(trainers: Path) -> None:
    ended = ends(run("--trainers", str(trainers), "--parameter", "rate=0.5"), 0)
    printed = json.loads(ended.stdout)
    assert printed["trainer"] == "mine"
    assert printed["trainer_version"] == "2"
    assert printed["tokens"] == "assumed"
    assert printed["losses"][0] == 0.5


@pytest.mark.parametrize(
    ("more", "arguments", "why"),
    [
        (OTHER, (), "--trainers has 2 trainers; name one with --trainer: embedded, mine, other"),
        ("", ("--trainer", "min"), "--trainer=min is not one of embedded, mine"),
        ("", ("--parameter", "rate"), "--parameter=rate is not NAME=VALUE"),
        ("", ("--parameter", "=1"), "--parameter==1 is not NAME=VALUE"),
        ("    speed: 3", (), "trainers.mine: unknown field of a trainer 'speed'"),
        ("  - 5", (), "trainers.1: "),
        (": : :", (), "trainers.yaml"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    trainers: Path, more: str, arguments: tuple[str, ...], why: str
) -> None:
    trainers.write_text(FILE.rstrip() + "\n" + more.strip("\n") + "\n")
    ended = ends(run("--trainers", str(trainers), *arguments), 2, why)
    assert "Traceback" not in ended.output


def test_a_trainer_without_a_file_is_not_known() -> None:
    ends(run("--trainer", "mine"), 2, "--trainers FILE describes others")


def test_a_worker_does_not_start_without_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 43)
    ended = CliRunner().invoke(
        worker,
        [
            *("--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token")),
            *("--cluster", "local-cpu", "--trainers", str(tmp_path / "missing.yaml")),
        ],
    )
    ends(ended, 2, "missing.yaml: cannot be read")


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
        "import sys; from layout_tuner.cli.main import main; main(sys.argv[1:])",
        *("probe", "--model", str(folder / "model.json"), *words),
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
        WATCHED_LOG=str(log),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_hostile_name_opens_connects_and_starts_nothing(tmp_path: Path) -> None:
    """The one text that a campaign's file brings to a real probe.

    Python's audit hooks record for every process of the probe which files it opens, where it
    connects, and what it starts.
    """
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


LOCAL, _warning = resolve_cluster(LOCAL_CPU)
TINY = MODEL_PRESETS["tiny"].to_mapping()


def spec(**changes: Any) -> CampaignSpec:
    return spec_of(**{"cluster": LOCAL_CPU, **changes})


def options_of(line: str) -> dict[str, Any]:
    words = shlex.split(line)
    assert words[:2] == ["layout-tuner", "probe"]
    return probe.make_context("probe", words[2:]).params


layouts = st.builds(
    Layout,
    **{
        name: st.integers(1, 64) if knob.is_count else st.sampled_from(knob.choices)
        for name, knob in KNOBS.items()
        if name != "num_nodes"
    },
)


@given(layouts)
def test_the_command_line_reads_the_same_layout(layout: Layout) -> None:
    command = probe_command(spec(), layout)
    given = options_of(command.line)
    knobs = {name: given[name] for name in (*KNOBS, "global_batch_size") if name != "num_nodes"}
    # Under any cluster: the default precision depends on it.
    for cluster in (LOCAL, CLUSTER_PRESETS["frontier"]):
        assert stated_layout(knobs, precision=cluster.default_precision) == layout
    assert resolve_model(described(given["model"])).to_mapping() == TINY


def test_settings_of_the_probe_are_in_it_and_the_limit_where_memory_ran_out() -> None:
    changed = spec(
        seed=7,
        probe={"warmup": 3, "iterations": 20, "deadline_s": 60.0, "compile": True},
        cluster={"preset": "frontier", "device_memory_bytes": 123_456_789_013},
    )
    given = options_of(probe_command(changed, Layout(tp=2)).line)
    wanted = {"seed": 7, "warmup": 3, "steps": 20, "deadline": 60.0, "compiled": True}
    wanted |= {"cluster": "frontier", "memory_limit_gb": None}
    assert {name: given[name] for name in wanted} == wanted
    limited = options_of(probe_command(changed, Layout(tp=2), is_limited=True).line)
    assert limited["memory_limit_gb"] * (1 << 30) == 123_456_789_013, "to the byte"


def test_a_model_of_no_preset_is_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**TINY, "name": "; rm -rf / #", "num_layers": 6}
    command = probe_command(spec(model=own), Layout())
    assert command.model == own
    assert "rm -rf" not in command.line
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL_FILE).write_text(yaml.safe_dump(command.model))
    given = options_of(command.line)
    assert resolve_model(described(given["model"])).to_mapping() == own


def test_a_layout_over_several_nodes_has_no_command() -> None:
    assert probe_command(spec(), Layout(num_nodes=2, tp=8, dp=2)) is None
