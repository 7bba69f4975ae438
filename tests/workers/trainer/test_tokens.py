"""Synthetic tokens: the same global batch under every layout, with something to learn."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from search_spaces.spec.layout import Layout
from tests.workers.trainer.cases import make_shape
from workers.trainer.batches import SyntheticTokens, cut_batch

SHAPE = make_shape(seq_length=64, vocab_size=128)


def global_batch(layout: Layout, *, seed: int = 0, step: int = 0) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for dp_rank in range(layout.dp):
        source = SyntheticTokens(shape=SHAPE, seed=seed)
        batch = cut_batch(source, layout, step=step, dp_rank=dp_rank)
        length = layout.micro_batch_size * SHAPE.seq_length
        assert batch.ids_MT.shape == (layout.num_microbatches, length)
        rows += [tuple(row) for row in batch.ids_MT.view(-1, SHAPE.seq_length).tolist()]
    return rows


def test_every_layout_consumes_the_same_global_batch() -> None:
    layouts = [
        Layout(dp=dp, micro_batch_size=mbs, num_microbatches=16 // dp // mbs)
        for dp, mbs in itertools.product((1, 2, 4), (1, 2, 4))
    ]
    batches = [sorted(global_batch(layout)) for layout in layouts]
    assert all(batch == batches[0] for batch in batches)
    assert len(set(batches[0])) == 16, "samples repeat"


def test_steps_and_seeds_give_other_tokens_and_the_same_ones_again() -> None:
    layout = Layout(micro_batch_size=4)
    assert global_batch(layout) == global_batch(layout)
    assert not set(global_batch(layout)) & set(global_batch(layout, step=1))
    assert not set(global_batch(layout)) & set(global_batch(layout, seed=1))


def tokens_and_targets(steps: int) -> tuple[Tensor, Tensor]:
    layout = Layout(micro_batch_size=16)
    source = SyntheticTokens(shape=SHAPE, seed=0)
    batches = [cut_batch(source, layout, step=i, dp_rank=0) for i in range(steps)]
    ids = torch.cat([batch.ids_MT.flatten() for batch in batches])
    return ids, torch.cat([batch.targets_MT.flatten() for batch in batches])


def test_a_target_is_the_next_token() -> None:
    source = SyntheticTokens(shape=SHAPE, seed=0)
    batch = cut_batch(source, Layout(micro_batch_size=2), step=0, dp_rank=0)
    ids, targets = batch.ids_MT.view(2, -1), batch.targets_MT.view(2, -1)
    assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_a_token_tells_its_successor_most_of_the_time() -> None:
    ids, targets = tokens_and_targets(20)
    counts = torch.zeros(SHAPE.vocab_size, SHAPE.vocab_size)
    counts.index_put_((ids, targets), torch.ones(len(ids)), accumulate=True)
    assert 0.75 < float(counts.amax(1).sum() / counts.sum()) < 0.9
    assert int(ids.max()) < SHAPE.vocab_size
    frequencies = torch.bincount(ids, minlength=SHAPE.vocab_size).float().sort().values
    assert float(frequencies[-32:].sum() / frequencies.sum()) > 0.4, "frequent words are frequent"
