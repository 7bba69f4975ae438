"""Batches, cut for a layout, and the synthetic tokens that fill them: a noisy bigram.

Synthetic tokens have something to learn in them. A walk over ranks of words: the next rank is the
last one plus one, except that now and then the walk jumps, mostly to frequent words. A permutation
drawn from the seed gives ranks their token ids. A model first learns the frequencies, then the
successor.
"""

# ruff: noqa: N815 (tensors carry their shape in the name: M micro-batches, T tokens of one)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

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


class SampleSource(Protocol):
    """Where tokens come from: numbered samples of every step's global batch."""

    def samples(self, step: int, indices: range) -> NDArray[np.int64]:
        """Samples of a step's global batch by their index in it: seq_length + 1 tokens each.

        They depend on the step and the index alone, so that every layout trains on the same.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticTokens:
    """A noisy bigram's samples, a function of the seed, the step and the index alone."""

    shape: ModelShape
    seed: int

    def samples(self, step: int, indices: range) -> NDArray[np.int64]:
        """Samples of a step's global batch by their index in it: seq_length + 1 tokens each."""
        permutation = default_rng((self.seed, 0)).permutation(self.shape.vocab_size)
        ranks = [_sample(self.shape, seed=self.seed, step=step, index=i) for i in indices]
        tokens: NDArray[np.int64] = permutation[np.stack(ranks)]
        return tokens


def make_batch(
    shape: ModelShape,
    layout: Layout,
    *,
    seed: int,
    step: int,
    dp_rank: int,
    device: torch.device | None = None,
) -> Batch:
    """One replica's share of a step's synthetic tokens."""
    source = SyntheticTokens(shape=shape, seed=seed)
    return cut_batch(source, layout, step=step, dp_rank=dp_rank, device=device)


def cut_batch(
    source: SampleSource,
    layout: Layout,
    *,
    step: int,
    dp_rank: int,
    device: torch.device | None = None,
) -> Batch:
    """One replica's share of the global batch, which is the same under every layout.

    Replica r takes the samples r * n to (r + 1) * n - 1 of the step, n being its share.
    """
    share = layout.micro_batch_size * layout.num_microbatches
    samples = source.samples(step, range(dp_rank * share, (dp_rank + 1) * share))
    tokens = torch.from_numpy(samples).to(device)
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
