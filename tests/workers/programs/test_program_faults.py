"""Programs that lie, hang, flood, fork and die: each has its reason, and leaves nothing."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.workers.launchers.local import LocalNodes
from tests.workers.programs.programs import TWO_CORES, left_behind, python_trainer, run

pytestmark = pytest.mark.ranks


class Fault(NamedTuple):
    """A program, and the outcome of a probe with it."""

    code: str
    reason: str | None
    """None: the probe completes."""
    message: str = ""
    """A regular expression that is found in the message."""
    changes: Mapping[str, Any] = MappingProxyType({})
    """Of the request."""
    entry: Mapping[str, Any] = MappingProxyType({})
    """Fields of the trainer's entry."""


SHORT: Final = {"deadline_s": 1.2}
"""For programs that hang at once."""
LONGER: Final = {"deadline_s": 4.0}
"""For programs that must have started by then, on a busy machine too."""
SLOW_DEVICES = replace(TWO_CORES, peak_flops_per_s={"fp32": 1e6})

ALONE = {"layout": Layout()}
OWN_REPORTS = "import json\nfd = os.open(os.environ['LAYOUT_TUNER_REPORT'], os.O_WRONLY)\n"
SAYS = "for _ in range(STEPS):\n    time.sleep(0.01)\n    print('{}', flush=True)"
DEAF = "signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])\ntime.sleep(60)"

LIES = {
    "of a step time that is too short": Fault(
        "train(step_time_s=1e-4, sleep_s=0.05)", "implausible", "rank 0 reported .* s for .* passed between"
    ),
    "of milliseconds as seconds": Fault("train(step_time_s=10)", "implausible", "in seconds"),
    "of tokens beyond the layout": Fault(
        "train(tokens=65)", "implausible", r"65 tokens are not those of the layout, 64 .*1\*32"
    ),
    "of no tokens": Fault("train(tokens=0)", "implausible", r"tokens_per_s: 0\.0 is not"),
    "of a loss that is no number": Fault("train(loss=float('nan'))", "diverged", "loss is nan"),
    "of tokens that the ranks see differently": Fault(
        "meet()\ntrain(tokens=32 * (1 + RANK), sleep_s=0.05, step_time_s=0.05)", "implausible", r"disagree .*\(rank 0: 32, rank 1: 64\)"
    ),
    "of memory that no database holds": Fault(
        "train(peak_memory_bytes=9e14)", "implausible", "818.5 TiB is more than the device"
    ),
    "of the tokens that a device can do": Fault(
        "train(tokens=64)",
        "implausible",
        r"of the peak \(.*: the clock, the counted work or the peak is wrong",
        {"cluster": SLOW_DEVICES},
    ),
    "of another rank": Fault(
        "os.environ['RANK'] = '0'\nif RANK: train()\nelse: time.sleep(60)",
        "implausible",
        "rank 1: the program reported as rank 0, and its ranks are 1 to 1; is RANK set",
    ),
    "of the speed in its log": Fault(
        *(SAYS.format("tokens_per_s_per_device=5e-300"), "implausible", "passed between its reports", ALONE),
        {"log": LogPatterns(variants=(StepPattern(pattern=r"tokens_per_s_per_device=(?P<tokens_per_s_per_device>\S+)"),))},
    ),
    "of the time between its reports": Fault(  # 0.4 s a step, by a program that writes them itself
        f"{OWN_REPORTS}started = time.monotonic()\nfor number in range(STEPS):\n    time.sleep(0.4)\n"
        "    said = dict(rank=0, at_s=started + 0.001 * number, step_time_s=0.001)\n"
        "    os.write(fd, json.dumps(said).encode() + b'\\n')",
        "implausible", "passed between its reports", ALONE,
    ),
    "of a loss in its log that is no number": Fault(
        *(SAYS.format("loss=5_0.0"), "implausible", "loss='5_0.0' in the program's log is not", ALONE),
        {"log": LogPatterns(variants=(StepPattern(pattern=r"loss=(?P<loss>\S+)"),))},
    ),
}  # fmt: skip

RUBBISH = {
    name: Fault(
        f"{OWN_REPORTS}step()\nos.write(fd, {data})\ntime.sleep(60)",
        "implausible", "^rank 0: the program wrote .* is not a report of", ALONE,
    )
    for name, data in {
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
    }.items()
}  # fmt: skip

HANGS = {
    "before its first step, beyond its start limit": Fault(
        "time.sleep(60)", "timeout", "no step within its start limit of 0.5 s", {}, {"start_limit_s": 0.5}
    ),
    "in the middle, after it closed its output": Fault(
        "os.close(1); os.close(2)\ntrain(3)\ntime.sleep(60)", "timeout", "last: iteration 2", LONGER
    ),
    "on one rank": Fault(
        "meet()\ntrain(3 if RANK else STEPS)\ntime.sleep(60)", "timeout", "deadline_s=1.2", SHORT
    ),
    "after its last step": Fault("train()\ntime.sleep(60)", None),
}  # fmt: skip

LEFTOVERS = {
    "a daemon of a program that hangs": Fault(
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n"
        f"    os._exit(0)\n{DEAF}", "timeout", "", SHORT,
    ),
    "daemons that are deaf to signals": Fault(
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        "        time.sleep(600)\n    os._exit(0)\nos.wait()\ntrain()", None,
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
    "its output with lines": Fault(
        "def flood():\n    while True: os.write(1, b'word\\n' * 9000)\n"
        "threading.Thread(target=flood, daemon=True).start()\ntrain()", None,
    ),
    "its output without line ends": Fault(
        "def flood():\n    while True: os.write(1, b'x' * 65536)\n"
        "threading.Thread(target=flood, daemon=True).start()\ntrain()", None,
    ),
    "its output from a daemon that outlives it": Fault(
        "if os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'word\\n' * 9000)\n"
        "train(3)", "crashed", "too few steps", {},
    ),
    "the pipe with reports": Fault("while True: report_step(tokens=64)", "implausible", "of the peak", {"cluster": SLOW_DEVICES}),
}  # fmt: skip

DEATHS = {
    **{
        signal.Signals(number).name: Fault(
            f"if {number} != 9: signal.signal({number}, signal.SIG_DFL)\n"
            f"train(1)\nos.kill(os.getpid(), {number})", "crashed",
            f"rank .: the program was killed by signal {number}",
        )
        for number in (2, 9, 11, 15)
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
    "with its supervisor": Fault(
        "step()\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)", "crashed", "was killed by signal 9"
    ),
    "with its keeper": Fault(
        "step()\nstat = open(f'/proc/{os.getppid()}/stat').read()\n"
        "os.kill(int(stat.rsplit(')', 1)[1].split()[1]), signal.SIGKILL)\ntime.sleep(60)",
        "node_lost", "^the keeper of the group's ranks ended with exit code -9$", ALONE,
    ),
}  # fmt: skip

MEMORY = {
    "within the limit": Fault("train()", None, "", {"memory_limit_bytes": 200 << 20}),
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
    "said to be short, and got over before another end": Fault(
        "step()\nprint('CUDA out of memory: trying smaller buckets', flush=True)\n"
        "step(0.3, 0.3)\nstep()\ntime.sleep(0.3)\nsys.exit('another end')",
        "crashed", "its last line: another end",
    ),
    "said to be short, and got over": Fault(
        "step()\nprint('CUDA out of memory: trying smaller buckets', flush=True)\n"
        "step(0.3, 0.3)\ntrain(STEPS - 2)", None,
    ),
}  # fmt: skip

SAID = "print({!r}, flush=True)\nos._exit(1)"
NCCL_SAYS: Final = "node3:71:88 [2] misc/file.cc:7 NCCL WARN "

HOST = {
    "of open files": Fault(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "kept = [open('/dev/null') for _ in range(60)]",
        "host_resource",
        r"printed: OSError: \[Errno 24\] .*; the host ran out of open files: raise `ulimit -n` where workers",
    ),
    "of shared memory": Fault(
        "import mmap\nwith open('{probe_directory}/x', 'w+b') as file:\n    file.truncate(4096)\n"
        "    mapped = mmap.mmap(file.fileno(), 4096)\n    file.truncate(0)\nmapped[0]",
        "host_resource", "signal 7; the host ran out of shared memory: enlarge /dev/shm",
    ),
    "of shared memory, below a shell": Fault(
        "os._exit(128 + 7)", "host_resource", "exit code 135; the host ran out of shared memory",
    ),
    "of locked memory, in the words of NCCL": Fault(
        SAID.format(
            f"{NCCL_SAYS}Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n"
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:7, unhandled system error\n"
            "ncclSystemError: System call or external library call failed."
        ),
        "host_resource", "printed: .*ibv_reg_mr.*; the host ran out of locked memory: set `ulimit -l unl",
    ),
}  # fmt: skip

DEVICE = {
    "in the words of the driver": Fault(
        SAID.format("RuntimeError: CUDA driver error: out of memory"), "out_of_memory",
        "printed: RuntimeError: CUDA driver error: out of memory$",
    ),
    "in the words of an older NCCL": Fault(
        SAID.format(f"{NCCL_SAYS}Cuda failure 'out of memory'\nncclUnhandledCudaError: Call failed."),
        "out_of_memory", "printed: .*NCCL WARN Cuda failure 'out of memory'$",
    ),
    "hinted at, before an error of another kind": Fault(
        "print('smaller batches help if you see CUDA out of memory. Tried to allocate', flush=True)\n"
        "raise KeyError('CUDA')", "crashed", "its last line: KeyError: 'CUDA'",
    ),
}  # fmt: skip

UNSTARTABLE = {
    name: Fault(
        "", "unsupported", f"can't be started in .*{why}.*; correct the trainer's entry",
        {}, {"command": ("true",), **entry},
    )
    for name, why, entry in (
        ("a file that is not there", "No such file", {"command": ("/nowhere/train",)}),
        ("a file that is not executable", "Permission denied", {"command": ("/etc/passwd",)}),
        ("a working directory that is not there", "'/nowhere'", {"working_directory": "/nowhere"}),
        ("a container that is not there", "no-such-container", {"container": ("no-such-container",)}),
        ("a lone surrogate", "surrogates not allowed", {"environment": {"X": "\ud800"}}),
    )
}  # fmt: skip

FAULTS = {
    f"{kind} {name}": fault
    for kind, faults in (
        ("lies", LIES), ("writes", RUBBISH), ("hangs", HANGS), ("leaves", LEFTOVERS),
        ("floods", FLOODS), ("memory", MEMORY), ("needs", UNSTARTABLE),
        ("lacks what is", HOST), ("memory", DEVICE),
    )
    for name, fault in faults.items()
}  # fmt: skip


@pytest.mark.parametrize("name", DEATHS)
def test_a_program_that_dies_has_its_reason(nodes: LocalNodes, name: str) -> None:
    expect(nodes, DEATHS[name])
    assert not nodes.lost()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_program_at_fault_has_its_reason(nodes: LocalNodes, name: str) -> None:
    expect(nodes, FAULTS[name])


def expect(nodes: LocalNodes, fault: Fault) -> None:
    """Runs a program and checks the outcome against what its fault must lead to."""
    outcome = run(nodes, python_trainer(fault.code, **fault.entry), **fault.changes)
    assert outcome.reason == fault.reason, (outcome.message, outcome.log_tail)
    state = "infeasible" if fault.reason == "out_of_memory" else "failed"
    assert outcome.state == ("completed" if fault.reason is None else state)
    assert re.search(fault.message, outcome.message), outcome.message
    assert Outcome.from_mapping(outcome.to_mapping()) == outcome
    assert left_behind(nodes) == []


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
