from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.errors import NoLegalLayoutError, SpaceInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.global_batch import GlobalBatch
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import code_of
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES, violations
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS, model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.rule import Scope
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal
from layout_tuner.search_spaces.spaces.space_presets import resolve_space
from layout_tuner.units import GIB

BOX = Cluster(name="box", device="card", num_nodes=3, devices_per_node=4, device_memory_bytes=GIB)
TINY = model_preset("tiny")


def subsets(*values: Any) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True)


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    knobs: dict[str, Any] = {
        "num_nodes": draw(subsets(1, 2, 3, 4)),
        "tp": draw(subsets(1, 2, 3, 4, 8)),
        "pp": draw(subsets(1, 2, 3, 4, 16)),
        "vpp": draw(subsets(1, 2, 3)),
        "micro_batch_size": draw(subsets(1, 2, 3, 8)),
        "zero_stage": draw(subsets(0, 1)),
        "zero_replicas": draw(subsets(1, 2, 3)),
        "recompute": draw(subsets("none", "selective", "full")),
        "sequence_parallel": draw(subsets(False, True)),
        "precision": draw(subsets("fp32", "bf16", "fp16")),
        "allow_tp_across_nodes": draw(st.booleans()),
    }
    if draw(st.booleans()):
        knobs["dp"] = draw(subsets(1, 2, 3, 4, 6, 12))
    if draw(st.booleans()):
        knobs["global_batch_size"] = draw(st.sampled_from([1, 8, 24, 36]))
    else:
        low = draw(st.integers(1, 16))
        knobs["global_batch_size"] = {"min": low, "max": draw(st.integers(low + 1, 64))}
        knobs["num_microbatches"] = draw(subsets(1, 2, 3, 4))
    return SearchSpace.from_mapping(knobs)


def brute_force(
    space: SearchSpace, model: ModelShape, cluster: Cluster, scopes: frozenset[Scope]
) -> list[Layout]:
    """Every legal layout, one at a time, by the definition of the derived knobs."""
    legal = []
    options = {"global_batch": space.global_batch, "scopes": scopes}
    options["allow_tp_across_nodes"] = space.allow_tp_across_nodes
    for values in itertools.product(*(space.values(knob) for knob in space.knobs)):
        chosen = dict(zip(space.knobs, values, strict=True))
        if "dp" not in chosen:
            devices = chosen["num_nodes"] * cluster.devices_per_node
            chosen["dp"], rest = divmod(devices, chosen["tp"] * chosen["pp"])
            if rest:
                continue
        if "num_microbatches" not in chosen:
            a_step = chosen["dp"] * chosen["micro_batch_size"]
            chosen["num_microbatches"], rest = divmod(space.global_batch.minimum, a_step)
            if rest:
                continue
        layout = Layout(**chosen)
        if not violations(layout, model, cluster, **options):
            legal.append(layout)
    return legal


@settings(max_examples=50)
@given(
    space=spaces(),
    model=st.sampled_from([TINY, model_preset("tiny-llama"), model_preset("gpt-125m")]),
    scopes=st.sampled_from([ALL_SCOPES, ALL_SCOPES - {"trainer"}, frozenset({"model", "batch"})]),
)
def test_the_legal_set_is_what_a_loop_over_every_combination_finds(
    space: SearchSpace, model: ModelShape, scopes: frozenset[Scope]
) -> None:
    # Derived knobs are refused by the machine and batch rules; without those there is nothing to
    # derive them from.
    if "machine" not in scopes and "dp" not in space.knobs:
        scopes = scopes | {"machine"}
    legal = enumerate_legal(space, model, BOX, scopes=scopes)
    expected = brute_force(space, model, BOX, scopes)
    assert [legal.layout(position) for position in range(len(legal))] == expected


@pytest.mark.parametrize("scopes", [ALL_SCOPES, frozenset({"model", "machine"})])
def test_the_legal_set_of_a_model_with_experts_is_what_a_loop_finds(
    scopes: frozenset[Scope],
) -> None:
    knobs = {"num_nodes": [1, 2], "tp": [1, 2, 4], "pp": [1, 2], "ep": [1, 2, 3, 8]}
    knobs |= {"etp": [1, 2, 3], "zero_stage": [0, 3], "zero_replicas": [1, 2]}
    space = SearchSpace(global_batch_size=24, sequence_parallel=[False, True], **knobs)
    model = model_preset("tiny-moe")
    legal = enumerate_legal(space, model, BOX, scopes=scopes)
    found = [legal.layout(position) for position in range(len(legal))]
    assert found == brute_force(space, model, BOX, scopes)
    assert {layout.ep for layout in found} == {1, 2, 8}
    assert {layout.etp for layout in found} == {1, 2}


@settings(max_examples=20)
@given(space=spaces())
def test_positions_columns_and_layouts_agree(space: SearchSpace) -> None:
    legal = enumerate_legal(space, TINY, BOX, scopes=ALL_SCOPES - {"trainer"})
    columns = legal.columns()
    every_third = legal.columns(slice(1, None, 3))
    for position in range(len(legal)):
        layout = legal.layout(position)
        assert legal.index_of(layout) == position
        for name in LAYOUT_FIELDS:
            code = code_of(name, getattr(layout, name))
            assert getattr(columns, name)[position] == code
            assert legal.column(name)[position] == code
            if position % 3 == 1:
                assert getattr(every_third, name)[position // 3] == code


def test_each_rule_counts_what_it_excludes_and_an_empty_set_says_so_with_an_example() -> None:
    space = SearchSpace(global_batch_size=12, tp=[1, 2, 8], pp=[1, 3], dp=1, zero_stage=[0, 1])
    legal = enumerate_legal(space, TINY, BOX)
    assert legal.num_combinations == 12
    assert {each.rule: each.count for each in legal.exclusions} == {
        "layers_over_stages": 6,
        "world_size": 6,
        "zero_needs_replicas": 6,
        "heads_over_tp": 4,
        "tp_within_node": 4,
    }
    assert [legal.layout(position).tp for position in range(len(legal))] == [1, 2]
    empty = enumerate_legal(SearchSpace(global_batch_size=16, tp=[8, 16], pp=[1, 3]), TINY, BOX)
    assert len(empty) == 0
    with pytest.raises(NoLegalLayoutError) as caught:
        empty.refuse_if_empty()
    assert str(caught.value).startswith(
        "none of the 4 combinations is legal: heads_over_tp excludes 4 "
        "(as: num_heads=4 is not divisible by tp=8), "
    )
    assert "layers_over_stages 2" in str(caught.value)


def test_a_derived_dp_must_fill_the_node() -> None:
    space = SearchSpace(global_batch_size=12, pp=[1, 3], tp=1)
    model = ModelShape.from_mapping({**TINY.to_mapping(), "num_layers": 3})
    legal = enumerate_legal(space, model, BOX)
    assert [legal.layout(position).dp for position in range(len(legal))] == [4]
    assert legal.exclusions[0].example == (
        "tp*pp*dp=1*3*1=3 does not fill num_nodes*devices_per_node=1*4=4"
    )


def test_a_layout_outside_the_set_has_no_position_and_no_position_outside_has_a_layout() -> None:
    legal = enumerate_legal(SearchSpace(global_batch_size=16, tp=[1, 2]), TINY, BOX)
    inside = legal.layout(0)
    assert legal.index_of(inside) == 0
    for changes in ({"tp": 4}, {"dp": 2}, {"num_microbatches": 3}, {"precision": "bf16"}):
        assert legal.index_of(replace(inside, **changes)) is None
    illegal = enumerate_legal(
        SearchSpace(global_batch_size=16, dp=[1, 2], zero_stage=[0, 1]), TINY, BOX
    )
    assert illegal.index_of(Layout(zero_stage=1, num_microbatches=16)) is None
    assert len(legal) == 2
    for position in (-1, 2):
        with pytest.raises(IndexError, match=f"position {position} is not in 0 to 1"):
            legal.layout(position)


def test_the_papers_table_has_2720_legal_layouts() -> None:
    space, frontier = resolve_space("paper-table-v"), CLUSTER_PRESETS["frontier"]
    legal = enumerate_legal(space, MODEL_PRESETS["gpt-175b"], frontier)
    assert len(legal) == 2720
    columns = legal.columns()
    assert np.all(np.isin(columns.num_nodes, [12, 16]))
    assert np.array_equal(columns.tp * columns.pp * columns.dp, columns.num_nodes * 8)


def test_the_largest_values_do_not_overflow() -> None:
    largest = 1 << 20
    knobs = dict.fromkeys(("num_nodes", "micro_batch_size", "num_microbatches"), largest)
    legal = enumerate_legal(SearchSpace(global_batch_size={"max": largest}, **knobs), TINY, BOX)
    (excluded,) = [each for each in legal.exclusions if each.rule == "global_batch"]
    assert excluded.count == 1
    assert legal.exclusions[-1].example


def test_of_millions_of_combinations_the_legal_ones_are_found() -> None:
    space = SearchSpace(
        global_batch_size=4096,
        num_nodes={"from": 1, "to": 1024, "times": 2},
        tp={"from": 1, "to": 16, "times": 2},
        pp={"from": 1, "to": 24},
        vpp={"from": 1, "to": 8},
        micro_batch_size={"from": 1, "to": 32},
        zero_stage=[0, 1],
        recompute=["none", "full"],
        precision=["fp32", "bf16"],
    )
    assert space.num_combinations > 2_000_000
    model, frontier = model_preset("gpt-175b"), CLUSTER_PRESETS["frontier"]
    legal = enumerate_legal(space, model, frontier)
    # The rules of the world leave what divides: the same set, from the few values that can be legal
    # at all.
    few = {"tp": [1, 2, 4, 8], "pp": [1, 2, 3, 4, 6, 8, 12, 16, 24], "vpp": [1, 2, 3, 4, 6, 8]}
    narrow = enumerate_legal(SearchSpace.from_mapping(space.to_mapping() | few), model, frontier)
    assert len(legal) == len(narrow) > 1000
    for position in range(0, len(legal), 97):
        assert legal.layout(position) == narrow.layout(position)
        assert not violations(legal.layout(position), model, frontier, global_batch=4096)


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
        ({"tp": 0}, "tp: 0 is not a whole number of at least 1"),
        ({"tp": 1 << 40}, "tp: 1099511627776 is more than 1048576, the largest"),
        ({"tp": None}, "tp: the value is null; leave it out for its default"),
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
        ({"sequence_parallel": 1}, "sequence_parallel: 1 is not true or false"),
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
