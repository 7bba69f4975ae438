"""A rank gets exactly the device that the launcher chose, whatever the node's environment says.

The runtimes are modelled: which devices each would show, for an environment and a node's devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from layout_tuner.workers.errors import DeviceHiddenError
from layout_tuner.workers.ranks.visible_devices import (
    CUDA,
    HIP,
    ROCR,
    rank_variables,
    ray_variables,
    with_variables,
)

NUM_DEVICES = 4
ALL = [f"GPU-{index:04x}" for index in range(NUM_DEVICES)]
NOTHING = ["", "-1", "NoDevFiles"]


def filtered(devices: Sequence[str], names: str | None) -> list[str]:
    """One level of a runtime: reads a list up to the first entry that names no device."""
    if names is None:
        return list(devices)
    seen: list[str] = []
    for name in names.split(","):
        if name.isdecimal() and int(name) < len(devices):
            device = devices[int(name)]
        elif name in devices:
            device = name
        else:
            break
        if device not in seen:
            seen.append(device)
    return seen


def seen_by_rocm(environment: Mapping[str, str]) -> list[str]:
    """HSA reads its variable if it is set at all; HIP takes an empty one for unset."""
    below = filtered(ALL, environment.get(ROCR))
    return filtered(below, environment.get(HIP) or environment.get(CUDA) or None)


def seen_by_cuda(environment: Mapping[str, str]) -> list[str]:
    return filtered(ALL, environment.get(CUDA))


def without_lists_that_hide_all(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value not in NOTHING}


def lists(entries: Sequence[str]) -> st.SearchStrategy[str]:
    some = st.lists(st.sampled_from(entries), min_size=1, max_size=NUM_DEVICES, unique=True)
    return some.map(",".join) | st.sampled_from(NOTHING)


NUMBERS = [str(index) for index in range(NUM_DEVICES)]
ANY_LIST = lists(NUMBERS) | lists(ALL)
ENVIRONMENTS = st.fixed_dictionaries({}, optional={ROCR: ANY_LIST, HIP: ANY_LIST, CUDA: ANY_LIST})
CHOSEN = st.lists(st.integers(0, NUM_DEVICES - 1), min_size=1, max_size=3, unique=True)
"""Devices of a rank: its own, or those of the ranks of its group on the node."""
ON_FRONTIER = {ROCR: "0,1,2,3"}
AS_SLURM_SETS_WITHOUT_FLAGS = {ROCR: "2,3", CUDA: "2,3"}


def names_a_hidden_device(environment: Mapping[str, str]) -> bool:
    """Whether the upper list has a UUID that the lower one hides: only the device could tell."""
    given = without_lists_that_hide_all(environment)
    shown = filtered(ALL, given.get(ROCR))
    upper = given.get(HIP) or given.get(CUDA) or ""
    return any(entry in ALL and entry not in shown for entry in upper.split(","))


def devices_of_the_node(environment: Mapping[str, str]) -> list[str]:
    """What a launcher counts on: all that is shown once lists that hide everything are left out."""
    given = without_lists_that_hide_all(environment)
    return seen_by_rocm(given) or filtered(ALL, given.get(ROCR))


@given(ENVIRONMENTS, CHOSEN)
@example(ON_FRONTIER, [3])
@example(AS_SLURM_SETS_WITHOUT_FLAGS, [1, 0])
@example({ROCR: "", HIP: "", CUDA: ""}, [2])
def test_rocm_shows_a_rank_only_its_devices(environment: dict[str, str], chosen: list[int]) -> None:
    assume(not names_a_hidden_device(environment))
    given = devices_of_the_node(environment)
    if max(chosen) >= len(given):
        with pytest.raises(DeviceHiddenError, match=r"device \d of this node is hidden"):
            rank_variables(chosen, environment)
        return
    of_rank = with_variables(environment, rank_variables(chosen, environment))
    assert seen_by_rocm(of_rank) == [given[index] for index in chosen]
    assert not {of_rank.get(name) for name in (ROCR, HIP, CUDA)} & set(NOTHING)


@given(st.fixed_dictionaries({}, optional={CUDA: ANY_LIST}), CHOSEN)
def test_cuda_shows_a_rank_only_its_devices(environment: dict[str, str], chosen: list[int]) -> None:
    given = seen_by_cuda(without_lists_that_hide_all(environment))
    if max(chosen) >= len(given):
        with pytest.raises(DeviceHiddenError, match=r"CUDA_VISIBLE_DEVICES=.* shows"):
            rank_variables(chosen, environment)
        return
    of_rank = with_variables(environment, rank_variables(chosen, environment))
    assert seen_by_cuda(of_rank) == [given[index] for index in chosen]


@given(ENVIRONMENTS, CHOSEN)
@example(ON_FRONTIER, [3])
def test_a_rank_over_ray_sees_only_its_devices(
    environment: dict[str, str], chosen: list[int]
) -> None:
    assume(not names_a_hidden_device(environment))
    given = devices_of_the_node(environment)
    assume(max(chosen) < len(given))
    of_ray = with_variables(environment, ray_variables(environment))
    assert ROCR not in of_ray  # Ray raises where it is set and HIP's is not
    assert "" not in of_ray.values()
    of_rank = with_variables(of_ray, rank_variables(chosen, of_ray))
    assert seen_by_rocm(of_rank) == [given[index] for index in chosen]


def test_a_device_that_the_batch_system_hides_is_named_with_what_it_shows() -> None:
    with pytest.raises(DeviceHiddenError) as hidden:
        rank_variables([5], {ROCR: "0,1,2,3"})
    assert str(hidden.value).startswith(
        "device 5 of this node is hidden: ROCR_VISIBLE_DEVICES=0,1,2,3 shows 4; ask the batch system"
    )


def test_numbers_in_hips_list_count_within_rocrs_and_names_are_kept() -> None:
    assert rank_variables([1], {CUDA: "MIG-aa,MIG-bb"})[CUDA] == "MIG-bb"
    assert rank_variables([1], {ROCR: "4,6", HIP: "1,0"})[HIP] == "0"
    assert rank_variables([1], {ROCR: "4,6"}) == {ROCR: "4,6", HIP: "1", CUDA: "1"}
    assert ray_variables({ROCR: "4,6", HIP: "1,0"})[HIP] == "6,4"
