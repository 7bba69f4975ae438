"""What a rank sees of its node, as a function of what its zygote sees."""

from __future__ import annotations

import pytest

from workers.forked_rank import visible_device


def test_a_rank_sees_its_own_device_alone() -> None:
    assert visible_device(3, {}) == {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_the_index_counts_among_the_devices_that_a_batch_system_gave(name: str) -> None:
    assert visible_device(1, {name: "4,6"})[name] == "6"
    assert visible_device(0, {name: "GPU-aa,GPU-bb"})[name] == "GPU-aa"


def test_an_empty_list_is_none() -> None:
    assert visible_device(2, {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == "2"


def test_the_filter_below_is_left_as_it_is() -> None:
    assert "ROCR_VISIBLE_DEVICES" not in visible_device(0, {"ROCR_VISIBLE_DEVICES": "1"})
