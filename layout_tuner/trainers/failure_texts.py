"""What trainers, their libraries and the system print when a resource runs out or a rank has ended.

`FAILURE_TEXTS` is read from its first row to its last, and the first row that matches a line
decides: texts that name a call or a device stand before the general ones that they contain.
Patterns ignore case. The texts were read in the sources of the stated versions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, Literal, NamedTuple

Resource = Literal[
    "device memory",
    "host memory",
    "locked memory",
    "processes",
    "open files",
    "shared memory",
    "disk space",
    "network resources",
    "other",
]
"""A resource that ran out. other: none did, although the text reads as if one had."""

Place = Literal["raise", "library", "launcher"]
"""Lines in which a text counts. raise: of the error that ended the rank. library: a library's error
line directly before it. launcher: at the end of an output without such an error."""

RAISED: Final[tuple[Place, ...]] = ("raise",)
LIBRARY: Final[tuple[Place, ...]] = ("library",)


class FailureText(NamedTuple):
    """A text, as a row of `FAILURE_TEXTS`."""

    resource: Resource
    places: str
    """The `Place`s in which it counts, as words."""
    pattern: str
    """A regular expression that is found in the line."""
    source: str
    """The repository, its file and versions."""
    frames: str = ""
    """A regular expression; the row counts only where it is found in the last frames."""


# fmt: off
FAILURE_TEXTS: Final = (
    # Hints and errors of another kind that contain the words of a row below.
    FailureText("other", "raise library launcher", r"NCCL INFO ", "NCCL 2.3 to 2.30, checks.h: a failure that is ignored"),
    FailureText("other", "raise library launcher", r"CUDA warning: ", "torch 1.x to 2.13, c10/cuda/CUDAException.h: a failure in a destructor"),
    FailureText("other", "raise library launcher", r"OutOfMemoryError encountered during", "Megatron-LM core 0.14 to 0.19, transformer/mlp.py; Megatron-Bridge peft/utils.py: merged on the CPU instead"),
    FailureText("other", "raise", r"cannot allocate memory in static TLS block", "glibc, elf/dl-reloc.c: the order in which libraries are loaded"),
    FailureText("other", "raise", r"OutOfResources: out of resource|inotify watch limit", "Triton 2.0 to 3.x, runtime/errors.py: a kernel's own shared memory; watchdog of Python: fs.inotify"),
    # Host memory where the words are those of a device.
    FailureText("host memory", "raise", r"ray\.exceptions\.OutOfMemoryError|node running low on memory", "Ray 2.2 to 2.5x, its memory monitor"),
    FailureText("host memory", "raise library", r"Failed to CUDA host alloc \d+ bytes", "NCCL 2.14 to 2.30, alloc.h; RCCL: pinned memory"),
    FailureText("host memory", "raise", r"(CUDA|HIP) error: out of memory", "torch 1.x to 2.13, cudaHostAlloc of pinned memory", r"pin_memory|cudaHostRegister"),
    FailureText("host memory", "raise", r"ArrayMemoryError|Unable to allocate [\d.]+ \w+ for an array", "NumPy 1.x and 2.x, _core/_exceptions"),
    FailureText("host memory", "raise", r"DataLoader worker \(pid .*killed by signal: Killed|_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "torch 1.x to 2.13, csrc/DataLoader.cpp; cuDNN 9"),
    # Locked memory and the network's own limits.
    FailureText("locked memory", "raise library", r"Call to ibv_(exp_)?(reg_|create_|alloc_pd)\w* failed with error Cannot allocate memory", "NCCL 2.14 to 2.30, misc/ibvwrap.cc; RCCL"),
    FailureText("network resources", "raise library", r"Call to ibv_(exp_)?(reg_|create_|alloc_pd)\w* failed(?! with)", "NCCL 2.4 to 2.12, misc/ibvwrap.cc: without the reason, which may be locked memory"),
    FailureText("locked memory", "raise library", r"max locked memory \(ulimit -l\)|ibv_(exp_)?reg_mr\(.*failed: Cannot allocate memory|failed to create \w+ QP .*: Cannot allocate memory", "UCX 1.8 to 1.22, uct/ib/base"),
    FailureText("locked memory", "library", r"RLIMIT_MEMLOCK is \d+ bytes|severely limit memory registrations", "rdma-core, libibverbs/init.c: a warning that may precede a failed registration"),
    FailureText("locked memory", "raise library", r"mlock failed to allocate \d+ bytes", "DeepSpeed 0.9 to 0.19, csrc/pin_memory and csrc/aio"),
    FailureText("locked memory", "library launcher", r"Memlock limit: +\d+", "Open MPI 4.x, help-mpi-btl-openib.txt"),
    FailureText("locked memory", "raise library", r"Libfabric error: \(-12\)|efa:mr:.*Cannot allocate memory|Unable to (de-?)?register (MR|memory).*Cannot allocate memory|register memory region.*(Cannot allocate memory|RC: -12)", "libfabric 1.x to 2.6, prov/efa; aws-ofi-nccl 1.x to main of 2026-08"),
    FailureText("locked memory", "raise library", r"cxi(l_map|p_do_map).*(fail\w+: -12\b|Cannot allocate memory)", "libfabric 1.15 to 2.6, prov/cxi/cxip_iomm.c"),
    FailureText("network resources", "raise library", r"cxi.*(No space left on device|(ret|fail\w+): -28\b)|Failed to allocate CP,? ret: -28", "libfabric 1.15 to 2.6, prov/cxi/cxip_cmdq.c: queues of the network card"),
    # Shared memory.
    FailureText("shared memory", "raise library", r"failed to extend /dev/shm/|(creating|attaching to) shared memory segment|Could not map /dev/shm|Call to (posix_fallocate|shm_open|ftruncate) failed ?: No space", "NCCL 2.4 to 2.30, misc/shmutils.cc; RCCL"),
    FailureText("shared memory", "raise library", r"worker.* killed by signal: Bus error|Unexpected bus error encountered in worker", "torch 1.x to 2.13, csrc/DataLoader.cpp"),
    FailureText("open files", "raise", r"unable to open shared memory object .*(Too many open files|\(24\))", "torch 1.x to 2.13, ATen/MapAllocator.cpp"),
    FailureText("host memory", "raise", r"unable to mmap \d+ bytes from file .*(Cannot allocate memory|\(12\))", "torch 1.x to 2.13, ATen/MapAllocator.cpp"),
    FailureText("shared memory", "raise", r"unable to (allocate shared memory|open shared memory object|mmap \d+ bytes|resize file|write to file </torch_).*(No space left|\(28\)|\(shm\))", "torch 1.x to 2.13, ATen/MapAllocator.cpp"),
    FailureText("shared memory", "raise library", r"check that /dev/shm or|\[Errno 28\].*/dev/shm|shared memory limits by 'ipcs -l'", "UCX 1.8 to 1.22, uct/sm/mm; CPython"),
    FailureText("shared memory", "raise", r"\[Errno 28\]|No space left on device", "CPython 3.x, multiprocessing", r"SemLock|shared_memory|shm_open"),
    # Open files, processes and threads.
    FailureText("open files", "raise library launcher", r"\[Errno 2[34]\]|Too many open files", "CPython 3.x, OSError; NCCL, UCX and shells: EMFILE and ENFILE"),
    FailureText("open files", "raise", r"received 0 items of ancdata", "CPython 3.x, multiprocessing/reduction.py"),
    FailureText("processes", "raise", r"can't start new thread", "CPython 3.x, _threadmodule.c"),
    FailureText("processes", "raise library", r"pthread_create failed|Thread creation failed|blas_thread_init: RLIMIT_NPROC", "OpenBLAS 0.3, driver/others/blas_server.c; NCCL 2.29 and 2.30, checks.h; GCC libgomp"),
    FailureText("processes", "library", r"OMP: Error #34:|OMP: System error #11:", "LLVM and Intel OpenMP"),
    FailureText("processes", "launcher", r"fork: Resource temporarily unavailable", "bash 4 and 5, jobs.c"),
    FailureText("processes", "raise", r"(what\(\):|^RuntimeError:)\s+Resource temporarily unavailable", "libstdc++, std::thread; pybind11"),
    FailureText("processes", "raise", r"\[Errno 11\] Resource temporarily unavailable", "CPython 3.x, fork", r"fork|_execute_child|subprocess|start_new_thread"),
    # Disk.
    FailureText("disk space", "raise launcher", r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded", "CPython 3.x, OSError; shells"),
    FailureText("disk space", "raise", r"PytorchStreamWriter failed writing file|inline_container\.cc.*(file write failed|unexpected pos)", "torch 1.x to 2.13, caffe2/serialize/inline_container.cc"),
    # Memory of the device.
    FailureText("device memory", "raise", r"(^|(Error|Exception): )(CUDA|HIP|XPU|NPU|MUSA|MLU|MPS backend) out of memory\b|\b[A-Z]+ out of memory\. Tried to allocate|\bOut of memory allocating [\d,]+ bytes", "torch 1.x to 2.13, CUDACachingAllocator.cpp; CuPy 9 to 13"),
    FailureText("device memory", "raise", r"^(terminate called .*')?[\w.:]*OutOfMemoryError\b", "torch 1.13 to 2.13: torch.cuda.OutOfMemoryError, torch.OutOfMemoryError, c10::OutOfMemoryError"),
    FailureText("device memory", "raise", r"C10 Out of Memory|MODULE:PT_DEVMEM Allocation failed", "torch 2.x, c10; Intel Gaudi"),
    FailureText("device memory", "raise", r"(CUDA|HIP)( driver)? error( \([^)]*\))?: out of memory", "torch 1.x to 2.13, CUDAException.cpp and driver_api.h; Transformer Engine 1.x to 2.18, logging.h; flash-attn 2 and 3"),
    FailureText("device memory", "raise", r"(Triton Error \[\w+\]|Error 2|cuda runtime error \(2\)) ?:.*out of memory", "Triton 2.0 to 3.x, driver.c; torch 1.x to 2.13, cudaGetDeviceCount; torch to 1.4"),
    FailureText("device memory", "raise library", r"(Cuda|HIP|ROCr) (failure|error) (\d+ )?'out of memory'", "NCCL 2.3 to 2.30, checks.h (no number), cudawrap.h and nvls.cc; RCCL"),
    FailureText("device memory", "raise library", r"Failed to CUDA (malloc|calloc)", "NCCL 2.14 to 2.30, alloc.h; RCCL"),
    FailureText("device memory", "raise", r"Failed: CUDA error .*out of memory", "DeepEP 1.x, EPException"),
    FailureText("device memory", "raise", r"(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUDNN|HIPSPARSE|HIPSOLVER)_STATUS_ALLOC_FAILED|_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed|CUFFT_ALLOC_FAILED", "torch 1.x to 2.13, ATen/cuda/Exceptions.h"),
    FailureText("device memory", "raise library", r"cublas (runtime )?Error ?: (the )?resource allocation failed", "Transformer Engine 1.x to 2.18, common/util/logging.h; torch to 1.4"),
    FailureText("device memory", "raise", r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation", "CUDA and HIP, names of errors: CuPy, Numba, JAX, DeepSpeed's operators"),
    FailureText("device memory", "library", r"cuMemAlloc failed: .*out of memory", "aws-ofi-nccl 1.x, nccl_ofi_cuda.cpp"),
    FailureText("device memory", "library", r"^Error out of memory at line \d+ in file", "bitsandbytes 0.3 to 0.50, csrc/compat.cuh: it exits"),
    FailureText("device memory", "raise", r"RESOURCE_EXHAUSTED: .*(out of memory|memory space hbm|Failed to allocate request)", "JAX 0.3 to 0.7, XLA"),
    FailureText("device memory", "library", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES(?!.*Free mem : [1-9]\d{3})", "ROCm 5.x and 6.x, clr/rocdevice.cpp; from 5.7 with the free memory in MB"),
    FailureText("device memory", "raise", r"Workspace can't be allocated, not enough memory", "DeepSpeed 0.6 to 0.19, csrc/transformer/inference"),
    FailureText("device memory", "raise", r"No executable batch size found, reached zero", "accelerate 0.x to 1.15, utils/memory.py: every smaller batch ran out"),
    # Host memory in general words.
    FailureText("host memory", "raise", r"DefaultCPUAllocator|not enough memory: you tried to allocate", "torch 1.x to 2.13, c10/core/impl/alloc_cpu.cpp"),
    FailureText("host memory", "raise", r"^([\w.]+\.)?\w*MemoryError\b|std::bad_alloc", "CPython 3.x; libstdc++"),
    FailureText("host memory", "raise library", r"Failed to malloc \d+ bytes|malloc\(size=\d+\) returned null|MemManager: Failed to allocate", "NCCL 2.14 to 2.30, alloc.h and utils.cc"),
    FailureText("host memory", "raise launcher", r"\[Errno 12\]|can(no|')t allocate memory", "CPython 3.x, OSError; bash; the loader"),
    FailureText("host memory", "launcher", r"Detected \d+ oom[-_]kill event|: tasks? [\d,-]+: Out Of Memory|Exceeded (step|job) memory limit", "Slurm 17.11 to 26.05, task_cgroup_memory.c and srun"),
    FailureText("shared memory", "launcher", r"\bBus error\b|\(SIGBUS\)", "bash; the kernel's SIGBUS: a full /dev/shm"),
)
# fmt: on

SETTINGS: Final[Mapping[Resource, str]] = {
    "host memory": "give the job more memory of the host (Slurm: --mem=0), or use fewer data-loader "
    "workers and less pinned or offloaded memory",
    "locked memory": "set `ulimit -l unlimited` where workers start (Slurm: LimitMEMLOCK=infinity "
    "for slurmd; Docker: --ulimit memlock=-1)",
    "processes": "raise `ulimit -u` where workers start, and the limit of the control group "
    "(systemd: TasksMax; Docker: --pids-limit)",
    "open files": "raise `ulimit -n` where workers start",
    "shared memory": "enlarge /dev/shm (Docker: --shm-size or --ipc=host; Kubernetes: an emptyDir of "
    "medium Memory)",
    "disk space": "free space on the disk that the program writes to, or set TMPDIR to another one",
    "network resources": "look at the limits of the network card, and set `ulimit -l unlimited` where workers "
    "start",
}
"""The setting to change where a host lacks a resource."""


def lacking(resource: Resource) -> str:
    """That a host ran out of a resource, and the setting to change, as the end of a sentence."""
    return f"the host ran out of {resource.removeprefix('host ')}: {SETTINGS[resource]}"


def reason_of(
    resource: Resource | None, *, on_cpu: bool
) -> Literal["out_of_memory", "host_resource"] | None:
    """The failure reason; None: no resource ran out.

    `on_cpu`: the devices are CPU cores, whose memory is the host's.
    """
    if resource is None or resource == "other":
        return None
    is_of_device = resource == "device memory" or (on_cpu and resource == "host memory")
    return "out_of_memory" if is_of_device else "host_resource"


def row_of(line: str, places: Collection[Place], *, frames: str = "") -> FailureText | None:
    """The first row that matches a line in one of these places.

    `frames`: the last frames of the traceback before the line, if there is one.
    """
    for row in FAILURE_TEXTS:
        if not set(row.places.split()).isdisjoint(places) and (
            re.search(row.pattern, line, re.IGNORECASE)
            and (not row.frames or re.search(row.frames, frames))
        ):
            return row
    return None


PEER_ENDED: Final = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "gloo connectfullmesh failed",
    "remote process exited",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "application timeout caused pair closure",
    "socket timeout",
    "wait timeout",
    "nccl communicator was aborted",
    "failed to recv, got 0 bytes",
    "timed out waiting",
    "waiting for clients",
    "client socket has timed out",
    "nccl timeout in",
    "due to a collective timeout from",
)
"""Of gloo, NCCL and torch's store: a consequence of another rank's failure."""


def says_peer_ended(text: str) -> bool:
    """Whether a text contains one of `PEER_ENDED`, in capital or small letters."""
    lowered = text.lower()
    return any(each in lowered for each in PEER_ENDED)
