"""The baseline of a campaign's file: what its missing knobs become, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import CampaignInvalidError, SearchSpaceError
from search_spaces.spec.layout import Layout
from search_spaces.spec.rules import violations
from tests.kit.campaigns import spec_of

CLUSTER = {
    "name": "one-node",
    "device": "CPU core",
    "num_nodes": 2,
    "devices_per_node": 8,
    "device_memory_bytes": 4 << 30,
}
SPACE = {
    "global_batch_size": 16,
    "tp": [1, 2, 4],
    "pp": [1, 2],
    "micro_batch_size": [1, 2],
    "zero_stage": 1,
    "recompute": ["none", "full"],
}


def make_spec(baseline: Any, space: Any = None, **changes: Any) -> CampaignSpec:
    return spec_of(**{"cluster": CLUSTER, "space": space or SPACE, "baseline": baseline} | changes)


@pytest.mark.parametrize(
    ("baseline", "space", "filled_in"),
    [
        # zero_stage has one value in the space; pp, micro_batch_size and recompute have several,
        # as has the precision, which is the cluster's.
        (
            {"tp": 2},
            {"precision": ["fp32", "bf16"]},
            {"dp": 4, "pp": 1, "num_microbatches": 4, "zero_stage": 1, "precision": "bf16"},
        ),
        # Replicas fill the nodes, and micro-batches make the batch.
        (
            {"tp": 4, "micro_batch_size": 2},
            {"num_nodes": 2},
            {"num_nodes": 2, "dp": 4, "num_microbatches": 2},
        ),
        # Values of the space stand for them too.
        (
            {"tp": 2},
            {"dp": 2, "global_batch_size": {"min": 4, "max": 64}, "num_microbatches": 3},
            {"dp": 2, "num_microbatches": 3},
        ),
    ],
)
def test_missing_knobs_follow_from_the_space_the_nodes_and_the_cluster(
    baseline: dict[str, Any], space: dict[str, Any], filled_in: dict[str, Any]
) -> None:
    cluster = {**CLUSTER, "peak_flops_per_s": {"fp32": 1e12, "bf16": 2e12}, "device": "a device"}
    spec = make_spec(baseline, {**SPACE, **space}, cluster=cluster)
    assert spec.baseline is not None
    found = spec.baseline.to_mapping()
    assert found | filled_in | baseline == found
    assert spec.to_mapping()["baseline"] == found
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec


def test_a_campaign_without_a_baseline_has_none() -> None:
    spec = make_spec(None)
    assert (spec.baseline, spec.baseline_is_outside) == (None, False)
    assert spec.to_mapping()["baseline"] is None


def test_knobs_that_follow_from_nothing_or_leave_devices_idle_must_be_stated() -> None:
    space = {**SPACE, "global_batch_size": {"min": 4, "max": 64}, "num_microbatches": [1, 2]}
    with pytest.raises(CampaignInvalidError, match=r"baseline\.num_microbatches: it is missing"):
        make_spec({"tp": 2}, space)
    stated = make_spec({"tp": 2, "num_microbatches": 2}, space).baseline
    assert stated is not None
    assert stated.num_microbatches == 2
    # 6 of 8 devices; a baseline that says dp: 2 itself may leave two of them idle.
    six: dict[str, Any] = {"space": {**SPACE, "global_batch_size": 12}}
    six["model"] = {"preset": "tiny", "num_layers": 6}
    with pytest.raises(CampaignInvalidError, match="does not fill"):
        make_spec({"pp": 3, "tp": 1}, **six)
    assert make_spec({"pp": 3, "dp": 2}, **six).baseline_is_outside


def test_an_illegal_baseline_is_refused_with_the_sentence_of_each_rule() -> None:
    with pytest.raises(CampaignInvalidError) as refused:
        make_spec({"tp": 3, "dp": 1, "num_microbatches": 5})
    layout = Layout(tp=3, num_microbatches=5, zero_stage=1)
    spec = make_spec(None)
    told = violations(layout, spec.model, spec.cluster, global_batch=spec.space.global_batch)
    assert len(told) > 2
    said = [str(part) for part in refused.value.parts]
    assert said == [f"baseline: {sentence}" for sentence in told]


@pytest.mark.parametrize(
    ("baseline", "space", "changes", "fields"),
    [
        (
            {"tp": "two", "tq": 1, "recompute": "some"},
            SPACE,
            {"seed": -1, "strategy": "best"},
            ["baseline.recompute", "baseline.tp", "baseline.tq", "seed", "strategy"],
        ),
        # Wrong knobs are told where the space is wrong too; right ones cannot be judged then.
        ({"tp": 0}, {"global_batch_size": 0}, {}, ["baseline.tp", "space.global_batch_size"]),
        ({"tp": 3}, {"global_batch_size": 0}, {}, ["space.global_batch_size"]),
        *((no_mapping, SPACE, {}, ["baseline"]) for no_mapping in ("n1-tp2", 7, [1, 2], {3: 4})),
    ],
)
def test_all_errors_of_the_document_are_told_at_once(
    baseline: Any, space: Any, changes: dict[str, Any], fields: list[str]
) -> None:
    with pytest.raises(SearchSpaceError) as refused:
        make_spec(baseline, space, **changes)
    assert sorted(str(part.field) for part in refused.value.parts) == fields


@pytest.mark.parametrize(
    ("space", "devices_per_node"),
    [
        (SPACE, 8),
        ({**SPACE, "dp": [1, 2, 4]}, 8),
        ({**SPACE, "num_nodes": [1, 2], "global_batch_size": {"min": 8, "max": 16}}, 4),
    ],
    ids=["filled nodes", "stated replicas", "bounded batch"],
)
def test_a_legal_layout_is_outside_exactly_where_the_legal_set_lacks_it(
    space: dict[str, Any], devices_per_node: int
) -> None:
    if isinstance(space["global_batch_size"], dict):
        space = {**space, "num_microbatches": [1, 2, 4]}
    cluster = {**CLUSTER, "devices_per_node": devices_per_node}
    spec = make_spec(None, space, cluster=cluster)
    legal = spec.legal_set()
    inside = 0
    names = ("num_nodes", "tp", "pp", "dp", "micro_batch_size", "num_microbatches")
    for values in itertools.product(
        (1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2), (1, 2, 4, 8)
    ):
        layout = Layout(zero_stage=1, **dict(zip(names, values, strict=True)))
        if violations(layout, spec.model, spec.cluster, global_batch=spec.space.global_batch):
            continue
        holds = spec.space.holds(layout, devices_per_node)
        assert holds == (legal.index_of(layout) is not None), layout.key
        inside += holds
    assert inside > 5
