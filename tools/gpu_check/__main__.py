"""Runs the product on one device and writes `gpu-check.json` and `gpu-check.html`.

`make gpu-check` runs it on a machine with one GPU; `--device cpu` tries it anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from layout_tuner.protocol.connection.data_home import PRIVATE_UMASK
from tools.gpu_check.page import page_of
from tools.gpu_check.service import run_campaigns, train
from tools.gpu_check.steps import (
    Clock,
    Step,
    StepFailedError,
    StepResult,
    StepSkippedError,
    layout_tuner,
    run_step,
)
from tools.gpu_check.workloads import CLUSTER, DeviceKind, memory_limit_bytes, workloads

FORMAT: Final = "layout-tuner/gpu-check"
VERSION: Final = 1
MOST_S: Final = 440.0
"""Of all steps; with the installation that is within eight minutes."""
ROOT: Final = Path(__file__).resolve().parents[2]

_ABOUT_DEVICE: Final = """
import json, platform, sys
from importlib import metadata
import torch
found = {"python": platform.python_version(), "torch": torch.__version__}
for name in ("numpy", "scipy", "triton", "nvidia-ml-py", "ray", "deephyper", "pyarrow"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = "not installed"
about = {"versions": found, "host": platform.node(), "device": "CPU core", "num_devices": 0}
if sys.argv[1] == "cuda":
    about["num_devices"] = torch.cuda.device_count()
    if about["num_devices"]:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        about |= {
            "device": properties.name,
            "device_memory_bytes": total,
            "free_memory_bytes": free,
            "capability": list(torch.cuda.get_device_capability(0)),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": list(torch.cuda.nccl.version()),
            "bf16": torch.cuda.is_bf16_supported(),
        }
        try:
            import pynvml
            pynvml.nvmlInit()
            about["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        except Exception as error:
            about["driver"] = f"not known: {type(error).__name__}: {error}"
print(json.dumps(about))
"""
"""Runs in a process of its own: a context on the GPU would take memory from the probes."""


@dataclass(kw_only=True)
class Check:
    """The check of one device: its settings, and the report that the steps fill."""

    device: DeviceKind
    quick: bool
    out: Path
    data_dir: Path
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        """In this order: what needs the GPU most comes before what takes longest to compile."""
        steps = [
            Step(name="machine", limit_s=40, run=self.machine),
            Step(name="calibrate", limit_s=60, run=self.calibrate),
            Step(name="campaigns", limit_s=240, run=self.campaigns),
            Step(name="train", limit_s=45, run=self.train),
            Step(name="tests", limit_s=100, run=self.tests),
        ]
        eager, compiled = (partial(self.bench, peer) for peer in ("eager", "compiled"))
        steps += [
            Step(name="bench eager", limit_s=45, run=eager),
            Step(name="bench compiled", limit_s=150 if self.device == "cpu" else 100, run=compiled),
        ]
        return steps[:4] if self.quick else steps

    @property
    def cluster_file(self) -> Path:
        return self.data_dir / "cluster.json"

    def machine(self, clock: Clock) -> None:
        """Versions and the device; describes the machine for the worker."""
        about = json.loads(clock.run([sys.executable, "-c", _ABOUT_DEVICE, self.device]))
        self.report["machine"] = about
        if self.device == "cuda" and not about["num_devices"]:
            torch = about["versions"]["torch"]
            raise StepFailedError(
                f"torch {torch} sees no GPU here; run the check where there is one, or try it with "
                "--device cpu"
            )
        if self.device == "cpu":
            about["device_memory_bytes"] = memory_limit_bytes(workloads("cpu", quick=self.quick))
        self.cluster_file.write_text(
            json.dumps(
                {
                    "name": CLUSTER,
                    "device": about["device"],
                    "num_nodes": 1,
                    "devices_per_node": 1,
                    "device_memory_bytes": about["device_memory_bytes"],
                }
            )
        )

    def calibrate(self, clock: Clock) -> None:
        """`layout-tuner calibrate`, saved in the data directory of the service."""
        seconds = 2 if self.quick else 15
        words = ("calibrate", "--cluster", str(self.cluster_file), "--json", f"--seconds={seconds}")
        measured = json.loads(clock.run(layout_tuner(*words)))
        self.report["calibration"] = {
            name: measured[name]
            for name in ("constants", "noise", "warnings", "measured_at", "host")
        }

    def campaigns(self, clock: Clock) -> None:
        """Predicts, then measures some thirty layouts over HTTP; exports the best one."""
        cluster = json.loads(self.cluster_file.read_text())
        if "calibration" in self.report:
            calibration = self.report["calibration"]
            source = f"measured by layout-tuner calibrate on {calibration['host']}"
            cluster |= {**calibration["constants"], "source": source}
        every = workloads(self.device, quick=self.quick)
        run_campaigns(self.data_dir, self.cluster_file, cluster, every, self.report, clock)

    def train(self, clock: Clock) -> None:
        """Trains the exported job."""
        train(self.data_dir, self.cluster_file, self.report, 8 if self.quick else 12, clock)

    def tests(self, clock: Clock) -> None:
        """The tests that need a GPU; on a CPU the same tests on CPU ranks."""
        texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
        files = sorted(path for path, text in texts.items() if "pytest.mark.gpu" in text)
        chosen = ["-m", "gpu and not nightly"]
        if self.device == "cpu":
            chosen = ["-m", "not gpu and not nightly and not slow", "-k", "cpu"]
        results = self.data_dir / "tests.xml"
        # conftest.py needs PostgreSQL's client; plugins and warnings there are of other releases.
        plugins = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
        options = ["-q", "--noconftest", "-W", "default", *plugins, f"--junitxml={results}"]
        words = [sys.executable, "-m", "pytest", *options, *chosen, *map(str, files)]
        try:
            clock.run(words)
        finally:
            if results.exists():
                self.report["tests"] = test_counts(results)
        if not self.report["tests"]["passed"]:
            raise StepFailedError("no test ran")

    def bench(self, peer: str, clock: Clock) -> None:
        """Our step beside a plain loop, eager or compiled, of the same model."""
        if peer == "compiled" and self.device == "cpu" and not any(map(shutil.which, _COMPILERS)):
            raise StepSkippedError(f"torch.compile needs one of {', '.join(_COMPILERS)} here")
        models = "tiny" if self.device == "cpu" else "125m,1b" if peer == "eager" else "125m"
        file = self.data_dir / f"bench-{peer}.json"
        options = [f"--device={self.device}", f"--models={models}", f"--peers={peer}"]
        words = [sys.executable, "-m", "benchmarks.bench_gpu", *options, "--rounds=8"]
        try:
            clock.run([*words, f"--json={file}"])
        finally:
            if file.exists():
                self.report.setdefault("bench", []).extend(json.loads(file.read_text()))

    def run(self) -> bool:
        """Runs all steps, and writes the files after each; returns whether all of them passed."""
        started = time.monotonic()
        self.report |= {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        variables = {
            "LAYOUT_TUNER_DATA_DIR": str(self.data_dir),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            # A compiler that was cut must not leave half a file in a cache that others use.
            "TORCHINDUCTOR_CACHE_DIR": str(self.data_dir / "inductor"),
            "TRITON_CACHE_DIR": str(self.data_dir / "triton"),
            # NCCL on one device needs no network but a socket to itself.
            "NCCL_SOCKET_IFNAME": "lo",
        }
        os.environ.update(variables)
        results: list[StepResult] = []
        steps = self.steps
        for step in steps:
            _say(f"{step.name} (up to {step.limit_s:.0f} s) ...")
            left_s = MOST_S - (time.monotonic() - started)
            results.append(run_step(step, left_s=left_s, variables=variables))
            last = results[-1]
            _say(f"  {last.status} after {last.seconds:.0f} s  {last.message}".rstrip())
            self.report["steps"] = [asdict(each) for each in results]
            self.report["seconds"] = round(time.monotonic() - started, 1)
            done = len(results) == len(steps)
            passed = done and all(each.status in ("passed", "skipped") for each in results)
            self.report["passed"] = passed
            self._write()
            if step.name == "machine" and last.status != "passed":
                break
        _say(f"{'passed' if self.report['passed'] else 'not passed'} in {self.report['seconds']} s")
        return bool(self.report["passed"])

    def _write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("gpu-check.json", json.dumps(self.report, indent=1) + "\n"),
            ("gpu-check.html", page_of(self.report)),
        ):
            (self.out / name).write_text(text, encoding="utf-8")


_COMPILERS: Final = ("g++", "clang++", "c++")
_MESSAGE: Final = 400
"""Characters of the message of a test that failed."""


def test_counts(file: Path) -> dict[str, Any]:
    """Numbers of tests by outcome, and the messages of those that failed, of a JUnit report."""
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    failures = []
    for case in ElementTree.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote it just now
        bad = [found for kind in ("failure", "error") for found in case.findall(kind)]
        is_skipped = case.find("skipped") is not None
        counts["failed" if bad else "skipped" if is_skipped else "passed"] += 1
        if bad:
            message = bad[0].get("message", "")[:_MESSAGE]
            failures.append({"test": case.get("name", ""), "message": message})
    return {**counts, "failures": failures}


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; 0: every step passed."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few layouts; no tests, no benchmark")
    parser.add_argument(
        "--out", type=Path, help="folder of the two files; default: $OUT, or build/"
    )
    given = parser.parse_args(arguments)
    out = given.out or Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check")
    os.umask(PRIVATE_UMASK)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(device=given.device, quick=given.quick, out=out, data_dir=Path(folder))
        passed = check.run()
        if not passed:  # what explains it must not go with the folder
            for log in [*Path(folder).glob("*.log"), *Path(folder).glob("logs/*.log")]:
                shutil.copy(log, out / f"log-{log.name}")
    _say(f"written: {out / 'gpu-check.json'} and {out / 'gpu-check.html'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
