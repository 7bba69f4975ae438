"""Tiles of a legal set against its own columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES
from layout_tuner.search_spaces.spaces import layout_tiles as tiles_module
from layout_tuner.search_spaces.spaces.layout_tiles import layout_tiles
from layout_tuner.search_spaces.spaces.search_space import LegalSet, SearchSpace, enumerate_legal
from tests.search_spaces.spaces.test_legal_set import BOX, TINY, spaces


def assert_tiled(legal: LegalSet) -> None:
    """The tiles hold each layout once and in order, and each group once."""
    positions = []
    for rows, tile, places in layout_tiles(legal):
        positions += range(len(legal))[rows]
        for name in LAYOUT_FIELDS:
            column = np.broadcast_to(getattr(tile, name), tile.shape)
            np.testing.assert_array_equal(np.take(column, places), legal.column(name, rows))
        others = [name for name in LAYOUT_FIELDS if name != "num_microbatches"]
        firsts = tile.firsts()
        groups = set(zip(*(getattr(firsts, name).tolist() for name in others), strict=True))
        if "num_microbatches" in legal.space.choices:
            assert len(groups) == tile.shape[0]
    assert positions == list(range(len(legal)))


@settings(max_examples=20)
@given(space=spaces(), together=st.integers(1, 40), every=st.integers(1, 5))
def test_tiles_hold_each_layout_of_a_legal_set(
    space: SearchSpace, together: int, every: int
) -> None:
    legal = enumerate_legal(space, TINY, BOX, scopes=ALL_SCOPES - {"trainer"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "_TOGETHER", together)
        assert_tiled(legal)
        assert_tiled(legal.only([legal.layout(row) for row in range(0, len(legal), every)]))


def test_a_tile_has_one_row_for_all_numbers_of_micro_batches() -> None:
    numbers = [3, 1, 8, 2, 5]
    space = SearchSpace(
        global_batch_size={"min": 1, "max": 1000}, tp=[1, 2], num_microbatches=numbers
    )
    legal = enumerate_legal(space, TINY, BOX)
    ((_, tile, _),) = layout_tiles(legal)
    assert tile.shape == (2, 5)
    assert tile.tp.shape == (2, 1)
    assert tile.num_microbatches.tolist() == [numbers]
    assert len(legal) == 10


def test_rows_of_a_tile_keep_its_numbers_of_micro_batches() -> None:
    columns = LayoutColumns(
        **{name: np.arange(3)[:, None] for name in LAYOUT_FIELDS}
        | {"num_microbatches": np.array([[1, 2]])}
    )
    some = columns.rows(slice(1, 3))
    assert some.tp.tolist() == [[1], [2]]
    assert some.num_microbatches.tolist() == [[1, 2]]
