"""The levers of memory: recomputation by module and layer, unequal stages, 16-bit optimizer states.

The first two change no bit of the training. With the last it is that of a plain Adam whose moments
are rounded after each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as limits
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.adamw import adamw

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.pipeline_layout import layout_text
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES, violations
from layout_tuner.workers.trainer.open_training import unsupported
from layout_tuner.workers.trainer.parallel import optimizer
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    COLUMNS,
    CUT,
    DP,
    PP,
    TP,
    VPP,
    ZERO,
    ZERO_2,
    ZERO_3,
    assert_bitwise_equal,
    make_layout,
    make_shape,
    on_layout,
    train,
)
from tests.workers.trainer.knob_pairs import (
    MACHINE,
    Values,
    layout_of,
    random_runs,
    settings_of,
    shape_of,
)

pytestmark = pytest.mark.ranks

STEPS = 3
"""What differs once differs from then on."""
LATE, BF16 = {"schedule": "zero_bubble"}, {"precision": "bf16"}
RING, A2A = ({"cp": 2, "cp_comm_type": kind} for kind in ("p2p", "a2a"))
MODULES = ("core_attention", "mlp", "moe_act", "layernorm")
"""Those that the trainer runs of any model."""
ALL = {"recompute": "+".join(MODULES)}
DENSE = {"num_dense_layers": 1}

Case = tuple[str, int, dict[str, Any], dict[str, Any]]


def recompute(what: str, layers: str = "all") -> dict[str, str]:
    return {"recompute": what, "recompute_layers": layers}


RECOMPUTED: list[Case] = [
    ("gpt", 2, recompute("mlp"), {}),
    ("llama", 2, recompute("layernorm"), {}),
    ("moe", 2, ALL, {}),
    ("llama", 2, recompute("mlp+layernorm", "1"), TP),
    ("gpt", 2, recompute("mlp+layernorm"), CUT),
    ("llama", 2, recompute("layernorm"), CUT | ZERO_3),
    ("gpt", 2, recompute("mlp+layernorm"), COLUMNS | TP),
    ("moe", 2, recompute("mlp+layernorm"), CUT | {"etp": 2}),
    ("moe", 2, recompute("layernorm"), DP | {"ep": 2}),
    ("llama", 4, recompute("full", "1"), PP),
    ("gpt", 4, recompute("full", "2/0"), PP | ZERO_2),
    ("llama", 4, recompute("mlp+layernorm", "1/2"), PP | LATE),
    ("moe", 4, recompute("full", "1"), PP | LATE | ZERO_3),
    ("moe", 4, recompute("layernorm", "1"), VPP),
    ("gpt", 4, recompute("core_attention+mlp", "1"), PP | {"schedule": "gpipe"} | BF16),
    ("llama", 2, ALL, RING),
    ("moe", 2, recompute("core_attention+layernorm"), A2A),
    ("gpt", 2, ALL, ZERO | {"precision": "fp16"}),
]
"""Family, layers, what is recomputed, and what it is changed beside."""


def stages(*layers: int, **beside: Any) -> dict[str, Any]:
    return {"pipeline_layout": layout_text(layers), **beside}


UNEQUAL: list[Case] = [
    ("llama", 4, stages(3, 1), PP),
    ("gpt", 4, stages(1, 3), PP | ZERO_3),
    ("moe", 4, stages(0, 4), PP | DP),  # the embedding alone
    ("llama", 4, stages(4, 0), PP | CUT),  # the loss alone
    ("gpt", 8, stages(0, 5, 3, 0), {"pp": 4}),
    ("llama", 8, stages(3, 1, 2, 2), VPP),
    ("moe", 4, stages(1, 1, 2, 0), VPP | ZERO_2),
    ("llama", 4, stages(3, 1), PP | LATE),
    ("gpt", 4, stages(1, 3), PP | {"schedule": "gpipe"} | BF16),
    ("moe", 4, stages(3, 1), PP | LATE | CUT),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "num_layers", "change", "beside"), RECOMPUTED, ids=str)
def test_recomputing_parts_changes_no_bit(
    family: str, num_layers: int, change: dict[str, Any], beside: dict[str, Any]
) -> None:
    assert_no_change(family, num_layers, change, beside)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "num_layers", "change", "beside"), UNEQUAL, ids=str)
def test_unequal_stages_change_no_bit(
    family: str, num_layers: int, change: dict[str, Any], beside: dict[str, Any]
) -> None:
    assert_no_change(family, num_layers, change, beside)


def assert_no_change(
    family: str, num_layers: int, change: dict[str, Any], beside: dict[str, Any]
) -> None:
    dense = DENSE if family == "moe" else {}
    shape = make_shape(family, num_layers=num_layers, tied_embeddings=family == "gpt", **dense)
    layout = make_layout(**beside | change)
    assert layout != make_layout(**beside)
    assert_bitwise_equal(
        train(shape, layout, steps=STEPS), train(shape, make_layout(**beside), steps=STEPS)
    )


@st.composite
def levers(draw: st.DrawFn) -> tuple[Values, Layout]:
    """A random run, and its layout with random levers that the trainer's rules allow."""
    values = draw(random_runs())
    layout = layout_of(values)
    own = (*MODULES, "mla_up_proj") if shape_of(values).kv_lora_rank else MODULES
    modules = draw(st.sets(st.sampled_from(own), min_size=1))
    what = draw(st.sampled_from(["full", "+".join(modules)]))
    counts = st.lists(st.integers(0, 3), min_size=layout.pp, max_size=layout.pp)
    layers = draw(st.just("all") | counts.map(lambda each: "/".join(map(str, each))))
    changes = recompute(what, layers)
    if layout.pp > 1 and not values["clipped"]:  # the order of the norm's sum is that of the stages
        num_layers, num_stages = shape_of(values).num_layers, layout.pp * layout.vpp
        size = {"min_size": num_stages - 1, "max_size": num_stages - 1}
        cuts = draw(st.lists(st.integers(0, num_layers), unique=True, **size))
        ends = [0, *sorted(cuts), num_layers]
        each = [end - start for start, end in itertools.pairwise(ends)]
        changes |= {"pipeline_layout": layout_text(each), "pipeline_split": "layers"}
    return values, replace(layout, **changes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    [pytest.param(16, marks=pytest.mark.slow), pytest.param(80, marks=pytest.mark.nightly)],
)
def test_random_levers_change_no_bit(number: int) -> None:
    @limits(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(levers())
    def train_both(drawn: tuple[Values, Layout]) -> None:
        values, layout = drawn
        shape, settings, balanced = shape_of(values), settings_of(values), values["balanced"]
        assume(not violations(layout, shape, MACHINE, scopes=ALL_SCOPES - {"machine", "redundant"}))
        found, expected = (
            train.__wrapped__(shape, each, settings, STEPS, balanced_routing=balanced)
            for each in (layout, layout_of(values))
        )
        assert_bitwise_equal(found, expected)

    train_both()


STATES = {"optimizer_states": "bf16"}


def round_moments(training: Training) -> None:
    for moment in (*training.optimizer.first_moments, *training.optimizer.second_moments):
        moment.copy_(moment.bfloat16())


def trained(
    layout: Layout, clip: float | None, after_step: Callable[[Training], None] = lambda _: None
) -> list[tuple[list[float], list[bytes]]]:
    """Losses and the bits of the master weights of each rank."""

    def work(training: Training) -> tuple[list[float], list[bytes]]:
        losses = []
        for step in range(STEPS):
            losses.append(training.step(training.batch(step)).loss)
            after_step(training)
        return losses, [master.numpy().tobytes() for master in training.optimizer.masters]

    return on_layout(layout, work, settings=replace(ADAMW, clip_grad_norm=clip))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "beside",
    [{}, DP, ZERO, ZERO_2, ZERO_3 | TP, PP | BF16, ZERO | {"precision": "fp16"}, CUT | ZERO_2],
    ids=str,
)
def test_16_bit_states_are_fp32_ones_that_are_rounded(
    beside: dict[str, Any], clip: float | None
) -> None:
    layout = make_layout(**beside)
    found = trained(replace(layout, **STATES), clip)
    assert found == trained(layout, clip, round_moments)
    assert found != trained(layout, clip), "rounding shows in so few steps"


class PlainAdam:
    """torch's AdamW of whole parameters, whose moments are rounded to bf16 after each step."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = [weight.detach().clone() for weight in weights]
        self.moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
        self.steps = [torch.tensor(0.0) for _ in weights]

    def step(self, gradients: list[Tensor]) -> None:
        adamw(
            *(self.weights, gradients, *self.moments, [], self.steps),
            fused=True,
            lr=ADAMW.learning_rate,
            beta1=ADAMW.beta1,
            beta2=ADAMW.beta2,
            eps=ADAMW.epsilon,
            weight_decay=ADAMW.weight_decay,
            amsgrad=False,
            maximize=False,
        )
        for moment in itertools.chain(*self.moments):
            moment.copy_(moment.bfloat16())


def test_16_bit_states_move_weights_as_a_plain_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole parameters, where the trainer updates parts of buckets that hold several."""
    monkeypatch.setattr(optimizer, "_ROUNDED_ELEMENTS", 192)

    def work(training: Training) -> list[bool]:
        parameters = [slot.parameter for slot in training.flat.slots]
        plain, equal = PlainAdam(parameters), list[bool]()
        for step in range(STEPS):
            training.step(training.batch(step))
            plain.step([parameter.main_grad for parameter in parameters])
            pairs = zip(parameters, plain.weights, strict=True)
            equal.append(all(torch.equal(own, other) for own, other in pairs))
        return equal

    assert on_layout(make_layout(**STATES), work) == [[True] * STEPS]


@pytest.mark.parametrize(
    "knobs",
    [{"offload": "activations"}, {"offload": "optimizer"}, {"recompute": "mlp+mla_up_proj"}],
    ids=str,
)
def test_what_it_does_not_run_is_refused_by_name(knobs: dict[str, str]) -> None:
    ((name, value),) = knobs.items()
    (reason,) = unsupported(make_layout(**knobs), make_shape())
    assert reason.startswith(f"{name}={value}: ")
