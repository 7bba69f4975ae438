"""The table of texts: what each row reads, and lines that no row may take for a lack of memory."""

from __future__ import annotations

from typing import Final

import pytest

from layout_tuner.trainers.failure_texts import (
    FAILURE_TEXTS,
    SETTINGS,
    Place,
    lacking,
    reason_of,
    row_of,
)

PLACES: Final[tuple[Place, ...]] = ("raise", "library", "launcher")
WARN: Final = "node3:71:88 [2] misc/file.cc:7 NCCL WARN "
SHM: Final = "RuntimeError: unable to "
PINNED: Final = "return data.pin_memory(device)"
FORKS: Final = 'File "subprocess.py", line 9, in _execute_child'

SAMPLES: Final = {
    "other": (
        "node3:71:88 [2] NCCL INFO init.cc:9 Cuda failure 'out of memory'",
        "[W1 x.cpp] Warning: CUDA warning: out of memory (function destroyEvent)",
        "CUDA OutOfMemoryError encountered during tensors merging. (Error: CUDA out of memory.)",
        "ImportError: /usr/lib/libgomp.so.1: cannot allocate memory in static TLS block",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 99000",
        "OSError: [Errno 28] inotify watch limit reached",
    ),
    "host memory": (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        f"{WARN}Failed to CUDA host alloc 8192 bytes",
        ("RuntimeError: CUDA error: out of memory", PINNED),
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 PiB for an array with shape",
        "RuntimeError: DataLoader worker (pid 81) is killed by signal: Killed.",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        f"{SHM}mmap 4096 bytes from file </torch_7_1_2>: Cannot allocate memory (12)",
        "RuntimeError: err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 7",
        "MemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        f"{WARN}Failed to malloc 77 bytes",
        "OSError: [Errno 12] Cannot allocate memory",
        "run.sh: fork: Cannot allocate memory",
        "slurmstepd: error: Detected 2 oom_kill events in StepId=71.0.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 71.0 cgroup.",
        "srun: error: node3: task 2: Out Of Memory",
    ),
    "locked memory": (
        f"{WARN}Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        f"{WARN}Call to ibv_create_qp failed with error Cannot allocate memory errno 12",
        "ib_md.c:99  UCX  ERROR ibv_reg_mr(address=0x7, length=1) failed: Cannot allocate memory",
        "ib_x.c:9  UCX  ERROR failed to create RC QP TX wr:7: Cannot allocate memory",
        "UCX  ERROR x: Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)",
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.",
        "mlock failed to allocate 8192 bytes with error no 12 msg Cannot allocate memory",
        "  Memlock limit: 65536",
        "Libfabric error: (-12) Cannot allocate memory",
        f"{WARN}NET/OFI Unable to register memory (type = 1). RC: 12, Error: Cannot allocate memory",
        "libfabric:7:16::cxi:mr:cxip_do_map():9<warn> nid: cxil_map() failed: -12",
    ),
    "network resources": (
        f"{WARN}Call to ibv_reg_mr failed",
        "libfabric:7:16::cxi:core:cxip_cmdq_alloc():9<warn> Failed to allocate CP, ret: -28",
    ),
    "shared memory": (
        f"{WARN}Error: failed to extend /dev/shm/nccl-7q to 99 bytes",
        f"{WARN}Error while creating shared memory segment /dev/shm/nccl-7q (size 99)",
        f"{WARN}Call to posix_fallocate failed : No space left on device",
        "RuntimeError: DataLoader worker (pid 81) is killed by signal: Bus error. It is possible",
        f"{SHM}open shared memory object </torch_7> in read-write mode: No space left on device (28)",
        f"{SHM}write to file </torch_7_1>: No space left on device (28)",
        f"{SHM}allocate shared memory(shm) for file </torch_7_1>: Success",
        "UCX  ERROR check that /dev/shm or the directory you specified has more available memory",
        "OSError: [Errno 28] No space left on device: '/dev/shm/psm_7'",
        ("OSError: [Errno 28] No space left on device", "self._semlock = SemLock(kind, value)"),
        "run.sh: line 7:    81 Bus error               python train.py",
    ),
    "open files": (
        f"{SHM}open shared memory object </torch_7> in read-write mode: Too many open files (24)",
        "OSError: [Errno 24] Too many open files: '/data/part-7'",
        "RuntimeError: received 0 items of ancdata",
    ),
    "processes": (
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 7 of 64",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OMP: Error #34: System unable to allocate necessary resources for OMP thread:",
        f"{WARN}Call to pthread_create failed: Resource temporarily unavailable",
        "run.sh: fork: Resource temporarily unavailable",
        "  what():  Resource temporarily unavailable",
        "RuntimeError: Resource temporarily unavailable",
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", FORKS),
    ),
    "disk space": (
        "OSError: [Errno 28] No space left on device: '/scratch/part-7'",
        "OSError: [Errno 122] Disk quota exceeded",
        "RuntimeError: PytorchStreamWriter failed writing file data/7: file write failed",
    ),
    "device memory": (
        "RuntimeError: CUDA out of memory. Tried to allocate 7.00 GiB (GPU 0; 9 GiB total)",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 7.00 GiB.",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 7,000 bytes",
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'",
        "torch.cuda.OutOfMemoryError: Allocation on device",
        "RuntimeError: C10 Out of Memory. Trying to allocate 7 bytes",
        "RuntimeError: MPS backend out of memory (MPS allocated: 7.00 GB, max allowed: 9.07 GB).",
        "RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::7 (7)MB",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: Triton Error [HIP]:  Code: 2, Messsage: out of memory",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 2: out of memory",
        "RuntimeError: cuda runtime error (2) : out of memory at /x/THCStorage.cu:58",
        "CUDA error (/x/flash_fwd_launch_template.h:188): out of memory",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "RuntimeError: cublas runtime error : resource allocation failed at /x/THCGeneral.cpp:411",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: /x/y.cu:7 in function f: CUDA Error: out of memory",
        f"{WARN}Cuda failure 'out of memory'",
        "Cuda failure 2 'out of memory'",
        f"{WARN}HIP failure 'out of memory'",
        f"{WARN}Failed to CUDA calloc async 99 bytes",
        "deep_ep_cpp.EPException: Failed: CUDA error x.cu:7 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: HIPBLAS_STATUS_ALLOC_FAILED",
        "RuntimeError: /x/y.cu:7 in function gemm: cuBLAS Error: the resource allocation failed",
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] CUDA_ERROR_OUT_OF_MEMORY",
        "RuntimeError: hipErrorOutOfMemory",
        f"{WARN}NET/OFI cuMemAlloc failed: out of memory",
        "Error out of memory at line 77 in file /src/csrc/ops.cu",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying",
        ":0:rocdevice.cpp :7: Callback: HSA_STATUS_ERROR_OUT_OF_RESOURCES. Available Free mem : 0 MB",
        "RuntimeError: Workspace can't be allocated, not enough memory.",
        "RuntimeError: No executable batch size found, reached zero.",
    ),
}
"""By resource, lines in the form of what the sources print; beside a line its last frames."""

CASES: Final = [
    (resource, *(line if isinstance(line, tuple) else (line, "")))
    for resource, lines in SAMPLES.items()
    for line in lines
]


@pytest.mark.parametrize(("resource", "line", "frames"), CASES)
def test_a_line_names_its_resource(resource: str, line: str, frames: str) -> None:
    row = row_of(line, PLACES, frames=frames)
    assert row is not None
    assert row.resource == resource


def test_every_row_decides_some_line_and_has_a_source() -> None:
    deciding = {row_of(line, PLACES, frames=frames) for _, line, frames in CASES}
    assert [row for row in FAILURE_TEXTS if row not in deciding] == []
    assert all(row.source and set(row.places.split()) <= set(PLACES) for row in FAILURE_TEXTS)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: out of patience",
        "RuntimeError: micro-batch-size must be 1 (larger ones end in CUDA out of memory)",
        f"{WARN}Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1",
        "3 CUDA OOM errors thrown.",
        "7 CUDA memory allocation retries.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "ncclSystemError: System call or external library call failed or device error.",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "RESOURCE_EXHAUSTED: Received message larger than max (7 vs. 4)",
        "Memory access fault by GPU node-4 on address 0x7.",
        "Flattening param group 0 took longer (insufficient memory)",
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF",
    ],
)
def test_other_lines_name_no_resource(line: str) -> None:
    assert row_of(line, PLACES) is None


def test_the_hosts_memory_is_the_devices_on_a_cpu_alone() -> None:
    assert reason_of("host memory", on_cpu=True) == "out_of_memory"
    assert reason_of("host memory", on_cpu=False) == "host_resource"
    assert reason_of("device memory", on_cpu=False) == "out_of_memory"
    assert reason_of("other", on_cpu=True) is None
    for resource in SETTINGS:
        assert reason_of(resource, on_cpu=False) == "host_resource"
    assert "`ulimit -l unlimited` where workers start" in lacking("locked memory")
