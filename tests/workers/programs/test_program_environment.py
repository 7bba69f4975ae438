"""What a program gets from its worker: words, variables, files, devices and cores."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.parameters import Parameter
from layout_tuner.trainers.trainer_knob import TrainerKnob, Writing
from layout_tuner.workers.launchers.local import LocalNodes
from tests.kit.python_process import ROOT
from tests.workers.programs.programs import MODEL, python_trainer, run

pytestmark = pytest.mark.ranks

TELL = """
import json
document = {"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(),
            "python": sys.executable, "cores": sorted(os.sched_getaffinity(0)),
            "fds": sorted(os.listdir("/proc/self/fd")), "path": sys.path}
if "values.json" in str(sys.argv): document["values"] = json.load(open(sys.argv[-1]))
json.dump(document, open("%s/rank%d" % (os.environ["WHERE"], RANK), "w"))
meet()  # the probe ends when one of the ranks has trained
train()
"""


def told(nodes: LocalNodes, tmp_path: Path, *words: str, **fields: Any) -> dict[int, Any]:
    """What each process of a program sees."""
    changes = fields.pop("changes", {})
    environment = {"WHERE": str(tmp_path), **fields.pop("environment", {})}
    trainer = python_trainer(TELL, *words, environment=environment, **fields)
    outcome = run(nodes, trainer, **changes)
    assert outcome.state == "completed", outcome
    return {int(path.name[4:]): json.loads(path.read_text()) for path in tmp_path.glob("rank*")}


@pytest.fixture(scope="module")
def two_ranks(
    nodes: LocalNodes, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    words = ("{rank}", "{local_rank}/{local_world_size}", "{world_size}")
    return told(nodes, tmp_path_factory.mktemp("ranks"), *words)


def test_a_program_gets_its_rank_as_torchrun_gives_it(two_ranks: dict[int, Any]) -> None:
    assert sorted(two_ranks) == [0, 1]
    for number, rank in two_ranks.items():
        expected = {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(number)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
            **dict.fromkeys(("GROUP_RANK", "NODE_RANK"), "0"),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        assert {name: rank["environment"][name] for name in expected} == expected
    assert len({rank["environment"]["MASTER_PORT"] for rank in two_ranks.values()}) == 1


def test_a_program_gets_its_rank_in_its_words(two_ranks: dict[int, Any]) -> None:
    words = {number: rank["argv"] for number, rank in two_ranks.items()}
    assert words == {number: [str(number), f"{number}/2", "2"] for number in (0, 1)}


def test_a_program_gets_no_file_of_its_worker(two_ranks: dict[int, Any]) -> None:
    assert {fd for rank in two_ranks.values() for fd in rank["fds"]} <= {"0", "1", "2", "3", "4"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks share the only core")
def test_ranks_of_a_program_have_cores_of_their_own(two_ranks: dict[int, Any]) -> None:
    cores = [rank["cores"] for rank in two_ranks.values()]
    assert set(cores[0]).isdisjoint(cores[1])


def test_errors_of_the_system_are_in_english_and_other_words_as_they_were(
    nodes: LocalNodes, tmp_path: Path
) -> None:
    changes = {"layout": Layout()}
    (rank,) = told(nodes, tmp_path, changes=changes).values()
    environment = rank["environment"]
    assert environment["LC_MESSAGES"] == "C"
    assert "LC_ALL" not in environment, "it would outrank LC_MESSAGES"
    assert environment["LANG"] == "C.utf8", "the LC_ALL of the ranks"
    own = {"LC_ALL": "POSIX"}
    (rank,) = told(nodes, tmp_path, changes=changes, environment=own).values()
    assert rank["environment"]["LC_ALL"] == "POSIX", "the entry has the last word"


def test_a_program_gets_no_secret_and_one_file_of_ours(nodes: LocalNodes, tmp_path: Path) -> None:
    (rank,) = told(nodes, tmp_path, changes={"layout": Layout()}).values()
    assert "a-secret-of-the-worker" not in json.dumps(rank)
    assert not PRIVATE_VARIABLES & set(rank["environment"])
    first, *others = rank["environment"]["PYTHONPATH"].split(":")
    assert first == rank["cwd"]
    assert others == ["/elsewhere"]
    # An editable installation adds it behind all that the worker gives.
    own = rank["path"].index(str(ROOT)) if str(ROOT) in rank["path"] else None
    assert own is None or own > rank["path"].index("/elsewhere")
    assert not Path(first).exists()


def test_values_reach_the_program_as_parts_of_one_word(nodes: LocalNodes, tmp_path: Path) -> None:
    evil = "a b; touch /tmp/evil `id` $(id) $HOME '\" \\ {tp} * ~ é"
    (rank,) = told(
        nodes,
        tmp_path,
        "--tag={tag}",
        "{tag}",
        '{"json": {"tp": {tp}}}',
        "{hidden_size}",
        parameters={"tag": Parameter(type="text", pattern=".*")},
        environment={"TAG": "<{tag}>"},
        changes={"layout": Layout(), "parameters": {"tag": evil}},
    ).values()
    assert rank["argv"] == [
        f"--tag={evil}", evil, '{"json": {"tp": 1}}', str(MODEL.hidden_size),
    ]  # fmt: skip
    assert rank["environment"]["TAG"] == f"<{evil}>"


def test_settings_of_a_job_reach_the_program_by_every_way(
    nodes: LocalNodes, tmp_path: Path
) -> None:
    knob = JobKnob(name="chunk", kind="count", values=(8, 64), default=8)
    ways = {
        "word": TrainerKnob(knob=replace(knob, name="word"), source="here"),
        "chunk": TrainerKnob(
            knob=knob,
            source="here",
            writings=(
                Writing(
                    arguments=("--chunk={value}",),
                    keys={"loop.chunk": "{value}"},
                    environment={"CHUNK": "{{tp}}{value}"},
                ),
            ),
        ),
    }
    words = ("{word}", "{arguments}", "{values_file}")
    for settings in ({}, {"chunk": 64, "word": 9}):
        layout = Layout(job=JobSettings(settings))
        (rank,) = told(nodes, tmp_path, *words, knobs=ways, changes={"layout": layout}).values()
        word, *arguments, _ = rank["argv"]
        assert word == str(settings.get("word", 8))
        assert arguments == (["--chunk=64"] if settings else [])
        assert ("loop" in rank["values"]) == bool(settings)
        assert rank["environment"].get("CHUNK") == ("{{tp}}64" if settings else None)
    assert rank["values"]["loop"] == {"chunk": 64}
    for refused in ({"chunck": 64}, {"chunk": "many"}):
        trainer = python_trainer("train()", *words, knobs=ways)
        outcome = run(nodes, trainer, layout=Layout(job=JobSettings(refused)))
        assert outcome.reason == "unsupported", outcome
        assert next(iter(refused)) in outcome.message


@pytest.mark.parametrize(
    ("printed", "reason"), [("True", None), ("False", "unsupported"), ("perhaps", None)]
)
def test_a_setting_that_the_log_calls_dropped_is_not_measured(
    nodes: LocalNodes, printed: str, reason: str | None
) -> None:
    fused = TrainerKnob(
        knob=JobKnob(name="fused", kind="switch", values=(False, True), default=False),
        source="here",
        ran=((r"^\s*fused \.+ (?P<value>True|False)\s*$", None),),
    )
    code = f"print('  fused ............. {printed}', flush=True); train()"
    trainer = python_trainer(code, "{fused}", knobs={"fused": fused})
    layout = Layout(job=JobSettings({"fused": True}))
    outcome = run(nodes, trainer, layout=layout)
    assert outcome.reason == reason, outcome
    if reason:
        said = (
            "dropped the knob fused: true was asked for, and its log says that it runs with False"
        )
        assert said in outcome.message
    plain = run(nodes, trainer, layout=Layout())
    assert plain.state == "completed", "a probe that does not set the knob is not checked"


def test_a_path_may_not_leave_its_directory_by_a_link(nodes: LocalNodes, tmp_path: Path) -> None:
    below = tmp_path / "sets"
    (below / "inner").mkdir(parents=True)
    (below / "out").symlink_to("/etc")
    (below / "in").symlink_to("inner")
    parameters = {"data": Parameter(type="path", below=str(below))}
    trainer = python_trainer("train()", "{data}", parameters=parameters)
    for value, reason in (("in", None), ("inner/new", None), ("out/passwd", "unsupported")):
        outcome = run(nodes, trainer, layout=Layout(), parameters={"data": value})
        assert outcome.reason == reason, outcome
    assert f"data leads to /etc/passwd, which is not below {below}" in outcome.message


def test_an_entry_may_set_variables_and_a_directory(nodes: LocalNodes, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (rank,) = told(
        nodes,
        tmp_path,
        "{values_file}",
        directory=str(tmp_path),
        working_directory="{trainers_directory}/beside",
        environment={"PYTHONPATH": "/theirs:/more", "PYTHONUNBUFFERED": "", "TP": "{tp}"},
        changes={"layout": Layout()},
    ).values()
    assert rank["cwd"] == str(beside)
    copy, *theirs = rank["environment"]["PYTHONPATH"].split(":")
    assert theirs == ["/theirs", "/more"]
    assert rank["argv"] == [f"{copy}/values.json"]
    assert isinstance(rank["values"], dict)
    assert rank["environment"]["PYTHONUNBUFFERED"] == ""
    assert rank["environment"]["TP"] == "1"


def test_one_process_a_node_stands_for_all_of_its_ranks(nodes: LocalNodes, tmp_path: Path) -> None:
    code = """
assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
def rank(number):
    os.environ["RANK"] = str(number)
    train(tokens=64)
children = []
for number in range({ranks_per_node}):
    pid = os.fork()
    if pid == 0:
        kept = b"x" * (40 << 20)
        rank(number)
        time.sleep(60)
time.sleep(60)
"""
    outcome = run(nodes, python_trainer(code, processes_per="node"))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.tokens == "counted"
    assert 40 << 20 < outcome.measurement.peak_memory_bytes < 80 << 20
