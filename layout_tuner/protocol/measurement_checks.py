"""A measurement beside the request of its probe and the memory of a device.

`Measurement` itself refuses figures that contradict each other. The worker makes these checks of a
program's reports, and the service of every measurement.
"""

from __future__ import annotations

from typing import Final

from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.predictions.estimates.peak_memory import parts_by_stage
from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED
from layout_tuner.predictions.statistics.step_times import MAX_EXTRA_WARMUP
from layout_tuner.protocol.measurement import Measurement, refuse_unequal
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.units import memory

_MEMORY_MARGIN: Final = 1.25
"""Largest peak as a share of the stated memory of a device: descriptions round, and state GB where
devices have GiB (7 % more)."""
_PROCESS_BYTES: Final = 3 << 30
"""Memory beyond it of programs: libraries and mapped files, which no limit covers."""


def refuse_contradictions(
    measured: Measurement,
    request: ProbeRequest,
    *,
    device_memory_bytes: int,
    may_be_shortened: bool,
) -> None:
    """Refuses a measurement that is not of the requested probe, or not of such a device.

    `device_memory_bytes` is as the cluster's description states it.

    Raises:
        OutcomeInvalidError: a figure contradicts the request or the device; the message has both.
    """
    layout, model = request.layout, request.model
    is_embedded = measured.trainer == EMBEDDED_TRAINER
    warmup, asked = measured.num_warmup, request.iterations
    stages = len(measured.peak_memory_bytes_by_stage)
    num_timed = len(measured.iterations) - warmup
    # Other trainers may drop or pad sequences: they count what they consumed.
    routing = request.balanced_routing if model.num_experts else None
    tokens, said = layout.global_batch_size * model.seq_length, measured.tokens_per_step
    is_fewer = said < tokens and not is_embedded and measured.tokens == "counted"
    peak = measured.peak_memory_bytes
    least = least_memory_bytes(request, is_sampled=measured.memory_kind == "sampled")
    largest = max((peak, *measured.peak_reserved_bytes_by_stage))
    most = device_memory_bytes * _MEMORY_MARGIN + (0 if is_embedded else _PROCESS_BYTES)
    for holds, field, problem in (
        (
            measured.iterations_asked == asked,
            "iterations_asked",
            f"{measured.iterations_asked} is not the number of timed iterations that the probe was "
            f"asked for, {asked}",
        ),
        (
            # Lines of another trainer may stand for several steps, and steps that it skipped count
            # as warm-up.
            request.warmup <= warmup <= request.warmup + MAX_EXTRA_WARMUP
            or (not is_embedded and request.warmup <= warmup),
            "iterations",
            f"{warmup} iterations of warm-up are not {request.warmup} to "
            f"{request.warmup + MAX_EXTRA_WARMUP}",
        ),
        (
            not measured.shortened or (may_be_shortened and num_timed >= LEAST_TIMED),
            "shortened",
            f"{num_timed} of {asked} iterations were timed; this probe is never stopped "
            + (f"before {LEAST_TIMED}" if may_be_shortened else "early"),
        ),
        (
            said == tokens or is_fewer,
            "tokens_per_step",
            f"{said} tokens are not those of the layout, {tokens} "
            f"(dp*micro_batch_size*num_microbatches*seq_length={layout.dp}"
            f"*{layout.micro_batch_size}*{layout.num_microbatches}*{model.seq_length})",
        ),
        (
            stages == layout.pp or (stages == 0 and not is_embedded),
            "peak_memory_bytes_by_stage",
            f"there is the peak memory of {stages} stages; the layout has pp={layout.pp}",
        ),
        (
            not is_embedded or measured.balanced_routing is routing,
            "balanced_routing",
            f"{str(measured.balanced_routing).lower()} is not what the probe was to do, "
            f"{str(routing).lower()}; its losses and times would not be those of the other layouts",
        ),
        (
            largest <= most,
            "peak_memory_bytes",
            f"{memory(largest)} is more than the device has, {memory(device_memory_bytes)} as it is "
            "described; report bytes of one device, or correct the cluster's description",
        ),
        (
            peak >= least,
            "peak_memory_bytes",
            f"{memory(peak)} is less than a rank of the layout certainly holds, {memory(int(least))}",
        ),
    ):
        if not holds:
            raise OutcomeInvalidError(problem, field=field)
    rate = f"tokens_per_s={measured.tokens_per_s}"
    speed = Throughput(
        model=model,
        layout=layout,
        tokens_per_s=measured.tokens_per_s,
        peak_tflops_per_device=measured.peak_tflops_per_device,
    )
    of_devices = f"{rate} over the {layout.num_devices} devices of the layout"
    refuse_unequal(
        measured,
        tokens_per_s_per_device=(speed.tokens_per_s_per_device, of_devices),
        model_tflops_per_device=(speed.model_tflops_per_device, f"those of {rate}"),
        hardware_tflops_per_device=(speed.hardware_tflops_per_device, f"those of {rate}"),
    )


def least_memory_bytes(request: ProbeRequest, *, is_sampled: bool = False) -> float:
    """Bytes that the fullest rank certainly holds.

    Ranks of the embedded trainer hold weights, gradients and optimizer states: of what ZeRO shards
    their own share, and two whole layers. Other trainers may shard or offload all of it but the
    block that is computed, at a byte a parameter. Samples may miss every peak.
    """
    layout, model = request.layout, request.model
    if request.trainer == EMBEDDED_TRAINER:
        return float(parts_by_stage(layout, model).states.max())
    largest = max(each.shape.num_layer_parameters for each in model.kinds)
    return 0.0 if is_sampled else largest / layout.num_devices
