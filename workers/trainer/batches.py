"""Batches of a layout, and synthetic tokens: a noisy bigram.

Synthetic tokens contain a pattern that a model can learn. A sequence walks over words numbered by
frequency: the next word's number is one higher, except that the walk jumps with a probability of
`JUMP_PROBABILITY`, mostly to frequent words. A permutation drawn from the seed maps the numbers to
token ids. A model first learns the frequencies, then the successor.
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

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.rank_mesh import sequence_chunks
from layout_tuner.search_spaces.models.model_shape import ModelShape

JUMP_PROBABILITY: Final = 0.2
_SKEW: Final = 4
"""Exponent of the uniform number that gives a jump's target: low numbers are frequent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A rank's tokens of one step, by micro-batch."""

    ids_MT: Tensor
    """Inputs: num_microbatches rows of micro_batch_size * seq_length / cp tokens."""
    targets_MT: Tensor
    """The token that follows each input."""


class SampleSource(Protocol):
    """A source of tokens: the samples of each step's global batch, by index."""

    def samples(self, step: int, indices: range) -> NDArray[np.int64]:
        """Samples of a step's global batch by their index in it: seq_length + 1 tokens each.

        They depend on step and index only, so that every layout trains on the same samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticTokens:
    """Samples of a noisy bigram, which depend on seed, step and index only."""

    shape: ModelShape
    seed: int

    def samples(self, step: int, indices: range) -> NDArray[np.int64]:
        permutation = default_rng((self.seed, 0)).permutation(self.shape.vocab_size)
        ranks = [_sample(self.shape, seed=self.seed, step=step, index=i) for i in indices]
        return permutation[np.stack(ranks)]


def cut_batch(
    source: SampleSource,
    layout: Layout,
    *,
    step: int,
    dp_rank: int,
    cp_rank: int = 0,
    device: torch.device | None = None,
) -> Batch:
    """A rank's share of the global batch, which is the same in every layout.

    Replica r takes the samples r * n to (r + 1) * n - 1 of the step, n being its share. Each of its
    context-parallel ranks takes its chunks of every one of them.
    """
    share = layout.micro_batch_size * layout.num_microbatches
    samples = source.samples(step, range(dp_rank * share, (dp_rank + 1) * share))
    tokens = torch.from_numpy(samples).to(device)
    ids, targets = (
        own_chunks(of, layout.cp, cp_rank, dim=1) for of in (tokens[:, :-1], tokens[:, 1:])
    )
    return Batch(
        ids_MT=ids.reshape(layout.num_microbatches, -1),
        targets_MT=targets.reshape(layout.num_microbatches, -1),
    )


def own_chunks(whole: Tensor, cp: int, cp_rank: int, *, dim: int = 0) -> Tensor:
    """The positions of a context-parallel rank, of a tensor with those of whole sequences."""
    if cp == 1:
        return whole
    chunks = whole.chunk(2 * cp, dim)
    return torch.cat([chunks[index] for index in sequence_chunks(cp, cp_rank)], dim)


def _sample(shape: ModelShape, *, seed: int, step: int, index: int) -> NDArray[np.int64]:
    """seq_length + 1 word numbers, which depend on seed, step and index only."""
    generator = default_rng((seed, 1, step, index))
    size = shape.seq_length + 1
    jumps = generator.random(size) < JUMP_PROBABILITY
    jumps[0] = True
    landed = (shape.vocab_size * generator.random(size) ** _SKEW).astype(np.int64)
    position = np.arange(size)
    last_jump = np.maximum.accumulate(np.where(jumps, position, 0))
    return (landed[last_jump] + position - last_jump) % shape.vocab_size
