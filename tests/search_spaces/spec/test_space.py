from __future__ import annotations

from typing import Any

import pytest

from search_spaces.errors import SpaceInvalidError
from search_spaces.spec.batch import GlobalBatch
from search_spaces.spec.presets.spaces import resolve_space
from search_spaces.spec.space import MAX_COMBINATIONS, SearchSpace

WIDE = {"from": 1, "to": 1000}


def refusal(**knobs: Any) -> str:
    stated = {"global_batch_size": 16, **knobs}
    with pytest.raises(SpaceInvalidError) as caught:
        SearchSpace.from_mapping(
            {name: value for name, value in stated.items() if value is not ...}
        )
    return str(caught.value)


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


def test_knobs_left_out_take_their_defaults_and_dp_and_accumulation_are_derived() -> None:
    assert SearchSpace(global_batch_size=16).to_mapping() == {
        "global_batch_size": 16,
        "num_nodes": 1,
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "micro_batch_size": 1,
        "zero_stage": 0,
        "zero_replicas": 1,
        "recompute": "none",
        "sequence_parallel": False,
        "precision": "fp32",
        "allow_tp_across_nodes": False,
    }


def test_a_new_knob_is_in_the_document_of_a_space_if_it_is_a_choice() -> None:
    plain = SearchSpace(global_batch_size=16)
    assert SearchSpace(global_batch_size=16, pipeline_split="layers") == plain
    assert plain.to_mapping(every_knob=True)["pipeline_split"] == "layers"
    for choices in ("head", ["layers", "embedding"]):
        space = SearchSpace(global_batch_size=16, pipeline_split=choices)
        assert space.to_mapping() == plain.to_mapping() | {"pipeline_split": choices}
        assert SearchSpace.from_mapping(space.to_mapping()) == space


@pytest.mark.parametrize(
    "mapping",
    [
        {"global_batch_size": 16},
        {"global_batch_size": {"max": 8}, "num_microbatches": [1, 2]},
        {
            "global_batch_size": {"min": 4, "max": 8},
            "num_microbatches": {"from": 1, "to": 8, "times": 2},
            "dp": [1, 2],
            "recompute": ["none", "full"],
            "sequence_parallel": [False, True],
            "precision": ["bf16"],
            "allow_tp_across_nodes": True,
        },
    ],
)
def test_a_space_survives_the_round_trip(mapping: dict[str, Any]) -> None:
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
        ({"tp": {"to": 4}}, "tp: the range {'to': 4} has no 'from'"),
        ({"tp": {"from": 4, "to": 1}}, "tp: the range runs from 4 down to 1"),
        ({"tp": {"from": 1, "to": 8, "step": 0}}, "tp.step: 0 is not a whole number of at least 1"),
        (
            {"tp": {"from": 1, "to": 8, "times": 1}},
            "tp.times: 1 is not a whole number of at least 2",
        ),
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
        ({"tp": WIDE, "pp": WIDE, "micro_batch_size": WIDE}, str(MAX_COMBINATIONS)),
    ],
)
def test_an_impossible_value_is_refused_with_its_knob_and_itself(
    knobs: dict[str, Any], message: str
) -> None:
    assert message in refusal(**knobs)


def test_the_papers_table_has_all_its_combinations_but_not_the_recipe_that_it_calls_best() -> None:
    space = resolve_space("paper-table-v")
    assert space.num_combinations == 6 * 4 * 17 * 2 * 2 * 2
    assert space.global_batch == GlobalBatch(minimum=1, maximum=25600)
    assert 1 not in space.values("micro_batch_size")
    assert 640 not in space.values("num_microbatches")


def test_a_preset_may_be_changed_knob_by_knob() -> None:
    space = resolve_space({"preset": "paper-table-v", "precision": "bf16"})
    assert space.values("precision") == ("bf16",)
    assert space.values("pp") == (1, 2, 4, 8, 12, 16)
    fixed = resolve_space({"preset": "paper-table-v", "global_batch_size": 640})
    assert "num_microbatches" not in fixed.knobs, "they follow from the batch"


@pytest.mark.parametrize("described", ["paper-table-4", {"preset": "paper-table-4"}])
def test_an_unknown_preset_lists_the_known_ones(described: Any) -> None:
    with pytest.raises(SpaceInvalidError, match=r"did you mean 'paper-table-v'.*paper-table-v"):
        resolve_space(described)
