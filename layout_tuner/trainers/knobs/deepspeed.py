"""Knobs of DeepSpeed's engines: keys below `zero_optimization` in ds_config.json.

The defaults are those of DeepSpeed 0.19.8, and `overlap_comm` as the exports write it. The memory
is that of one run with ZeRO-2 (DeepSpeed's issue 1302): 21,152 MB with all defaults and
overlap_comm, 20,198 without overlap_comm, 19,247 without contiguous_gradients, 19,625 and 19,284
with buckets of 100 and 10 million elements.
"""

from __future__ import annotations

from typing import Any, Final

from layout_tuner.search_spaces.jobs.condition import Condition
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.trainers.trainer_knob import VALUE, TrainerKnob, Writing

_ISSUE: Final = "DeepSpeed's issue 1302: one run with ZeRO-2"
_MB: Final = 1e6


def _knob(
    name: str, key: str, written: Any, when: str, default: JobValue, **more: Any
) -> TrainerKnob:
    return TrainerKnob(
        knob=JobKnob(
            **{"values": (False, True)} | more,
            name=name,
            kind="switch" if isinstance(default, bool) else "count",
            default=default,
            when=Condition.read(when),
            touches=("dp",),
        ),
        source=f"runtime/zero/config.py, {key}",
        writings=(Writing(keys={f"zero_optimization.{key}": written}),),
    )


def _saved(megabytes: int) -> KnobEffect:
    return KnobEffect(memory_bytes=-megabytes * _MB, memory_log_sd=0.03, source=_ISSUE)


DEEPSPEED_KNOBS: Final = (
    _knob(
        "overlap_comm",
        "overlap_comm",
        False,
        "zero_stage >= 2 and dp > 1",
        default=True,
        effects={False: _saved(21_152 - 20_198)},
        help="reduction of gradients beside the backward pass, with a second bucket",
    ),
    _knob(
        "reduce_bucket_millions",
        "reduce_bucket_size",
        f"{VALUE}000000",
        "zero_stage >= 1 and dp > 1",
        default=500,
        values=(500, 100, 10),
        minimum=1,
        effects={100: _saved(21_152 - 19_625), 10: _saved(21_152 - 19_284)},
        help="millions of elements that are reduced together",
    ),
    _knob(
        "allgather_bucket_millions",
        "allgather_bucket_size",
        f"{VALUE}000000",
        "zero_stage in [1, 2] and dp > 1",
        default=500,
        values=(500, 5000, 50_000),
        minimum=1,
        effects={
            # The gather at a step's end took 1.4 s in place of 2.6; it is half of the exchange.
            50_000: KnobEffect(factor=0.77, log_sd=0.3, source="DeepSpeed's issue 3338")
        },
        help="millions of elements of the updated weights that are gathered together",
    ),
    _knob(
        "contiguous_gradients",
        "contiguous_gradients",
        False,
        "zero_stage >= 1 and dp > 1",
        default=True,
        effects={False: _saved(21_152 - 19_247)},
        help="gradients are copied to one buffer as they are computed",
    ),
)
