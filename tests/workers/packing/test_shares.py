"""A share is a contiguous run of one node's devices."""

from __future__ import annotations

import pytest

from workers.packing.request import Share


def test_a_share_is_contiguous_and_ascending() -> None:
    assert Share(node=3, devices=(4, 5)).devices == (4, 5)
    assert Share.of_first(3, 2) == Share(node=3, devices=(0, 1))


@pytest.mark.parametrize("devices", [(), (0, 2), (1, 0), (-1, 0), (1, 1)])
def test_anything_else_is_refused(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Share(node=0, devices=devices)


def test_a_share_is_of_a_node() -> None:
    with pytest.raises(ValueError, match="node=-1"):
        Share(node=-1, devices=(0,))
