"""`make gpu-check`: its wheels, its steps, its page, and the whole of it on CPU cores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.cli.command_table import NEEDS
from tests.kit.python_process import ROOT
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, marked
from tools.gpu_check.__main__ import test_counts as counts_of_tests
from tools.gpu_check.comparison import Row, comparison, problems_of
from tools.gpu_check.page import page_of
from tools.gpu_check.steps import Clock, Step, StepFailedError, StepSkippedError, run_step
from tools.gpu_check.workloads import MEANT_TO_FAIL, workloads
from tools.gpu_wheels import (
    LEFT_OUT,
    MOST_BYTES,
    PRESENT,
    WANTED,
    WheelsUnusableError,
    checked_bytes,
    closure,
)


def test_the_wheels_bring_what_up_needs_and_not_what_is_there_or_left_out() -> None:
    names = {name for name, _ in closure(WANTED)}
    assert set(NEEDS["up"].packages) <= names | PRESENT
    assert not names & (PRESENT | LEFT_OUT)
    assert {"pydantic-core", "starlette", "pytest", "scikit-learn"} <= names, "what others need"
    assert "layout-tuner" not in names


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no wheels; run `make gpu-wheels`"),
        ({"a-1.whl": 9, "a-1.tar.gz": 9}, "no wheels: a-1.tar.gz"),
        ({"a-1.whl": 1, "b-1.whl": MOST_BYTES}, "45.0 MB, more than 45; the largest is b-1.whl"),
    ],
)
def test_wheels_that_cannot_travel_are_refused(
    tmp_path: Path, files: dict[str, int], said: str
) -> None:
    for name, size in files.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    with pytest.raises(WheelsUnusableError, match=re.escape(said)):
        checked_bytes(tmp_path)


def test_wheels_of_just_the_largest_size_are_taken(tmp_path: Path) -> None:
    with (tmp_path / "a-1.whl").open("wb") as file:
        file.truncate(MOST_BYTES)
    assert checked_bytes(tmp_path) == MOST_BYTES


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_about_thirty_layouts_of_one_device_are_measured(device: Any) -> None:
    layouts = [layout for each in workloads(device, quick=False) for layout in each.layouts]
    assert len(layouts) == 30
    assert {layout.num_devices for layout in layouts} == {1}
    assert {layout.global_batch_size for layout in layouts} == {32}
    assert {1, 32} <= {layout.micro_batch_size for layout in layouts}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    assert len({layout.precision for layout in layouts}) == (3 if device == "cuda" else 2)


def row(key: str, predicted: float, measured: float | None, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "campaign": "one",
        "layout_key": key,
        "precision": "fp32",
        "micro_batch_size": 1,
        "recompute": "none",
        "predicted_step_time_s": predicted,
        "predicted_peak_bytes": 110,
        "predicted_fits": 0.9,
        "state": "COMPLETED" if measured else "INFEASIBLE",
        "step_time_s": measured,
        "peak_bytes": 100 if measured else None,
        "reason": None if measured else "out_of_memory",
    }
    return Row(**(values | changes))


def test_predictions_are_compared_by_order_and_by_size() -> None:
    rows = [row("a", 1.0, 2.0), row("b", 2.0, 4.0), row("c", 3.0, 3.0)]
    found = comparison([*rows, row("d", 9.0, None, predicted_fits=0.1), row("e", 9.0, None)])
    # Of the pairs ab, ac, bc one is in the wrong order; ranks 1 2 3 against 1 3 2.
    assert found["all"]["kendall_tau"] == pytest.approx(1 / 3)
    assert found["all"]["spearman_rho"] == pytest.approx(1 / 2)
    assert found["all"]["step_time_median_error"] == pytest.approx(0.5)
    assert found["campaigns"]["one"]["peak_memory_median_error"] == pytest.approx(0.1)
    assert (found["num_completed"], found["num_out_of_memory"]) == (3, 2)
    assert found["out_of_memory_expected"] == 1


def test_a_layout_that_failed_or_too_few_that_ran_out_of_memory_are_problems() -> None:
    done, out = row("a", 1.0, 1.0), row("b", 1.0, None)
    assert problems_of([done, out, out], meant_to_fail=MEANT_TO_FAIL) == []
    assert problems_of([done, out], meant_to_fail=2) == [
        "1 layouts ran out of memory, and 2 were meant to"
    ]
    crashed = row("c", 1.0, None, state="FAILED", reason="crashed", message="no kernel")
    assert problems_of([done, out, out, crashed], meant_to_fail=2) == [
        "one c is FAILED (crashed): no kernel"
    ]
    assert problems_of([out, out], meant_to_fail=2) == ["no layout was measured"]


def of_step(
    run: Any, *, limit_s: float = 60.0, left_s: float = 60.0, **variables: str
) -> tuple[str, str]:
    step = Step(name="one", limit_s=limit_s, run=run)
    result = run_step(step, left_s=left_s, variables=variables)
    return result.status, result.message


def test_a_step_says_how_it_ended() -> None:
    def raises(error: Exception) -> Any:
        def run(_: Clock) -> None:
            raise error

        return run

    assert of_step(lambda _: None) == ("passed", "")
    assert of_step(raises(StepFailedError("no GPU"))) == ("failed", "no GPU")
    assert of_step(raises(StepSkippedError("no compiler"))) == ("skipped", "no compiler")
    assert of_step(raises(KeyError("x"))) == ("failed", "KeyError: 'x'")
    assert of_step(lambda _: None, left_s=0.0)[0] == "cut"
    status, message = of_step(lambda clock: clock.run([sys.executable, "-c", "print(1); 1 / 0"]))
    assert status == "failed"
    assert "ZeroDivisionError" in message


HANGS = """
import signal, subprocess, sys, time
from pathlib import Path
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleep])
Path(sys.argv[1]).touch()
time.sleep(600)
"""
"""It and its child, which ignores SIGTERM, sleep."""


def test_a_program_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    mark, started = f"gpu-check-{os.getpid()}", tmp_path / "started"
    hangs = [sys.executable, "-c", HANGS, str(started)]
    ended = of_step(lambda clock: clock.run(hangs), limit_s=5.0, **{MARK: mark})
    assert ended == ("cut", f"python -c {HANGS} {started} had not ended after 5 s")
    assert started.exists(), "it had no time to start its child"
    wait_until("nothing is left of it", lambda: not marked(mark))


JUNIT = """\
<testsuites><testsuite>
<testcase name="good"/>
<testcase name="bad"><failure message="assert 1 == 2">the traceback</failure></testcase>
<testcase name="broken"><error message="no CUDA"/></testcase>
<testcase name="missing"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>
"""


def test_the_tests_of_a_report_are_counted_by_outcome(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    assert counts_of_tests(tmp_path / "tests.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": [
            {"test": "bad", "message": "assert 1 == 2"},
            {"test": "broken", "message": "no CUDA"},
        ],
    }


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags_of(report: dict[str, Any]) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page_of(report))
    return parser.tags


HOSTILE = "</table><script src=//x>1</script><img src=x onerror=1>\"' &lt;"


def report_with(text: str) -> dict[str, Any]:
    """A report in which every text of the machine, of layouts and of errors is this one."""
    rows = [row(text, 1.0, 2.0, message=text, campaign=text), row("b", 1.0, None)]
    step = {"name": "a", "status": "failed", "seconds": 1.0, "limit_s": 2.0, "message": text}
    return {
        "device": "cpu",
        "started_at": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "passed": False,
        "steps": [step],
        "machine": {"device": text, "versions": {"torch": text}, text: text},
        "calibration": {"constants": {"peak_flops_per_s": {text: 1.0}}, "warnings": [text]},
        "layouts": [each.to_mapping() for each in rows],
        "comparison": comparison(rows),
        "export": {"campaign": text, "layout_key": text},
        "training": {"tokens_per_s": 1.0, "steps": 2, "over_probe": 1.0},
        "tests": {
            **dict.fromkeys(("passed", "failed", "skipped"), 1),
            "failures": [{"test": text, "message": text}],
        },
        "bench": [{"model": text, "side": text}],
    }


def test_the_page_escapes_every_text_and_loads_nothing() -> None:
    harmless, hostile = tags_of(report_with("plain")), tags_of(report_with(HOSTILE))
    assert hostile == harmless, "a text became a tag or an attribute"
    assert len([tag for tag, _ in harmless if tag == "table"]) == 6
    for tag, attributes in harmless:
        assert tag not in ("script", "img", "link", "iframe")
        assert not {"src", "href"} & attributes.keys()
    assert "url(" not in page_of(report_with("plain"))


def test_the_page_shows_a_check_that_ended_at_its_first_step() -> None:
    full = report_with("plain")
    first = {name: full[name] for name in ("device", "started_at", "seconds", "passed", "steps")}
    assert [tag for tag, _ in tags_of(first)].count("table") == 1


def check(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_without_a_gpu_the_check_says_how_to_try_it(tmp_path: Path) -> None:
    done = check(CUDA_VISIBLE_DEVICES="", OUT=str(tmp_path / "out"))
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    (step,) = report["steps"]
    assert (step["name"], step["status"]) == ("machine", "failed")
    assert (
        "sees no GPU here; run the check where there is one, or try it with --device cpu"
        in (step["message"])
    )
    assert step["message"] in done.stdout


WITHOUT = 'import sys\nfor name in ("ray", "deephyper", "pyarrow"):\n    sys.modules[name] = None\n'
"""A `sitecustomize.py`: in every process of the check these packages are as if not installed."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the report of a quick check on a CPU, without ray, deephyper and pyarrow."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "sitecustomize.py").write_text(WITHOUT)
    out = folder / "out"
    done = check("--device=cpu", "--quick", f"--out={out}", PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def report(checked: Path) -> dict[str, Any]:
    return dict(json.loads((checked / "gpu-check.json").read_text()))


def whole_check(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.ranks(pytest.mark.timeout(300)(test)))


@whole_check
def test_each_step_passes(report: dict[str, Any]) -> None:
    assert report["passed"] is True
    assert {step["status"] for step in report["steps"]} == {"passed"}


@whole_check
def test_the_report_has_a_format_and_a_version(report: dict[str, Any]) -> None:
    assert (report["format"], report["version"]) == ("layout-tuner/gpu-check", 1)


@whole_check
def test_layouts_fail_as_they_are_meant_to(report: dict[str, Any]) -> None:
    states = [each["reason"] or each["state"] for each in report["layouts"]]
    assert sorted(states) == [*["COMPLETED"] * 3, *["out_of_memory"] * MEANT_TO_FAIL]


@whole_check
def test_each_layout_is_predicted_to_end_as_it_does(report: dict[str, Any]) -> None:
    for each in report["layouts"]:
        assert each["predicted_step_time_s"] > 0
        assert each["predicted_fits"] is not None
        assert (each["predicted_fits"] > 0.5) == (each["state"] == "COMPLETED")


@whole_check
def test_predictions_are_compared_with_measurements(report: dict[str, Any]) -> None:
    compared = report["comparison"]["all"]
    assert compared["num_compared"] == 3
    # On CPU ranks the estimate of the peak is close, by the tests of the estimates.
    assert compared["peak_memory_median_error"] < 0.05


@whole_check
def test_the_device_is_calibrated_and_trains(report: dict[str, Any]) -> None:
    assert report["calibration"]["constants"]["peak_flops_per_s"]["fp32"] > 0
    assert report["training"]["tokens_per_s"] > 0


@whole_check
def test_the_page_shows_the_report(checked: Path, report: dict[str, Any]) -> None:
    assert len(tags_of(report)) > 50
    assert (checked / "gpu-check.html").read_text() == page_of(report)
