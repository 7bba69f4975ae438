"""Measures which seeded faults the fast test suite catches.

    python -m tests.seeded_faults.run --report FILE.json [--only NAME] [--tests ARGS...]

Each fault is applied to a temporary copy of the tracked files. The tests run there from the folder
that mirrors the changed module outwards, and stop at the first failure. A report that exists is
continued: faults that it has are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.seeded_faults.faults import FAULTS
from tests.seeded_faults.seeding import ROOT, Change, FaultInapplicableError, changed

MARKERS: Final = "not slow and not nightly and not gpu and not slurm"
# A fault that is applied cannot be applied again: that is what the ignored test would find.
IGNORED: Final = "--ignore=tests/test_seeded_faults.py"
PYTEST: Final = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", IGNORED, "-m", MARKERS)
BASELINE: Final = "baseline"
"""Names the run without a fault; unless that run is `missed`, the other results mean nothing."""
LIMIT_S: Final = 3600.0
"""Seconds of one pytest run, after which the fault counts as caught: it made a test hang."""
END_WITHIN_S: Final = 30.0
"""Seconds that an interrupted pytest may take to end."""
NO_TESTS: Final = 5
"""Exit code of pytest when it collects no test."""
PASSED: Final = (0, NO_TESTS)


@contextmanager
def copied(change: Change | None) -> Iterator[Path]:
    """A temporary copy of the tracked files with the change in it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    with tempfile.TemporaryDirectory(prefix="seeded-fault-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve()
        for name in listed.stdout.decode().split("\0"):
            if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        if change is not None:
            (copy / change.path).write_text(change.text)
        yield copy


def stages(path: Path, copy: Path) -> Iterator[list[str]]:
    """Arguments of pytest, one run after another: files named after the module, nearest folders."""
    own = sorted((copy / "tests" / path.parts[0]).rglob(f"test_{path.stem}*.py"))
    done = [str(file.relative_to(copy)) for file in own]
    if done:
        yield list(done)
    for folder in (Path("tests") / parent for parent in path.parents):
        if (copy / folder).is_dir():
            yield [str(folder), *(f"--ignore={earlier}" for earlier in done)]
            done.append(str(folder))


def _python(copy: Path, *arguments: str) -> tuple[int, str]:
    """Runs the interpreter in the copy; its exit code and what it printed."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # the tests end what they have started
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_WITHIN_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def measured(name: str, change: Change | None, tests: list[str]) -> dict[str, Any]:
    """Runs the tests against a fault; an entry of the report."""
    started = time.monotonic()
    path = Path("none.py") if change is None else change.path
    result, test = "missed", ""
    with copied(change) as copy:
        _, imported = _python(copy, "-c", "import layout_tuner; print(layout_tuner.__file__)")
        if not Path(imported.strip()).is_relative_to(copy):
            raise SystemExit(f"the copy {copy} is not what is imported: {imported}")
        _say(f"{name} in {path}: testing {imported.strip()}")
        for arguments in [tests] if tests else stages(path, copy):
            try:
                code, output = _python(copy, *PYTEST, *arguments)
            except subprocess.TimeoutExpired:
                result, test = "caught", f"no end within {LIMIT_S:g} s of {arguments[0]}"
                break
            if code not in PASSED:
                result, test = _verdict(code, output)
                break
    seconds = round(time.monotonic() - started, 1)
    return {"name": name, "module": str(path), "result": result, "test": test, "seconds": seconds}


def _verdict(code: int, output: str) -> tuple[str, str]:
    """The result and the first failed test; the id of a module alone is an error at collection."""
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    test = found[1] if found else " ".join(output.split())[-500:]
    return ("caught" if code == 1 and "::" in test else "not applicable"), test


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _changes(names: list[str]) -> dict[str, Change | None]:
    """The faults of these names, applied; ends the process where one is not applicable."""
    changes: dict[str, Change | None] = {BASELINE: None} if BASELINE in names else {}
    problems = []
    for fault in FAULTS:
        if fault.name in names:
            try:
                changes[fault.name] = changed(fault)
            except FaultInapplicableError as error:
                problems.append(str(error))
    if problems:
        raise SystemExit("\n".join(problems))
    return changes


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.seeded_faults.run", description=__doc__)
    parser.add_argument("--only", action="append", help=f"a fault's name, or {BASELINE}")
    parser.add_argument("--tests", nargs="*", help="paths of tests to run instead of all")
    parser.add_argument("--report", type=Path, help="JSON file that the results are added to")
    given = parser.parse_args()
    known = [fault.name for fault in FAULTS]
    names = given.only or known
    if unknown := sorted({*names} - {BASELINE, *known}):
        parser.error(f"unknown faults: {', '.join(unknown)}")
    changes = _changes(names)
    report: Path | None = given.report
    results = json.loads(report.read_text()) if report is not None and report.exists() else []
    measured_before = {entry["name"] for entry in results}
    left = {name: change for name, change in changes.items() if name not in measured_before}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    for name, change in left.items():
        entry = measured(name, change, given.tests or [])
        results.append(entry)
        _say(f"{name}: {entry['result']} in {entry['seconds']} s {entry['test']}")
        if report is not None:
            _write(report, results)
    counts = Counter(entry["result"] for entry in results)
    _say(", ".join(f"{number} {result}" for result, number in counts.items()) or "nothing to do")


def _write(report: Path, results: list[dict[str, Any]]) -> None:
    """Replaces the report in one step, so that an interrupted run leaves a whole one."""
    part = report.with_name(f"{report.name}.part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(report)


if __name__ == "__main__":
    main()
