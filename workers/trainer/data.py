"""Synthetic tokens with something to learn in them: a noisy bigram.

A walk over ranks of words: the next rank is the last one plus one, except that now and then the
walk jumps, mostly to frequent words. A permutation drawn from the seed gives ranks their token
ids. A model first learns the frequencies, then the successor.
"""

# ruff: noqa: N815 (tensors carry their shape in the name: M micro-batches, T tokens of one)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.random import default_rng
from numpy.typing import NDArray
from torch import Tensor

from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape

JUMP_PROBABILITY: Final = 0.2
_SKEW: Final = 4
"""Power of the uniform draw that a jump lands on: low ranks are frequent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One replica's tokens of one step, by micro-batch."""

    ids_MT: Tensor
    """Inputs: num_microbatches rows of micro_batch_size * seq_length tokens."""
    targets_MT: Tensor
    """The token that follows each input."""


def make_batch(
    shape: ModelShape,
    layout: Layout,
    *,
    seed: int,
    step: int,
    dp_rank: int,
    device: torch.device | None = None,
) -> Batch:
    """One replica's share of the global batch, which is the same under every layout.

    Replica r takes the samples r * n to (r + 1) * n - 1 of the step, n being its share.
    """
    share = layout.micro_batch_size * layout.num_microbatches
    permutation = default_rng((seed, 0)).permutation(shape.vocab_size)
    samples = np.stack(
        [_sample(shape, seed=seed, step=step, index=dp_rank * share + i) for i in range(share)]
    )
    tokens = torch.from_numpy(permutation[samples]).to(device)
    return Batch(
        ids_MT=tokens[:, :-1].reshape(layout.num_microbatches, -1),
        targets_MT=tokens[:, 1:].reshape(layout.num_microbatches, -1),
    )


def _sample(shape: ModelShape, *, seed: int, step: int, index: int) -> NDArray[np.int64]:
    """seq_length + 1 ranks of words: a function of the seed, the step and the sample alone."""
    generator = default_rng((seed, 1, step, index))
    size = shape.seq_length + 1
    jumps = generator.random(size) < JUMP_PROBABILITY
    jumps[0] = True
    landed = (shape.vocab_size * generator.random(size) ** _SKEW).astype(np.int64)
    position = np.arange(size)
    last_jump = np.maximum.accumulate(np.where(jumps, position, 0))
    ranks: NDArray[np.int64] = (landed[last_jump] + position - last_jump) % shape.vocab_size
    return ranks
