"""What others take of a probe's devices: from readings of the kernel and of NVIDIA's library."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from layout_tuner.predictions.statistics.disturbance import DISTURBED_SHARE
from layout_tuner.workers.ranks.warden import start_under_warden
from layout_tuner.workers.trainer.disturbance import (
    CoreWatch,
    Disturbance,
    NvidiaWatch,
    own_processes,
)
from layout_tuner.workers.trainer.probe.probe import run_probe
from tests.workers.busy_cores import busy
from tests.workers.trainer.cases import make_layout
from tests.workers.trainer.probes import make_request
from tests.workers.trainer.ranks import make_context, run_ranks

TICKS = os.sysconf("SC_CLK_TCK")


class FakeKernel:
    """The kernel's files about four cores, and about the threads of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        self.busy_s = [50.0] * 4
        self.stolen_s = [1.0] * 4
        self.threads: dict[int, tuple[float, float]] = {7: (20.0, 3.0)}
        self.own_s = 5.0
        """How long the product's other process, of one thread, has run."""
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self.now_s)
        monkeypatch.setattr("layout_tuner.workers.trainer.disturbance.time", clock)
        self.write()

    def write(self) -> None:
        lines = ["cpu  1 1 1 1 1 1 1 1 0 0"]
        for core, (busy_s, stolen_s) in enumerate(zip(self.busy_s, self.stolen_s, strict=True)):
            busy, stolen = round(busy_s * TICKS), round(stolen_s * TICKS)
            # user nice system idle iowait irq softirq steal guest guest_nice
            lines.append(f"cpu{core} {busy - 300} 100 200 9999 88 77 66 {stolen} 55 0")
        (self.root / "stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5", ""]))
        for thread, (ran_s, waited_s) in self.threads.items():
            self._write_thread(7, thread, ran_s, waited_s)
        self._write_thread(70, 70, self.own_s, 0.0)

    def _write_thread(self, pid: int, thread: int, ran_s: float, waited_s: float) -> None:
        path = self.root / str(pid) / "task" / str(thread)
        path.mkdir(parents=True, exist_ok=True)
        (path / "schedstat").write_text(f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 12\n")

    def passes(
        self,
        seconds: float,
        *,
        threads: Mapping[int, tuple[float, float]],
        busy_s: Mapping[int, float],
        stolen_s: float = 0.0,
    ) -> None:
        """Time passes; threads ran and waited, cores were busy, all in addition to before."""
        self.now_s += seconds
        for core, more_s in busy_s.items():
            self.busy_s[core] += more_s
            self.stolen_s[core] += stolen_s
        for thread, (ran_s, waited_s) in threads.items():
            ran_before, waited_before = self.threads.get(thread, (0.0, 0.0))
            self.threads[thread] = (ran_before + ran_s, waited_before + waited_s)
        self.write()

    def watch(self, *cores: int) -> CoreWatch:
        return CoreWatch(cores, lambda: [7], self.root, own=lambda: [70])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeKernel:
    return FakeKernel(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("cores", "threads", "busy_s", "stolen_s", "share"),
    [
        pytest.param([1], {7: (9.5, 0.0)}, {0: 10.0, 1: 9.5, 2: 10.0}, 0.0, 0.0, id="alone"),
        pytest.param([1], {7: (6.0, 3.5)}, {1: 10.0}, 0.0, 0.35, id="waits-for-its-core"),
        pytest.param(
            *(range(4), {7: (10.0, 0.0)}, dict.fromkeys(range(4), 10.0), 0.0, 0.0),
            id="others-on-cores-it-leaves-free",
        ),
        pytest.param([1], {7: (5.0, 0.1)}, {1: 10.0}, 0.0, 0.01, id="waits-for-a-peer"),
        # Two threads that both ran before and a new one share the core; nobody else is on it.
        pytest.param(
            *([1], {7: (5.0, 5.0), 8: (3.0, 7.0), 9: (2.0, 8.0)}, {1: 10.0}, 0.0, 0.0),
            id="its-threads-wait-for-each-other",
        ),
        pytest.param([1, 2], {7: (8.0, 0.0)}, {1: 4.0, 2: 4.0}, 2.0, 0.2, id="hypervisor-takes"),
        pytest.param([1], {7: (1.0, 90.0)}, {1: 90.0}, 90.0, 1.0, id="at-most-all"),
    ],
)
def test_others_take_what_a_rank_waits_for_its_cores_and_what_a_hypervisor_takes(
    kernel: FakeKernel,
    cores: Sequence[int],
    threads: dict[int, tuple[float, float]],
    busy_s: dict[int, float],
    stolen_s: float,
    share: float,
) -> None:
    """Of ten seconds, as the kernel counts them for the threads of the rank and for its cores."""
    watch = kernel.watch(*cores)
    kernel.passes(10.0, threads=threads, busy_s=busy_s, stolen_s=stolen_s)
    assert watch().others_share == pytest.approx(share)


@pytest.mark.parametrize(("ran_s", "share"), [(0.0, 0.0), (0.5, 0.05), (6.0, 0.3)])
def test_the_products_own_processes_took_what_they_ran_and_no_more_than_was_taken(
    kernel: FakeKernel, ran_s: float, share: float
) -> None:
    """Of ten seconds others took three of the core, and a hypervisor one."""
    watch = kernel.watch(1)
    kernel.own_s += ran_s
    kernel.passes(10.0, threads={7: (6.0, 3.0)}, busy_s={1: 9.0}, stolen_s=1.0)
    found = watch()
    assert (found.others_share, found.own_share) == pytest.approx((0.4, share))


def test_readings_in_between_add_up(kernel: FakeKernel) -> None:
    watch = kernel.watch(1)
    kernel.passes(4.0, threads={7: (2.0, 2.0)}, busy_s={1: 4.0})
    watch.take()
    kernel.passes(6.0, threads={7: (6.0, 0.0)}, busy_s={1: 6.0})
    assert watch().others_share == pytest.approx(0.2)
    assert (watch.taken_s, watch.elapsed_s) == pytest.approx((2.0, 10.0))


def test_a_thread_that_has_ended_is_left_out(kernel: FakeKernel) -> None:
    kernel.passes(1.0, threads={8: (0.5, 0.5)}, busy_s={1: 1.0})
    watch = kernel.watch(1)
    (kernel.root / "7" / "task" / "8" / "schedstat").unlink()
    kernel.passes(10.0, threads={7: (8.0, 2.0)}, busy_s={1: 10.0})
    (kernel.root / "7" / "task" / "8" / "schedstat").unlink()
    assert watch().others_share == pytest.approx(0.2)


@pytest.mark.parametrize("missing", ["stat", "7/task/7/schedstat", "zeros", "moment"])
def test_what_the_kernel_does_not_count_is_not_known(kernel: FakeKernel, missing: str) -> None:
    if missing == "moment":
        assert kernel.watch(1)() == Disturbance()
        return
    if missing == "zeros":  # a kernel without CONFIG_SCHED_INFO
        (kernel.root / "7" / "task" / "7" / "schedstat").write_text("0 0 0\n")
    else:
        (kernel.root / missing).unlink()
    watch = kernel.watch(1)
    kernel.now_s += 10.0
    assert watch() == Disturbance()


def probe_on(core: int, **context: Any) -> Any:
    """The measurement of a probe of one rank on one core."""

    def work(rank: int, store: Any) -> Any:
        os.sched_setaffinity(0, {core})
        request = make_request(layout=make_layout(num_microbatches=8), iterations=20)
        return run_probe(request, make_context(rank, 1, store, **context), lambda _: None)

    return run_ranks(1, work, own_group=True)[0].measurement


@pytest.mark.ranks
def test_a_probe_beside_busy_processes_is_disturbed() -> None:
    core = min(os.sched_getaffinity(0))
    with busy({core}, 2):
        measured = probe_on(core)
    # Three processes share the core, and the probe is one of them.
    assert measured.others_share > 0.4
    assert measured.is_disturbed
    assert measured.throttled is None, "cores do not say it"


@pytest.mark.ranks
def test_what_a_process_of_the_product_takes_is_told_apart_from_what_others_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, core = psutil.Process(), min(os.sched_getaffinity(0))

    def own_processes_of_this_test() -> set[int]:
        """Other tests run the product beside this one."""
        return own_processes() & {each.pid for each in here.children(recursive=True)}

    monkeypatch.setattr(
        "layout_tuner.workers.trainer.probe.measured_result.own_processes",
        own_processes_of_this_test,
    )
    with busy({core}, 1):
        beside_others = probe_on(core)
    program = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    reader, writer = os.pipe()
    warden = start_under_warden([sys.executable, "-c", program], env={**os.environ}, log_fd=writer)
    try:
        os.read(reader, 1)
        beside_own = probe_on(core)
    finally:
        warden.terminate()
        warden.wait()
        os.close(reader)
        os.close(writer)
    assert DISTURBED_SHARE < beside_own.own_share <= beside_own.others_share
    assert beside_others.own_share == 0.0


def test_all_below_a_command_of_the_product_is_its_own_but_ranks(tmp_path: Path) -> None:
    zygote = "python -P -m layout_tuner.workers.ranks.zygote --socket=7"
    processes = {
        1: (0, "init"),
        2: (1, "/usr/bin/layout-tuner up"),
        3: (2, "python -P -m layout_tuner worker --url x"),
        4: (3, "/ray/raylet --port=1"),
        5: (4, zygote),
        6: (5, zygote),  # the keeper of a group, which forks the ranks
        7: (6, zygote),
        8: (7, "sh -c whatever-a-rank-runs"),
        9: (1, "python -m other_product worker"),
    }
    for pid, (parent, command) in processes.items():
        (folder := tmp_path / str(pid)).mkdir()
        (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (folder / "stat").write_text(f"{pid} (a) name) S {parent} 0 0")
    assert own_processes(tmp_path) == {2, 3, 4, 5, 6}


@pytest.mark.ranks
def test_the_disturbance_of_ranks_that_share_devices_is_not_known() -> None:
    measured = probe_on(min(os.sched_getaffinity(0)), oversubscribed=True)
    assert (measured.others_share, measured.throttled) == (None, None)


class FakeNvml:
    """The functions of the management library that are called, about one device."""

    class NVMLError(Exception):
        """Raised by every function that fails."""

    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.pids = [1]
        self.reasons = self.nvmlClocksThrottleReasonSwPowerCap
        self.samples: list[tuple[int, int]] = []
        self.refuses: set[str] = set()

    def _answer(self, function: str) -> None:
        if function in self.refuses:
            raise self.NVMLError("not supported")

    def nvmlInit(self) -> None:
        self._answer("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-abc"
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        self._answer("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[Any]:
        self._answer("nvmlDeviceGetProcessUtilization")
        assert since_us > 1e15
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self.samples]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self._answer("nvmlDeviceGetCurrentClocksThrottleReasons")
        return self.reasons


def test_the_stand_in_has_the_names_of_the_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(names) >= 10
    for name in names:
        assert hasattr(pynvml, name), name
        if name.startswith("nvmlClocks"):
            assert getattr(pynvml, name) == getattr(FakeNvml, name)
    fields = {name for name, _ in pynvml.c_nvmlProcessUtilizationSample_t._fields_}
    assert {"pid", "smUtil"} <= fields
    assert "pid" in {name for name, _ in pynvml.c_nvmlProcessInfo_v3_t._fields_}


def test_a_device_for_itself_at_its_cap_of_power_is_quiet() -> None:
    watch = NvidiaWatch("GPU-abc", FakeNvml(), pid=1)
    assert watch() == Disturbance(others_share=0.0, throttled=False)


def test_others_take_what_they_use_of_the_multiprocessors() -> None:
    nvml = FakeNvml()
    watch = NvidiaWatch("GPU-abc", nvml, pid=1)
    nvml.pids = [1, 2, 3]
    nvml.samples = [(1, 60), (2, 20), (2, 40), (3, 5), (1, 70)]
    assert watch().others_share == pytest.approx(0.35)
    nvml.samples = []
    assert watch().others_share == 0.0, "they were idle"


@pytest.mark.parametrize(("before", "after"), [(0x44, 0x4), (0x4, 0x24)])
def test_a_clock_that_heat_holds_down_is_noticed_at_both_ends(before: int, after: int) -> None:
    nvml = FakeNvml()
    nvml.reasons = before
    watch = NvidiaWatch("GPU-abc", nvml, pid=1)
    nvml.reasons = after
    assert watch().throttled is True


def test_what_the_library_does_not_say_is_not_known() -> None:
    nvml = FakeNvml()
    nvml.refuses = {"nvmlDeviceGetCurrentClocksThrottleReasons"}
    assert NvidiaWatch("GPU-abc", nvml, pid=1)() == Disturbance(others_share=0.0)
    # In a container, the driver's numbers of processes are not those that the rank knows.
    assert NvidiaWatch("GPU-abc", nvml, pid=9)() == Disturbance()
    nvml.refuses = {"nvmlInit"}
    assert NvidiaWatch("GPU-abc", nvml, pid=1)() == Disturbance()
    nvml.refuses, nvml.pids = {"nvmlDeviceGetProcessUtilization"}, [1, 2]
    assert NvidiaWatch("GPU-abc", nvml, pid=1)() == Disturbance(throttled=False)


def test_without_a_driver_the_bindings_say_nothing() -> None:
    pytest.importorskip("pynvml")
    if Path("/proc/driver/nvidia").is_dir():
        pytest.skip("NVIDIA's driver is loaded here")
    nvml = importlib.import_module("pynvml")
    assert NvidiaWatch("GPU-abc", nvml)() == Disturbance()
