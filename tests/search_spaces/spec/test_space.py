from __future__ import annotations

import re
from typing import Any

import pytest

from search_spaces.errors import SpaceInvalidError
from search_spaces.spec.batch import GlobalBatch
from search_spaces.spec.presets.spaces import resolve_space
from search_spaces.spec.space import SearchSpace

WIDE = {"from": 1, "to": 1000}


def test_a_knob_is_a_scalar_a_list_or_a_range() -> None:
    space = SearchSpace(
        global_batch_size=64,
        tp=2,
        pp=[4, 1],
        micro_batch_size={"from": 4, "to": 20, "step": 8},
        num_nodes={"from": 1, "to": 40, "times": 3},
        vpp={"from": 3, "to": 5},
        dp=range(1, 4),
    )
    assert space.values("tp") == (2,)
    assert space.values("pp") == (4, 1)
    assert space.values("micro_batch_size") == (4, 12, 20)
    assert space.values("num_nodes") == (1, 3, 9, 27)
    assert space.values("vpp") == (3, 4, 5)
    assert space.values("dp") == (1, 2, 3)
    assert space.num_combinations == 1 * 2 * 3 * 4 * 3 * 3


PLAIN = SearchSpace(global_batch_size=16)


def test_knobs_left_out_take_their_defaults_and_dp_and_accumulation_are_derived() -> None:
    assert PLAIN.to_mapping() == {
        "global_batch_size": 16,
        **dict.fromkeys(("num_nodes", "tp", "pp", "vpp", "micro_batch_size", "zero_replicas"), 1),
        "zero_stage": 0,
        "recompute": "none",
        "sequence_parallel": False,
        "precision": "fp32",
        "allow_tp_across_nodes": False,
    }
    assert SearchSpace(global_batch_size=16, pipeline_split="layers") == PLAIN
    assert PLAIN.to_mapping(every_knob=True)["pipeline_split"] == "layers"
    for choices in ("head", ["layers", "embedding"]):  # a new knob is stated if it is a choice
        space = SearchSpace(global_batch_size=16, pipeline_split=choices)
        assert space.to_mapping() == PLAIN.to_mapping() | {"pipeline_split": choices}
        assert SearchSpace.from_mapping(space.to_mapping()) == space


def test_a_space_survives_the_round_trip() -> None:
    bounded = {
        "global_batch_size": {"min": 4, "max": 8},
        "num_microbatches": {"from": 1, "to": 8, "times": 2},
        "dp": [1, 2],
        "recompute": ["none", "full"],
        "sequence_parallel": [False, True],
        "precision": ["bf16"],
        "allow_tp_across_nodes": True,
    }
    for mapping in (bounded, {"global_batch_size": {"max": 8}, "num_microbatches": [1, 2]}):
        space = SearchSpace.from_mapping(mapping)
        assert SearchSpace.from_mapping(space.to_mapping()) == space


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tpp": 2}, "unknown knob 'tpp' (did you mean 'tp'?); choose from global_batch_size, "),
        ({"num_gpus": 2}, "unknown knob 'num_gpus'"),
        ({"tp": []}, "tp: the list is empty; leave the knob out for its default"),
        ({"tp": [1, 2, 1]}, "tp: 1 is listed more than once"),
        ({"tp": True}, "tp: True is not a whole number of at least 1"),
        ({"tp": "2"}, "tp: '2' is not a whole number of at least 1"),
        ({"tp": [1, 2.0]}, "tp: 2.0 is not a whole number of at least 1"),
        ({"tp": 0}, "tp: 0 is not a whole number of at least 1"),
        ({"tp": 1 << 40}, "tp: 1099511627776 is more than 1048576, the largest"),
        ({"tp": None}, "tp: the value is null; leave it out for its default"),
        ({"tp": [[1]]}, "tp: [1] is not a whole number"),
        ({"tp": {"from": 1}}, "tp: the range {'from': 1} has no 'to'"),
        ({"tp": {"from": 4, "to": 1}}, "tp: the range runs from 4 down to 1"),
        ({"tp": {"from": 1, "to": 8, "step": 0}}, "tp.step: 0 is not a whole number of at least 1"),
        ({"tp": {"from": 1, "to": 8, "times": 1}}, "tp.times: 1 is not a whole number of at least"),
        ({"tp": {"from": 1, "to": 8, "times": 2, "step": 1}}, "has both step and times"),
        ({"tp": {"from": 1, "to": 8, "by": 2}}, "tp: unknown range field 'by'"),
        ({"tp": {"from": 1, "to": 1 << 20}}, "tp: 1048576 values are more than 4096"),
        ({"tp": {1: 2}}, "tp: the range has the key 1, which is not a string"),
        ({"zero_stage": 4}, "zero_stage: 4 is not one of 0, 1, 2, 3"),
        ({"zero_stage": True}, "zero_stage: True is not one of 0, 1"),
        ({"zero_stage": {"from": 1, "to": 1}}, "zero_stage: {'from': 1, 'to': 1} is not a value"),
        ({"recompute": "some"}, "recompute: 'some' is not one of none, selective, full"),
        ({"recompute": ["full", None]}, "recompute: None is not one of none, selective, full"),
        ({"sequence_parallel": 1}, "sequence_parallel: 1 is not true or false"),
        ({"precision": ["fp4"]}, "precision: 'fp4' is not one of fp32, bf16, fp16, fp8"),
        ({"allow_tp_across_nodes": "yes"}, "allow_tp_across_nodes: 'yes' is not true or false"),
        ({"global_batch_size": 0}, "global_batch_size: 0 is not a whole number of at least 1"),
        ({"global_batch_size": [16]}, "global_batch_size: [16] is not a whole number"),
        ({"global_batch_size": {"min": 4}}, "global_batch_size: {'min': 4} has no max"),
        ({"global_batch_size": {"min": 4, "max": 2}}, "min=4 is more than max=2"),
        ({"global_batch_size": {"maximum": 4}}, "global_batch_size: unknown bound 'maximum'"),
        ({"global_batch_size": {"min": "a", "max": 4}}, "global_batch_size: min='a' is not a who"),
        ({"global_batch_size": ...}, "global_batch_size: there is none; tokens/s grow with the"),
        ({"num_microbatches": [1, 2]}, "num_microbatches: global_batch_size is fixed at 16"),
        ({"global_batch_size": {"max": 16}}, "num_microbatches: global_batch_size is bounded (1 t"),
        ({"tp": WIDE, "pp": WIDE, "micro_batch_size": WIDE}, "1000000000 combinations"),
    ],
)
def test_an_impossible_value_is_refused_with_its_knob_and_itself(
    knobs: dict[str, Any], message: str
) -> None:
    stated = {"global_batch_size": 16, **knobs}
    with pytest.raises(SpaceInvalidError, match=re.escape(message)):
        SearchSpace.from_mapping(
            {name: value for name, value in stated.items() if value is not ...}
        )


def test_a_preset_may_be_changed_knob_by_knob() -> None:
    preset = resolve_space("paper-table-v")
    assert preset.num_combinations == 6 * 4 * 17 * 2 * 2 * 2
    assert preset.global_batch == GlobalBatch(minimum=1, maximum=25600)
    assert 1 not in preset.values("micro_batch_size"), "of the recipe that the paper calls best"
    assert 640 not in preset.values("num_microbatches")
    space = resolve_space({"preset": "paper-table-v", "precision": "bf16"})
    assert space.values("precision") == ("bf16",)
    assert space.values("pp") == (1, 2, 4, 8, 12, 16)
    fixed = resolve_space({"preset": "paper-table-v", "global_batch_size": 640})
    assert "num_microbatches" not in fixed.knobs, "they follow from the batch"
    for unknown in ("paper-table-4", {"preset": "paper-table-4"}):
        with pytest.raises(SpaceInvalidError, match=r"did you mean 'paper-table-v'.*paper-table-v"):
            resolve_space(unknown)
