"""The options that a training runs with: what a job's knobs came to.

An option that changes nothing in a job is left out: its knob had no effect.
"""

# ruff: noqa: N806 (tensors carry their shape in the name, as in `model.attention`)

from __future__ import annotations

from collections.abc import Mapping

import torch

from layout_tuner.documents.reading import shown
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.workers.trainer.errors import TrainerOptionInvalidError
from layout_tuner.workers.trainer.model.attention import (
    HeadSizes,
    attention_window,
    running_kernel,
)
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES
from layout_tuner.workers.trainer.trainer_options import AttentionKernel
from layout_tuner.workers.trainer.training import Training


def options_in_effect(training: Training, *, has_layouts: bool = False) -> dict[str, JobValue]:
    """What each option came to in this job, by name; the same on every rank of a layout.

    - compile: SwiGLU is compiled, and RMSNorm where no two ranks divide its features.
    - overlaps: where there is the communication that they are about.
    - attention: the kernel that runs; not where ranks of cp merge blocks of one kernel.
    - bucket_elements: where a bucket is not a layer, and its gradients are summed over ranks. Left
      out if the job states none.
    - threads: on CPUs.
    - products: where there are measured layouts of matrix products (`has_layouts`).
    """
    mesh, shape = training.mesh, training.shape
    layout, options = mesh.layout, mesh.options
    sums = any(copies.size > 1 for copies in mesh.every_copies)
    found: dict[str, JobValue] = {}
    norms_heads = shape.qk_norm is True or (shape.qk_norm == "width" and layout.tp == 1)
    has_rms_norms = not shape.has_layer_norms and layout.tp_columns == 1
    if shape.activation_of == "swiglu" or has_rms_norms or norms_heads:
        found["compile"] = options.compile
    if layout.tp * layout.tp_columns > 1:
        found["overlap_all_reduce"] = options.overlap_all_reduce
    if sums:
        found["overlap_scatter"] = options.overlap_scatter
    if mesh.shards_weights:
        found["overlap_gather"] = options.overlap_gather
    if layout.cp == 1 or layout.cp_comm_type == "a2a":
        found["attention"] = _attention_kernel(training)
    if sums and not mesh.shards_gradients and options.bucket_elements is not None:
        found["bucket_elements"] = options.bucket_elements
    if training.device.type == "cpu":
        found["threads"] = torch.get_num_threads()
    if has_layouts:
        found["products"] = options.products
    return found


def refuse_without_effect(knobs: Mapping[str, JobValue], found: Mapping[str, JobValue]) -> None:
    """Raises TrainerOptionInvalidError for a knob that is not among the options in effect.

    Its measurement would count for a value that did not run.
    """
    for name, value in knobs.items():
        if name not in found:
            raise TrainerOptionInvalidError(
                f"the knob {JobSettings({name: value}).words} changes nothing in this layout, for "
                "this model and device; leave it out"
            )
        if (ran := found[name]) != value:
            raise TrainerOptionInvalidError(
                f"the knob {name}={shown(value)} is not obeyed here: {shown(ran)} would run; leave "
                "it out"
            )


def _attention_kernel(training: Training) -> AttentionKernel:
    """The kernel of all layers; of layers with and without a window, one that is not the choice."""
    shape, layout, device = training.shape, training.mesh.layout, training.device
    choice, dtype = training.mesh.options.attention, COMPUTE_DTYPES[layout.precision]
    kernels = set[AttentionKernel]()
    for kind in shape.kinds:
        if not kind.shape.has_softmax_attention:
            continue
        heads = HeadSizes.of(kind.shape, layout.tp)
        sizes = (1, shape.seq_length, sum(heads.widths))
        qkv_BSW = torch.empty(sizes, dtype=dtype, device=device, requires_grad=True)
        for window in {shape.window_of(layer) for layer in kind.layers}:
            seen = None if window is None else attention_window(shape.seq_length, window, device)
            kernels.add(running_kernel(qkv_BSW, heads, seen, choice))
    return max(kernels, key=lambda kernel: (kernel != choice, kernel))
