"""The job knobs of the embedded trainer.

`workers.trainer.trainer_options` reads them; a probe is refused where a knob would change nothing,
so each condition says when it does. Effects without a source are not stated: they start at "no
effect, 15 %".
"""

from __future__ import annotations

from typing import Final

from layout_tuner.search_spaces.jobs.condition import Condition
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect, Touched
from layout_tuner.trainers.trainer_knob import TrainerKnob

_COMPILE: Final = JobKnob(
    name="compile",
    kind="switch",
    values=(False, True),
    default=False,
    when=Condition.read("family == llama"),
    touches=("compute",),
    effects={
        # 1.03 to 1.15 times faster on one process of CPU cores.
        True: KnobEffect(
            factor=0.92, log_sd=0.06, source="docs/explanation/trainer.md, RMSNorm and SwiGLU"
        )
    },
    losses="rounding",
    help="torch.compile of a Llama's RMSNorm and SwiGLU",
)

_ATTENTION: Final = JobKnob(
    name="attention",
    kind="word",
    values=("auto", "own", "fused", "math"),
    default="auto",
    when=Condition.read("cp == 1 or cp_comm_type == a2a"),
    needs=(("own", Condition.read("device == cpu")),),
    touches=("compute",),
    effects={
        # Scores and their mask take 5 a s / h of 34 + 5 a s / h bytes a token and feature, which
        # the fused kernels do not keep. With a head size of 64 and 512 positions, a s / h is 8:
        # 2.2 times as much.
        "math": KnobEffect(
            memory_of="activations",
            memory_factor=2.2,
            memory_log_sd=0.5,
            source="arXiv:2205.05198, equation 2",
        )
    },
    losses="rounding",
    help="kernel of attention: own (on CPUs), fused (torch's), math (all scores in memory)",
)


def _overlap(name: str, touched: Touched, when: str, text: str) -> JobKnob:
    return JobKnob(
        name=f"overlap_{name}",
        kind="switch",
        values=(True, False),
        default=True,
        when=Condition.read(when),
        touches=(touched,),
        help=text,
    )


_OVERLAPS: Final = (
    _overlap(
        "all_reduce",
        "tp",
        "tp_ranks > 1",
        "sums of input gradients over tp beside the weight gradients",
    ),
    _overlap("scatter", "dp", "dp_cp > 1", "sums of gradients over dp beside the backward pass"),
    _overlap(
        "gather",
        "dp",
        "zero_stage == 3 and zero_replicas < dp_cp",
        "gathers of weights (ZeRO-3) beside the layer before",
    ),
)

_BUCKET_ELEMENTS: Final = JobKnob(
    name="bucket_elements",
    kind="count",
    values=(1 << 18, 1 << 20, 1 << 22, 1 << 24),
    default=1 << 22,
    minimum=64,
    maximum=1 << 30,
    when=Condition.read("dp_cp > 1 and (zero_stage < 2 or zero_replicas == dp_cp)"),
    touches=("dp",),
    help="gradients that are summed over dp at once, in elements of 4 bytes",
)

_THREADS: Final = JobKnob(
    name="threads",
    kind="count",
    values=(1, 2, 4),
    default=1,
    minimum=1,
    maximum=1024,
    when=Condition.read("device == cpu"),
    touches=("compute", "optimizer"),
    losses="rounding",
    help="threads of a rank; refused where its devices have fewer cores, as those of local-cpu",
)

_PRODUCTS: Final = JobKnob(
    name="products",
    kind="word",
    values=("measured", "own"),
    default="measured",
    touches=("compute",),
    losses="rounding",
    help="layout of factors of matrix products: their own, or as `calibrate --model` measured it, "
    "without which the knob is refused",
)

EMBEDDED_KNOBS: Final = (
    TrainerKnob(knob=_COMPILE, source="workers/trainer/model/kernels.py"),
    TrainerKnob(knob=_ATTENTION, source="workers/trainer/model/attention.py"),
    *(TrainerKnob(knob=each, source="workers/trainer/comm") for each in _OVERLAPS),
    TrainerKnob(knob=_BUCKET_ELEMENTS, source="workers/trainer/parallel/flat_buffers.py"),
    TrainerKnob(knob=_THREADS, source="workers/trainer/open_training.py"),
    TrainerKnob(knob=_PRODUCTS, source="workers/trainer/product_layouts.py"),
)
