#!/bin/bash
# Tensors that a torch.autograd.Function keeps as attributes of ctx outlive its backward pass.
#
# Version: torch 2.13.0 (CPU), Function.apply and Tensor.backward.
# Behaviour: with save_for_backward, a node's tensor is freed as soon as the node's backward pass has
# run. With `ctx.factor = factor` it is alive until the whole graph is, although the same
# backward() frees the graph. A chain of 8 blocks that keep buffers as attributes (what is recomputed,
# what is gathered) so has all 8 at once in the middle of the backward pass.
# Seen: in the backward pass of the first of the chain, 0 of 8 tensors are alive with
# save_for_backward, and 8 of 8 with attributes; after it, 8 while the loss is.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import sys
import weakref

import numpy
import torch


class Times(torch.autograd.Function):
    """Multiplies by a factor that it keeps for its backward pass in one of two ways."""

    @staticmethod
    def forward(ctx, x, factor, as_attribute):
        ctx.as_attribute = as_attribute
        if as_attribute:
            ctx.factor = factor
        else:
            ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        factor = ctx.factor if ctx.as_attribute else ctx.saved_tensors[0]
        return gradient * factor, None, None


class Count(torch.autograd.Function):
    """Counts in its backward pass which of some buffers are alive."""

    @staticmethod
    def forward(ctx, x, buffers, counts):
        ctx.buffers, ctx.counts = buffers, counts
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.counts.append(alive(ctx.buffers))
        return gradient, None, None


def alive(buffers):
    return sum(each() is not None for each in buffers)


def counted(as_attribute):
    buffers, counts = [], []
    y = Count.apply(torch.ones(4, requires_grad=True), buffers, counts)
    for _ in range(8):
        array = numpy.full(4, 2.0, dtype=numpy.float32)  # lives as long as the tensor's memory
        buffers.append(weakref.ref(array))
        y = Times.apply(y, torch.from_numpy(array), as_attribute)
        del array
    loss = y.sum()
    del y
    loss.backward()
    counts.append(alive(buffers))
    del loss
    return [*counts, alive(buffers)]


found = {"save_for_backward": counted(False), "attribute of ctx": counted(True)}
for way, counts in found.items():
    print(f"torch {torch.__version__}: {way}: alive at the chain's begin, after it, later: {counts}")
sys.exit(found != {"save_for_backward": [0, 0, 0], "attribute of ctx": [8, 8, 0]})
PROGRAM
