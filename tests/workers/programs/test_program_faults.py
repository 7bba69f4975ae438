"""Programs that lie, hang, flood, fork and die: each has its reason, and leaves nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.spec.layout import Layout
from search_spaces.trainers.log_patterns import LogPatterns
from search_spaces.trainers.program import ProgramTrainer
from tests.workers.programs.programs import (
    LONGER,
    SHORT,
    TWO_CORES,
    Fault,
    check,
    leaves_nothing,
    left_behind,
    python_trainer,
    run,
)
from workers.launchers.local import LocalNodes

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with leaves_nothing() as nodes:
        yield nodes


SLOW_DEVICES = replace(TWO_CORES, peak_flops_per_s={"fp32": 1e6})

DEAF = "signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])\ntime.sleep(60)"

LIES = {
    "of a step time that is too short": Fault(
        "train(step_time_s=1e-4, sleep_s=0.05)", "implausible", "rank 0 reported .* s for .* passed between"
    ),
    "of milliseconds as seconds": Fault("train(step_time_s=10)", "implausible", "in seconds"),
    "of no step time": Fault("train(step_time_s=0)", "implausible", "step_time_s is 0, not a number"),
    "of an endless step": Fault("train(step_time_s=float('inf'))", "implausible", "is inf, not"),
    "of a step time that is no number": Fault(
        "train(step_time_s=float('nan'))", "implausible", "is nan, not a number over 0"
    ),
    "of tokens beyond the layout": Fault(
        "train(tokens=65)", "implausible", r"65 tokens are not those of the layout, 64 .*1\*32"
    ),
    "of no tokens": Fault("train(tokens=0)", "implausible", r"tokens_per_s: 0\.0 is not"),
    "of negative tokens": Fault("train(tokens=-64)", "implausible", "tokens is -64"),
    "of endless tokens": Fault("train(tokens=float('inf'))", "implausible", "tokens is inf"),
    "of tokens that the ranks see differently": Fault(
        "meet()\ntrain(tokens=32 * (1 + RANK), sleep_s=0.05, step_time_s=0.05)", "implausible", r"disagree .*\(rank 0: 32, rank 1: 64\)"
    ),
    "of a loss below zero": Fault("train(loss=-1.0)", "implausible", "loss is -1"),
    "of a loss that overflows a mean": Fault("train(loss=1.7e308)", "implausible", "loss is 1.7e"),
    "of a loss that is no number": Fault("train(loss=float('nan'))", "diverged", "loss is nan"),
    "of memory beyond any device": Fault(
        "train(peak_memory_bytes=1e30)", "implausible", "peak_memory_bytes is 1e"
    ),
    "of memory that no database holds": Fault(
        "train(peak_memory_bytes=9e14)", "implausible", "818.5 TiB is more than the device"
    ),
    "of another rank": Fault(
        "os.environ['RANK'] = '0'\nif RANK: train()\nelse: time.sleep(60)",
        "implausible",
        "rank 1: the program reported as rank 0, and its ranks are 1 to 1; is RANK set",
    ),
    "of a rank that the job does not have": Fault(
        "os.environ['RANK'] = '7'\ntrain()", "implausible", "as rank 7"
    ),
    "of the tokens that a device can do": Fault(
        "train(tokens=64)",
        "implausible",
        r"of the peak \(.*: the clock, the counted work or the peak is wrong",
        {"cluster": SLOW_DEVICES},
    ),
}  # fmt: skip

RUBBISH = {
    "words": "b'rubbish\\n'",
    "nothing": "b'\\n'",
    "bytes": "bytes(range(256)) + b'\\n'",
    "another document": "b'[1, 2]\\n'",
    "nested lists": "b'[' * 4000 + b'\\n'",
    "a number of many digits": "b'{\"rank\": ' + b'9' * 4000 + b'}\\n'",
    "a clock that is no number": 'b\'{"rank": 0, "at_s": NaN}\\n\'',
    "a rank that is a text": 'b\'{"rank": "0", "at_s": 1}\\n\'',
    "a time that is a text": 'b\'{"rank": 0, "at_s": "1_0"}\\n\'',
    "a loss that is a text": 'b\'{"rank": 0, "at_s": 1, "loss": "5_0.0"}\\n\'',
    "a line without an end": "b'x' * 60000",
    "a report that is far too long": 'b\'{"rank": 0, "at_s": 1, "x": "\' + b\'y\' * 9000 + b\'"}\\n\'',
}

HANGS = {
    "before its first step": Fault("time.sleep(60)", "timeout", "deadline_s=1.2", SHORT),
    "before its first step, beyond its start limit": Fault(
        "time.sleep(60)", "timeout", "no step within its start limit of 0.5 s", {}, {"start_limit_s": 0.5}
    ),
    "in the middle": Fault("train(3)\ntime.sleep(60)", "timeout", "last: iteration 2", LONGER),
    "on one rank": Fault(
        "meet()\ntrain(3 if RANK else STEPS)\ntime.sleep(60)", "timeout", "deadline_s=1.2", SHORT
    ),
    "after its last step": Fault("train()\ntime.sleep(60)", None),
    "deaf to signals": Fault(
        "for n in {1, 2, 15}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
        "timeout", "deadline_s=1.2", SHORT,
    ),
    "after it closed its output": Fault(
        "os.close(1); os.close(2)\ntrain(1)\ntime.sleep(60)", "timeout", "last: iteration 0", LONGER
    ),
}  # fmt: skip

LEFTOVERS = {
    "a daemon of a program that hangs": Fault(
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n"
        f"    os._exit(0)\n{DEAF}", "timeout", "", SHORT,
    ),
    "a child": Fault("if os.fork() == 0:\n    time.sleep(600)\ntrain()", None),
    "a connection of its ranks": Fault(
        "import socket\nwhere = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "if RANK == 0: kept = socket.create_server(where).accept()\n"
        "while RANK:\n    try: kept = socket.create_connection(where)\n"
        "    except ConnectionRefusedError: continue\n    break\ntrain()", None,
    ),
}  # fmt: skip

FLOODS = {
    "its output without line ends": Fault(
        "def flood():\n    while True: os.write(1, b'x' * 65536)\n"
        "threading.Thread(target=flood, daemon=True).start()\ntrain()", None,
    ),
    "its output with lines": Fault(
        "def flood():\n    while True: os.write(1, b'word\\n' * 9000)\n"
        "threading.Thread(target=flood, daemon=True).start()\ntrain()", None,
    ),
    "the pipe with reports": Fault("while True: report_step(tokens=64)", "implausible", "of the peak", {"cluster": SLOW_DEVICES}),
    "its output from a daemon that outlives it": Fault(
        "if os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'word\\n' * 9000)\n"
        "train(3)", "crashed", "too few steps", {},
    ),
}  # fmt: skip

DEATHS = {
    **{
        signal.Signals(number).name: Fault(
            f"if {number} != 9: signal.signal({number}, signal.SIG_DFL)\n"
            f"train(1)\nos.kill(os.getpid(), {number})", "crashed",
            f"rank .: the program was killed by signal {number}",
        )
        for number in (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 14, 15, 24, 31)
    },
    "by the signal of its whole process group": Fault(
        "train(1)\nos.kill(0, 9)", "crashed", "the program was killed by signal 9"
    ),
    "with an exception": Fault(
        "train(1)\nraise ValueError('the reason')", "crashed",
        "ended with exit code 1; its last line: ValueError: the reason",
    ),
    "with exit code 0 too early": Fault(
        "train(2)", "crashed", r"too few steps reported \(rank 0: 2, rank 1: 2\); 2 \+ 3 are needed"
    ),
    "with exit code 0 and no step": Fault("", "crashed", r"too few steps reported \(none\)"),
    "with exit code 1 after its last step": Fault("train()\nsys.exit(1)", None),
    "with SIGABRT after its last step": Fault("train()\nos.abort()", None),
    "with a line of control characters": Fault(
        "print('\\x00\\x1b[31mred\\x07 \\ud800'.encode(errors='surrogatepass').decode(errors='replace'))\n"
        "sys.exit(3)", "crashed", "exit code 3",
    ),
    "by its alarm": Fault(
        f"os.kill(os.getppid(), signal.SIGALRM)\n{DEAF}", "timeout", "ended by its own alarm"
    ),
    "as a peer has before": Fault(
        "if RANK != 1:\n    print('RuntimeError: Connection closed by peer')\n    time.sleep(0.2)\n"
        "    sys.exit(1)\nos.kill(os.getpid(), 9)",
        "crashed", "rank 1: the program was killed by signal 9",
    ),
    "before the kernel's killer spares it": Fault(
        "sys.exit(open('/proc/self/oom_score_adj').read())", "crashed", "its last line: 500"
    ),
    "because a peer has died": Fault(
        "if RANK == 0: sys.exit('RuntimeError: Connection closed by peer')\n"
        "time.sleep(0.2)\nsys.exit('ValueError: the cause')", "crashed", "rank 1: .* the cause",
    ),
}  # fmt: skip

DIALECTS = {
    "torch on CUDA": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch on ROCm": "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
    "older torch": "RuntimeError: CUDA error: out of memory",
    "torch on the CPU": "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes. Error code 12",
    "cuBLAS": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
    "hipBLAS": "HIPBLAS_STATUS_ALLOC_FAILED",
    "the CUDA driver": "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "HIP": "hipErrorOutOfMemory",
    "NCCL": "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
    "JAX": "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying",
    "C++": "terminate called after throwing an instance of 'std::bad_alloc'",
    "Python": "MemoryError",
    "the kernel": "OSError: [Errno 12] Cannot allocate memory",
    "with colours": "\x1b[31mtorch.cuda.OutOfMemoryError: CUDA out of memory.\x1b[0m",
}

MEMORY = {
    "beyond the limit": Fault(
        "taken = b'x' * (300 << 20)\ntrain(100, sleep_s=0.05, step_time_s=0.05)",
        "out_of_memory", "MiB were in use, over the limit of 200 MiB",
        {"memory_limit_bytes": 200 << 20},
    ),
    "far beyond the limit at once": Fault(
        "taken = bytearray(6 << 30)\ntrain()", "out_of_memory", "printed: MemoryError",
        {"memory_limit_bytes": 200 << 20},
    ),
    "refused by the kernel": Fault(
        "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (64 << 20, 64 << 20))\n"
        "bytearray(1 << 30)", "out_of_memory", "it printed: MemoryError",
    ),
    "within the limit": Fault("train()", None, "", {"memory_limit_bytes": 200 << 20}),
    "said to be short, and got over": Fault(
        "step()\nprint('CUDA out of memory: trying smaller buckets', flush=True)\n"
        "step(0.3, 0.3)\ntrain(STEPS - 2)", None,
    ),
    "said to be short, and got over before another end": Fault(
        "step()\nprint('CUDA out of memory: trying smaller buckets', flush=True)\n"
        "step(0.3, 0.3)\nstep()\ntime.sleep(0.3)\nsys.exit('another end')",
        "crashed", "its last line: another end",
    ),
}  # fmt: skip

UNSTARTABLE = {
    "a file that is not there": ({"command": ("/nowhere/train",)}, "No such file"),
    "a word that is on no path": ({"command": ("no-such-program-at-all",)}, "No such file"),
    "a file that is not executable": ({"command": ("/etc/passwd",)}, "Permission denied"),
    "a directory": ({"command": ("/tmp",)}, "Permission denied"),
    "a working directory that is not there": (
        {"command": ("true",), "working_directory": "/nowhere"}, "'/nowhere'"
    ),
    "a container command that is not there": (
        {"command": ("true",), "container": ("no-such-container",)}, "no-such-container"
    ),
    "a variable with a lone surrogate": (
        {"command": ("true",), "environment": {"X": "\ud800"}}, "surrogates not allowed"
    ),
}  # fmt: skip

FAULTS = {
    f"{kind} {name}": fault
    for kind, faults in (
        ("lies", LIES), ("hangs", HANGS), ("leaves", LEFTOVERS), ("floods", FLOODS),
        ("dies", DEATHS), ("memory", MEMORY),
    )
    for name, fault in faults.items()
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_program_at_fault_has_its_reason_and_leaves_nothing(nodes: LocalNodes, name: str) -> None:
    fault = FAULTS[name]
    outcome = run(nodes, python_trainer(fault.code, **fault.entry), **fault.changes)
    check(outcome, fault)
    assert left_behind(nodes) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_in_the_pipe_is_no_report(nodes: LocalNodes, name: str) -> None:
    code = f"""
fd = os.open(os.environ["LAYOUT_TUNER_REPORT"], os.O_WRONLY)
step()
os.write(fd, {RUBBISH[name]})
time.sleep(60)
"""
    outcome = run(nodes, python_trainer(code), layout=Layout())
    check(outcome, Fault("", "implausible", "^rank 0: the program wrote .* is not a report of"))
    assert left_behind(nodes) == []


def test_reports_with_times_of_their_own_making_are_implausible(nodes: LocalNodes) -> None:
    """Half a second a step, told as a thousandth, by a program that writes its reports itself."""
    code = """
import json
started = time.monotonic()
fd = os.open(os.environ["LAYOUT_TUNER_REPORT"], os.O_WRONLY)
for number in range(STEPS):
    time.sleep(0.5)
    said = dict(rank=0, at_s=started + 0.001 * number, step_time_s=0.001)
    os.write(fd, json.dumps(said).encode() + b"\\n")
"""
    outcome = run(nodes, python_trainer(code), layout=Layout())
    check(outcome, Fault("", "implausible", "passed between its reports"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DIALECTS)
def test_each_dialect_of_out_of_memory_is_understood(nodes: LocalNodes, name: str) -> None:
    code = f"train(1)\nprint({DIALECTS[name]!r})\nprint('  in more words')\nsys.exit(1)"
    outcome = run(nodes, python_trainer(code), layout=Layout())
    check(outcome, Fault("", "out_of_memory", "ended with exit code 1; it printed: "))


@pytest.mark.parametrize("name", UNSTARTABLE)
def test_a_program_that_cannot_be_started_is_unsupported(nodes: LocalNodes, name: str) -> None:
    entry, why = UNSTARTABLE[name]
    trainer = ProgramTrainer(**{"name": "theirs", "version": "1", **entry})
    outcome = run(nodes, trainer)
    check(outcome, Fault("", "unsupported", "can't be started in .* correct the trainer's entry"))
    assert why in outcome.message
    assert left_behind(nodes) == []


def test_daemons_of_a_program_end_with_it(nodes: LocalNodes, tmp_path: Path) -> None:
    code = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        open({str(tmp_path / "daemon")!r} + str(RANK), "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
train()
"""
    assert run(nodes, python_trainer(code)).state == "completed"
    assert left_behind(nodes) == []
    for each in tmp_path.iterdir():
        assert not Path(f"/proc/{each.read_text()}").exists()


def test_a_cancelled_program_is_cancelled(nodes: LocalNodes) -> None:
    told: list[dict[str, Any]] = []
    outcome = run(
        nodes,
        python_trainer("train(3)\ntime.sleep(60)"),
        on_event=told.append,
        cancelled=lambda: len(told) > 1,
    )
    assert (outcome.state, outcome.reason) == ("cancelled", "cancelled")
    assert left_behind(nodes) == []


def test_a_program_whose_supervisor_is_killed_ends_too(nodes: LocalNodes) -> None:
    code = "step()\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    outcome = run(nodes, python_trainer(code))
    check(outcome, Fault("", "crashed", "was killed by signal 9"))
    assert left_behind(nodes) == []


def test_a_program_that_kills_its_keeper_loses_the_node_and_nothing_is_left() -> None:
    code = """
step()
keeper = open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[1]
os.kill(int(keeper), signal.SIGKILL)
time.sleep(60)
"""
    with leaves_nothing() as nodes:
        outcome = run(nodes, python_trainer(code), layout=Layout())
        assert left_behind(nodes) == []
    check(outcome, Fault("", "node_lost"))


def test_memory_comes_back_after_a_program(nodes: LocalNodes) -> None:
    def shared_memory() -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))

    before_kib = shared_memory()
    code = "import mmap\nkept = mmap.mmap(-1, 64 << 20)\nkept.write(b'x' * (64 << 20))\ntrain()"
    outcome = run(nodes, python_trainer(code), layout=Layout())
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.peak_memory_bytes > 64 << 20
    assert outcome.measurement.memory_kind == "sampled"
    assert shared_memory() - before_kib < 32 << 10


@pytest.mark.parametrize(
    ("figure", "why"),
    [
        ("tokens_per_s_per_device=5e-300", "passed between its reports"),
        *((f"loss={text}", f"loss='{text}' in the program's log is not") for text in ("5_0.0", "5,0", "N/A")),
    ],
)  # fmt: skip
def test_a_log_that_lies_or_has_no_number_fails(nodes: LocalNodes, figure: str, why: str) -> None:
    log = LogPatterns(step=rf"{figure.partition('=')[0]}=(?P<{figure.partition('=')[0]}>\S+)")
    code = f"for _ in range(STEPS):\n    time.sleep(0.01)\n    print('{figure}', flush=True)"
    outcome = run(nodes, python_trainer(code, log=log), layout=Layout())
    check(outcome, Fault("", "implausible", why))
