"""Figures with their units."""

from __future__ import annotations

import pytest

from layout_tuner.units import memory


@pytest.mark.parametrize(
    ("value_bytes", "text"),
    [
        (None, "-"),
        (0, "0 KiB"),
        (1 << 20, "1 MiB"),
        (3 << 29, "1.5 GiB"),
        (64 << 30, "64 GiB"),
        ((1 << 40) - 1, "1024 GiB"),
        (1 << 40, "1 TiB"),
    ],
)
def test_memory_is_in_the_largest_unit_that_fits(value_bytes: int | None, text: str) -> None:
    assert memory(value_bytes) == text
