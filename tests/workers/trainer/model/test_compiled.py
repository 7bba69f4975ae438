"""torch.compile as an option: the same training, and a clear word where there is no compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.workers.trainer.errors import CompilerMissingError
from layout_tuner.workers.trainer.model.kernels import EAGER, compiled_kernels, use_kernels
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    PP,
    excess_of_steps,
    in_turn,
    make_layout,
    make_shape,
    make_training,
    on_layout,
    over_axes,
)
from tests.workers.trainer.parallel_layers import drawn
from tests.workers.trainer.probes import make_request, measured
from tests.workers.trainer.tolerances import (
    SWIGLU_ROUNDINGS,
    operation_error,
    relative_distance,
    training_tolerance,
)

# torch's compiler warns of torch's own deprecations while it loads.
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def _forget_the_kernels() -> Iterator[None]:
    compiled_kernels.cache_clear()
    if "torch._dynamo" in sys.modules:  # it counts the shapes of all tests of this process
        torch._dynamo.reset()
    yield
    compiled_kernels.cache_clear()


@pytest.mark.slow  # torch's compiler takes seconds to load, and g++ to run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_compute_what_the_eager_ones_do(dtype: torch.dtype) -> None:
    compiled = compiled_kernels("cpu")
    gate_up, x, w = (drawn(*s, seed=i).to(dtype) for i, s in enumerate([(48, 64), (48, 32), (32,)]))
    dy, rstd = drawn(48, 32, seed=3).to(dtype), drawn(48, 1, seed=4).abs()
    cases: dict[str, tuple[Any, ...]] = {
        "swiglu": (gate_up,),
        "swiglu_backward": (gate_up, dy),
        "rms_norm": (x, w),
        "rms_norm_backward": (dy, x, rstd, w),
    }
    for name, arguments in cases.items():
        found, expected = getattr(compiled, name)(*arguments), getattr(EAGER, name)(*arguments)
        if isinstance(found, torch.Tensor):
            found, expected = (found,), (expected,)
        for value, eager in zip(found, expected, strict=True):
            assert value.dtype == eager.dtype
            # Sums over 32 features or 48 tokens. Between two steps the eager ones round to 16 bits,
            # the compiled ones need not.
            allowed = operation_error(dtype, length=48, roundings=SWIGLU_ROUNDINGS)
            assert relative_distance(value, eager) < allowed, name


def steps_of(training: Training, *, compiled: bool) -> tuple[list[float], list[float]]:
    if compiled:
        use_kernels(training.model, compiled_kernels("cpu"))
    stats = [training.step(training.batch(step)) for step in range(5)]
    return [step.loss for step in stats], [step.grad_norm for step in stats]


@pytest.mark.slow
@in_turn(("family", "precision"), ["moe", "llama", "glm", "neox"], ["fp32", "bf16"])
def test_compiled_training_has_the_losses_of_eager_training(
    family: str, precision: Precision
) -> None:
    shape, layout = make_shape(family), make_layout(precision=precision)
    found, expected = (
        steps_of(make_training(shape, layout), compiled=compiled) for compiled in (True, False)
    )
    allowed = training_tolerance(shape, ADAMW, steps=5, precision=precision)
    assert excess_of_steps(found, expected, allowed) <= 1


@pytest.mark.slow
def test_rows_that_routers_send_need_not_be_compiled_for_each_number() -> None:
    """Torch's compiler would give up after eight of them."""
    shape, layout = make_shape("moe"), make_layout(dp=2, ep=2, micro_batch_size=1)
    found, expected = (
        on_layout(layout, partial(steps_of, compiled=compiled), shape)[0]
        for compiled in (True, False)
    )
    assert excess_of_steps(found, expected, training_tolerance(shape, ADAMW, steps=5)) <= 1


@pytest.mark.slow
@over_axes(CUT, PP)
def test_a_compiled_probe_measures_the_same_training(
    axes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing compiled beforehand, and a memory limit of exactly what the layout needs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Shapes of its own: what this process has compiled before, its ranks need not compile.
    shape = make_shape(seq_length=24 if "tp" in axes else 40)
    request = make_request(model=shape, layout=make_layout(**axes))
    eager = measured(request)
    limit = eager.peak_memory_bytes
    compiled = measured(replace(request, compile=True, memory_limit_bytes=limit))
    assert list(tmp_path.rglob("*.so")), "nothing was compiled"
    assert compiled.peak_memory_bytes == eager.peak_memory_bytes
    count = min(len(compiled.iterations), len(eager.iterations))  # warm-up settles when it does
    found, expected = (
        ([i.loss for i in m.iterations[:count]], [i.grad_norm for i in m.iterations[:count]])
        for m in (compiled, eager)
    )
    allowed = training_tolerance(shape, ADAMW, steps=count)
    assert excess_of_steps(found, expected, allowed) <= 1


def test_every_layer_that_has_kernels_is_given_them() -> None:
    training = make_training(make_shape(num_layers=3))
    theirs = type(EAGER)(**{name: getattr(EAGER, name) for name in EAGER.__slots__})
    use_kernels(training.model, theirs)
    given = [m.kernels for m in training.model.modules() if hasattr(m, "kernels")]
    assert len(given) == 3 * 3 + 1, "two norms and a feed-forward a layer, and the final norm"
    assert all(kernels is theirs for kernels in given)


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(CompilerMissingError, match=r"C\+\+ compiler.*install g\+\+"):
        compiled_kernels("cpu")
