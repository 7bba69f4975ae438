"""Knobs of torchtitan.

Sources: TT is torchtitan at b5bcd76c; the published times are those of its folder `benchmarks`.
"""

from __future__ import annotations

from typing import Final

from layout_tuner.search_spaces.jobs.condition import Condition
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.trainers.trainer_knob import VALUE, TrainerKnob, Writing

_COMPILE: Final = TrainerKnob(
    knob=JobKnob(
        name="compile",
        kind="switch",
        values=(False, True),
        default=False,
        touches=("compute", "host"),
        effects={
            True: KnobEffect(
                # 5,762 and 6,667 tokens/s on 8 H100, 5,605 and 6,514 on 128; 82.4 and 77.0 GiB,
                # 67.0 and 62.0 GiB.
                factor=0.86,
                log_sd=0.06,
                memory_factor=0.93,
                memory_log_sd=0.02,
                source="TT llama3_h100_202412_torchtitan.md: Llama 3.1 8B",
            )
        },
        losses="rounding",
        help="torch.compile of each block and of the loss",
    ),
    source="config/configs.py, CompileConfig.enable",
    writings=(Writing(keys={"compile.enable": True}),),
)


def _async_tp(section: str) -> TrainerKnob:
    return TrainerKnob(
        knob=JobKnob(
            name="async_tp",
            kind="switch",
            values=(False, True),
            default=False,
            when=Condition.read("tp > 1 and sequence_parallel and compile"),
            touches=("tp",),
            effects={
                True: KnobEffect(
                    # 1.09 and 1.10 times the tokens/s at tp=8, of which about a quarter of the step
                    # is exposed communication of tp: 1 - 0.25 (1 - f) = 0.917.
                    factor=0.67,
                    log_sd=0.25,
                    source="TT asyncTP_llama3_h100_2025-06_torchtitan.md: Llama 3.1 8B and 70B",
                )
            },
            losses="rounding",
            help="tensor parallel communication in pieces beside the products",
        ),
        source="config/configs.py, enable_async_tensor_parallel",
        writings=(Writing(keys={f"{section}.enable_async_tensor_parallel": True}),),
    )


def _memory_budget(*, has_mode: bool) -> TrainerKnob:
    keys = {"activation_checkpoint.memory_budget": f"0.{VALUE}"}
    mode = {"activation_checkpoint.mode": "memory_budget"} if has_mode else {}
    return TrainerKnob(
        knob=JobKnob(
            name="memory_budget",
            kind="count",
            values=(100, 75, 50, 25),
            default=100,
            minimum=10,
            maximum=100,
            when=Condition.read("recompute == none and compile"),
            touches=("compute",),
            help="per cent of the compiled model's activations that are kept; 100: all",
        ),
        source="distributed/activation_checkpoint.py, MemoryBudgetAC",
        writings=(Writing(keys={**mode, **keys}),),
    )


_CUDA_GRAPHS: Final = TrainerKnob(
    knob=JobKnob(
        name="cuda_graphs",
        kind="switch",
        values=(False, True),
        default=True,
        when=Condition.read("pp == 1"),
        touches=("host", "compute"),
        help="the forward and backward pass as one graph; off: as before 0.3",
    ),
    source="config/configs.py, TrainingConfig.disable_cuda_graphs",
    writings=(Writing(keys={"training.disable_cuda_graphs": True}),),
)

TORCHTITAN_0_2_KNOBS: Final = (_COMPILE, _async_tp("parallelism"), _memory_budget(has_mode=True))
TORCHTITAN_KNOBS: Final = (
    _COMPILE,
    _async_tp("compile"),
    _memory_budget(has_mode=False),
    _CUDA_GRAPHS,
)
"""Of 0.3 and main."""
