"""Which lines of an output say why it ended, in the forms that trainers and launchers print."""

from __future__ import annotations

from typing import Final

import pytest

from layout_tuner.workers.programs.failure_blocks import ErrorLines, FailureCause

WARN: Final = "node3:71:88 [2] misc/file.cc:7 NCCL WARN "
TRACE: Final = 'Traceback (most recent call last):\n  File "t.py", line 7, in step\n    step()\n'
OOM: Final = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB."
NCCL: Final = "torch.distributed.DistBackendError: NCCL error in: x.cpp:7, unhandled cuda error\n"
CALL: Final = "ncclUnhandledCudaError: Call to CUDA function failed.\n"
REG_MR: Final = "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n"
PEER: Final = "RuntimeError: [x.cc:7] Connection closed by peer [127.0.0.1]:7"
FAILED: Final = (
    f"{TRACE}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "=====\nt.py FAILED\nRoot Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"
)
HANDLING: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"
HINT: Final = (
    "try setting PYTORCH_CUDA_ALLOC_CONF if you get CUDA out of memory. Tried to allocate\n"
)


def prefixed(text: str, prefix: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


NAMED: Final = {
    "locked memory of NCCL, without a traceback": (
        f"{WARN}{REG_MR}{NCCL}ncclSystemError: System call or external library call failed.",
        "locked memory",
    ),
    "the driver's out of memory": ("RuntimeError: CUDA driver error: out of memory", "device memory"),
    "out of memory of an older NCCL": (f"{WARN}Cuda failure 'out of memory'\n{CALL}", "device memory"),
    "out of memory in NCCL's last error": (
        f"{TRACE}{NCCL}{CALL}Last error:\nCuda failure 2 'out of memory'\n"
        "[rank0]:[W1128 x.cpp:7] destroy_process_group() was not called",
        "device memory",
    ),
    "locked memory in NCCL's last error": (
        f"{TRACE}{NCCL}ncclSystemError: System call failed.\nLast error:\n{REG_MR}", "locked memory"
    ),
    "a warning of libibverbs before an error of an older NCCL": (
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.\n"
        f"    This will severely limit memory registrations.\n{WARN}Call to ibv_reg_mr failed\n{NCCL}",
        "locked memory",
    ),
    "threads that OpenBLAS can't start": (
        "OpenBLAS blas_thread_init: pthread_create failed for thread 7 of 64: Resource temporarily\n"
        f"OpenBLAS blas_thread_init: RLIMIT_NPROC 77 current, 99 max\n{TRACE}KeyboardInterrupt",
        "processes",
    ),
    "what the memory was for": (
        f"{WARN}Cuda failure 'out of memory'\n\n{WARN}Error while creating shared memory segment"
        f" /dev/shm/nccl-7\nnode3:71:88 [2] NCCL INFO transport/shm.cc:7 -> 1\n{TRACE}{NCCL}{CALL}",
        "shared memory",
    ),
    "a library's line before a traceback with its rank": (
        f"{WARN}{REG_MR}" + prefixed(f"{TRACE}{NCCL}", "[rank0]: "), "locked memory"
    ),
    "a library's line among the lines of other ranks": (
        f"{WARN}{REG_MR}[rank1]: {PEER}\n" + prefixed(f"{TRACE}{NCCL}", "[rank0]: "), "locked memory"
    ),
    "an error before the clean-up's own": (
        f"{TRACE}{OOM}\n{HANDLING}{TRACE}RuntimeError: cleanup failed", "device memory"
    ),
    "an error before one that is ignored": (
        f"{TRACE}{OOM}\nException ignored in: <function Loader.__del__ at 0x7>\n{TRACE}"
        "AssertionError: can only join a child process",
        "device memory",
    ),
    "an error before one of a thread": (
        f"{TRACE}{OOM}\nException in thread Thread-7:\n{TRACE}EOFError", "device memory"
    ),
    "an error of a thread that ends the program": (
        f"Exception in thread Thread-7:\n{TRACE}{OOM}\n{TRACE}"
        "RuntimeError: Pin memory thread exited unexpectedly",
        "device memory",
    ),
    "a worker of the data loader": (
        f"ERROR: Unexpected bus error encountered in worker. It may be shared memory.\n{TRACE}"
        "RuntimeError: DataLoader worker (pid(s) 81) exited unexpectedly",
        "shared memory",
    ),
    "the error of a child process": (
        f"{TRACE}torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated:\n"
        f"{TRACE}{OOM}",
        "device memory",
    ),
    "an exception of C++": (
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: out of memory\nException raised from malloc at x (most recent call",
        "device memory",
    ),
    "a thread that C++ can't start": (
        "terminate called after throwing an instance of 'std::system_error'\n"
        "  what():  Resource temporarily unavailable\nrun.sh: line 3: 81 Aborted (core dumped)",
        "processes",
    ),
    "a library that aborts": (
        "Libfabric EFA provider has encountered an internal error:\n\n"
        "Libfabric error: (-12) Cannot allocate memory\nYour application will now abort().",
        "locked memory",
    ),
    "a library that exits": ("Error out of memory at line 77 in file /src/x.cu", "device memory"),
    "a library that exits below torchrun": (
        f"Error out of memory at line 77 in file /src/x.cu\n{FAILED}", "device memory"
    ),
    "a library that exits, with the rank before its lines": (
        "1: Error out of memory at line 77 in file /src/x.cu", "device memory"
    ),
    "a signal in torchrun's summary": (
        FAILED + "  traceback : Signal 7 (SIGBUS) received by PID 81\n=====", "shared memory"
    ),
    "a program that prints its error": (f"step 1\n{OOM.partition(': ')[2]}", "device memory"),
    "a shell that can't fork": (
        "run.sh: fork: retry: Resource temporarily unavailable\n"
        "run.sh: fork: Resource temporarily unavailable",
        "processes",
    ),
    "a step of Slurm inside the program": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: n7: task 0: Out Of Memory",
        "host memory",
    ),
    "an error group": (
        '  + Exception Group Traceback (most recent call last):\n  |   File "t.py", line 7\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        f"    | Traceback (most recent call last):\n    |   File \"t.py\", line 7\n    | {OOM}\n"
        "    +------------------------------------",
        "device memory",
    ),
    "a rank's error in torchrun's summary alone": (
        FAILED + f"  traceback : Traceback (most recent call last):\n    File \"t.py\"\n  {OOM}\n=====",
        "device memory",
    ),
    "an error of a task of Ray": (
        f"{TRACE}ray.exceptions.RayTaskError(OutOfMemoryError): ray::train() (pid=81, ip=127.0.0.1)\n"
        f'  File "t.py", line 7, in train\n{OOM}',
        "device memory",
    ),
    "an error before one of Python 3.14 that is ignored": (
        f"{TRACE}{OOM}\nException ignored while calling deallocator <function Loader.__del__>:\n{TRACE}"
        "AttributeError: 'NoneType'",
        "device memory",
    ),
    "an error before one of the log": (
        f"{TRACE}{OOM}\n--- Logging error ---\n{TRACE}ValueError: I/O operation on closed file.\n",
        "device memory",
    ),
    "an error before one of the process that cleans up": (
        f"{TRACE}{OOM}\nTraceback (most recent call last):\n"
        '  File "/x/multiprocessing/resource_tracker.py", line 7, in main\n    cache[x].remove(name)\n'
        "KeyError: '/mp-7'",
        "device memory",
    ),
    "an error before those of peers that wait for it": (
        f"{TRACE}{OOM}\n{TRACE}torch.distributed.DistStoreError: Timed out after 901 seconds waiting "
        f"for clients. 3/4 clients joined.\n{TRACE}torch.distributed.DistNetworkError: The client "
        "socket has timed out after 600000ms while trying to connect to (n1, 7).",
        "device memory",
    ),
    "a library that exits below torchrun 2.3 and later": (
        "Error out of memory at line 77 in file /src/x.cu\n"
        "E1128 10:00:03.0 812 site-packages/torch/distributed/elastic/multiprocessing/api.py:874] failed"
        f" (exitcode: 1) local_rank: 0\n{FAILED}",
        "device memory",
    ),
    "a signal in torchrun's summary below what peers print": (
        f"{TRACE}{PEER}\n{FAILED}  traceback : Signal 7 (SIGBUS) received by PID 81\n=====",
        "shared memory",
    ),
    "a library that exits before what peers print": (
        f"Error out of memory at line 77 in file /src/x.cu\n{TRACE}{PEER}\n{FAILED}", "device memory"
    ),
    "a library that exits below DeepSpeed's launcher": (
        "Error out of memory at line 77 in file /src/x.cu\n"
        "[2026-11-28 10:00:03,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 81\n"
        "[2026-11-28 10:00:03,000] [ERROR] [launch.py:325:sigkill_handler] ['python'] exits with 1",
        "device memory",
    ),
    "advice of OpenBLAS after its error": (
        "OpenBLAS blas_thread_init: pthread_create failed for thread 7 of 64: Resource temporarily\n"
        "OpenBLAS blas_thread_init: or set a smaller OPENBLAS_NUM_THREADS to fit into what you have\n"
        f"{TRACE}KeyboardInterrupt",
        "processes",
    ),
    "a message that goes on with the allocator's": (
        f"{TRACE}RuntimeError: Error in forward of layer 7:\n{OOM.partition(': ')[2]}", "device memory"
    ),
    "a traceback with the colours of Python 3.13": (
        f"{TRACE}\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35mCUDA out of memory. Tried\x1b[0m",
        "device memory",
    ),
    "a line without English words": ("OSError: [Errno 24] Zu viele offene Dateien: '/x'", "open files"),
    "a line with colours": (f"\x1b[31m{OOM}\x1b[0m", "device memory"),
}  # fmt: skip

UNNAMED: Final = {
    "a hint before an error of another kind": f"{HINT}{TRACE}KeyError: 'CUDA'",
    "a warning that was got over": (
        "CUDA OutOfMemoryError encountered during tensors merging. (Error: CUDA out of memory. Tried)"
        f"\n{TRACE}AssertionError: shapes"
    ),
    "a library's line before an error of another kind": f"{WARN}{REG_MR}{TRACE}ValueError: batch size",
    "a library's line far before": f"{WARN}{REG_MR}step 1 of 7\n{TRACE}{NCCL}{CALL}",
    "an earlier error that was caught": f"{TRACE}{OOM}\nsmaller batch\n{TRACE}ValueError: too small",
    "a hint in an error of another kind": (
        f"{TRACE}ValueError: too large a batch; smaller ones help against CUDA out of memory"
    ),
    "an error of another kind that names an earlier one": (
        f"{TRACE}ValueError: batch 64 is taken out: CUDA error: out of memory in run 7"
    ),
    "a hint after the error": f"{TRACE}ValueError: too small\n{HINT}",
    "a kernel's own shared memory": (
        f"{TRACE}triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456"
    ),
    "how libraries are loaded": (
        f"{TRACE}ImportError: /x/libgomp.so.1: cannot allocate memory in static TLS block"
    ),
    "a crash without words": "step 1 of 7\nSegmentation fault (core dumped)",
    "what peers of an unknown error print": f"{PEER}\n{FAILED}",
    "a hint before what peers of an unknown error print": f"{HINT}{TRACE}{PEER}\n{FAILED}",
    "nothing": "",
}  # fmt: skip


def cause_of(text: str, **options: bool) -> FailureCause | None:
    errors = ErrorLines()
    for line in text.split("\n"):
        errors.take(line, 0)
    return errors.cause(0, **{"ended_itself": True, **options})


def resource(text: str) -> str | None:
    cause = cause_of(text)
    return None if cause is None else cause.resource


@pytest.mark.parametrize("name", NAMED)
def test_the_error_that_ended_a_program_names_its_resource(name: str) -> None:
    text, wanted = NAMED[name]
    assert resource(text) == wanted


@pytest.mark.parametrize("name", UNNAMED)
def test_what_is_no_such_error_names_none(name: str) -> None:
    assert resource(UNNAMED[name]) is None


@pytest.mark.parametrize(
    "prefix",
    ["[rank{}]: ", "[default{}]:", "{}: ", " {}: ", "[1,{}]<stderr>:",
     "[node12-4711@1,{}]<stderr>: ", "(Rank pid={}, ip=1.2.3.4) ",
     "node-{}: ", "[default{0}]:[rank{0}]: ", "2026-01-02T03:04:05.678 {}: ",
     "i.train/{0} [default{0}]:[rank{0}]: ", "[20260102 03:04:05][rank-{}/8][ERROR] [x.py:7] : ",
     "2026-01-02 03:04:05,678 ERROR rank {}: "],
)  # fmt: skip
def test_of_ranks_that_share_an_output_the_first_that_names_one_counts(prefix: str) -> None:
    first, other = prefix.format(1), prefix.format(0)
    own = prefixed(f"{TRACE}{OOM}", first).splitlines()
    peer = prefixed(f"{TRACE}{PEER}", other).splitlines()
    mixed = "\n".join(line for both in zip(own, peer, strict=True) for line in both)
    assert resource(f"{mixed}\n{FAILED}") == "device memory"
    innocent = prefixed(f"{HINT}{TRACE}{PEER}", other)
    assert resource(innocent + prefixed(f"{TRACE}ValueError: no", first) + FAILED) is None


def test_a_later_step_shows_that_an_error_was_got_over() -> None:
    errors = ErrorLines()
    for line in (TRACE + OOM).split("\n"):
        errors.take(line, 3)
    assert errors.cause(3, ended_itself=True) == FailureCause("device memory", OOM)
    assert errors.cause(4, ended_itself=True) is None
    errors.take("the end", 4)
    assert errors.cause(4, ended_itself=True) is None


def test_the_last_line_of_a_killed_program_is_no_error() -> None:
    last = "CUDA out of memory. Tried to allocate 7 GiB, trying a smaller batch"
    assert cause_of(last, ended_itself=False) is None


def test_a_flood_of_lines_keeps_the_last_ones() -> None:
    errors = ErrorLines()
    for number in range(20_000):
        errors.take(f"line {number} {'x' * 5000}", 0)
    for line in (TRACE + OOM).split("\n"):
        errors.take(line, 0)
    assert errors.cause(0, ended_itself=True) == FailureCause("device memory", OOM)
