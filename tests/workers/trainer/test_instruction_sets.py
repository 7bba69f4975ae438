"""A sample of the numeric tests under each instruction set that the processor offers.

oneDNN and torch choose their kernels by the instruction set, and each adds up in its own order. The
summary at the end of `make test-slow` lists what ran. Instruction sets for integers alone (VNNI)
are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import INSTRUCTION_SET
from tests.kit.python_process import printed_by, run_python

pytestmark = pytest.mark.ranks

AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
AMX_FLAGS = AVX512_FLAGS | {"amx_tile"}


INSTRUCTION_SETS = [
    ("SSE41", "default", {"sse4_1"}),
    ("AVX2", "avx2", {"avx2", "fma"}),
    ("AVX2_VNNI_2", "avx2", {"avx_ne_convert", "avx_vnni_int8"}),
    ("AVX512_CORE", "avx512", AVX512_FLAGS),
    ("AVX512_CORE_BF16", "avx512", AVX512_FLAGS | {"avx512_bf16"}),
    ("AVX512_CORE_FP16", "avx512", AVX512_FLAGS | {"avx512_fp16"}),
    ("AVX512_CORE_AMX", "avx512", AMX_FLAGS | {"amx_bf16"}),
    ("AVX512_CORE_AMX_FP16", "avx512", AMX_FLAGS | {"amx_fp16"}),
]
"""The most that oneDNN may use, as ONEDNN_MAX_CPU_ISA; what torch's own kernels use, as
ATEN_CPU_CAPABILITY; and what /proc/cpuinfo says of a processor that has it."""

FILES = [
    f"tests/workers/trainer/{name}.py"
    for name in ("model/test_attention", "test_parity", "test_equal_bits")
]
CHOSEN = "not nightly and not gpu"
Record = Callable[[str, object], None]
"""Pytest's fixture `record_property`."""
PARTS = [
    "definition",
    "recomputed_has",
    "one_process",
    "(every_pair and sgd and clipped and fp16)",
    "(every_pair and sgd and tp2 and not bf16)",
    "(changes_no_bit and selective and bf16)",
]
SAMPLE = " or ".join(PARTS)


def processor_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", path.read_text(), re.M) if path.is_file() else None
    return set(found[1].split()) if found else set()


@pytest.fixture(autouse=True)
def _no_outer_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)


def run_sample(record: Record, name: str, *options: str, **environment: str) -> None:
    """Runs the sample in a process of its own, and records pytest's last line."""
    record(INSTRUCTION_SET, f"{name}: failed")
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    words = ("-q", "-p", "no:cacheprovider", *options, "-m", CHOSEN, "-k", SAMPLE, *FILES)
    done = run_python(program, *words, timeout_s=300.0, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    record(INSTRUCTION_SET, f"{name}: {done.stdout.splitlines()[-1]}")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("onednn", "aten", "flags"), INSTRUCTION_SETS)
def test_the_numbers_are_right_under_every_instruction_set(
    onednn: str, aten: str, flags: set[str], record_property: Record
) -> None:
    name = f"{onednn} (torch's own kernels: {aten})"
    missing = sorted(flags - processor_flags())
    if missing:
        why = f"the processor lacks {', '.join(missing)}"
        record_property(INSTRUCTION_SET, f"{name}: not run, {why}")
        pytest.skip(why)
    run_sample(record_property, name, ONEDNN_MAX_CPU_ISA=onednn, ATEN_CPU_CAPABILITY=aten)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_numbers_are_right_with_the_other_library_s_products(record_property: Record) -> None:
    """fp32 products by MKL where the default is oneDNN, as on AMD's processors, or the reverse."""
    plugin = ("-p", "tests.workers.trainer.other_library")
    run_sample(record_property, "fp32 products by the other library", *plugin)


@pytest.mark.slow
def test_every_part_of_the_sample_selects_tests() -> None:
    """Else a renamed test would leave the sample unseen."""
    program = (
        "import json, sys, pytest\n"
        "parts, arguments = map(json.loads, sys.argv[1:])\n"
        "ends = {part: pytest.main([*arguments, '-k', part]) for part in parts}\n"
        "print(json.dumps(ends))"
    )
    parts = [*PARTS, "no_test_has_this_name"]
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", CHOSEN, *FILES]
    told = printed_by(program, json.dumps(parts), json.dumps(arguments))
    ends = json.loads(told.splitlines()[-1])
    assert ends.pop("no_test_has_this_name") == pytest.ExitCode.NO_TESTS_COLLECTED
    assert ends == dict.fromkeys(PARTS, pytest.ExitCode.OK)


@pytest.mark.skipif(
    "sse4_1" not in processor_flags(),
    reason="the processor lacks sse4_1: it has no x86 instruction set to be limited to",
)
def test_a_limited_instruction_set_is_really_another_one() -> None:
    """Else the tests above would run the same kernels again and again."""
    program = (
        "import torch; print(torch.backends.cpu.get_cpu_capability())\n"
        "x = torch.ones(2, 2); torch.ops.mkldnn._linear_pointwise(x, x, None, 'none', [], '')"
    )
    limits = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    told = printed_by(program, **limits, ONEDNN_VERBOSE="1")
    assert told.splitlines()[0] in {"DEFAULT", "NO AVX"}, told
    assert "isa:Intel SSE4.1" in told
