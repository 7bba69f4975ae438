"""The document of a campaign: defaults, refusals, the budget, the baseline and the simulation."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from layout_tuner.documents.not_covered import known_word
from layout_tuner.errors import (
    CampaignInvalidError,
    ModelTooLargeError,
    NoLegalLayoutError,
    SearchSpaceError,
)
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.campaigns.campaign import (
    ESTIMATE_MARGIN,
    ROWS_AT_ONCE,
    CampaignSpec,
)
from layout_tuner.search_spaces.campaigns.campaign_settings import (
    Budget,
    SimulationSettings,
    StopSettings,
    changed_budget,
)
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.tables.table import CellKey, own_source
from layout_tuner.trainers.simulator import SIMULATOR_VERSION, is_simulator, simulator_trainer
from layout_tuner.units import GIB
from tests.kit.campaigns import spec_of


def written(**changes: Any) -> dict[str, Any]:
    space = {
        "num_nodes": [2, 4],
        "tp": {"from": 1, "to": 8, "times": 2},
        "pp": [1, 2, 4],
        "zero_stage": [0, 1],
        "recompute": "full",
        "precision": "bf16",
        "global_batch_size": 256,
    }
    campaign = {
        "name": "first-try",
        "model": "gpt-22b",
        "cluster": {"preset": "frontier", "num_nodes": 16},
        "space": space,
        "budget": {"trials": 20},
    }
    return {key: value for key, value in {**campaign, **changes}.items() if value is not ...}


def read(**changes: Any) -> CampaignSpec:
    return CampaignSpec.from_mapping(written(**changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(SearchSpaceError) as caught:
        read(**changes)
    return str(caught.value)


def test_a_campaign_has_defaults() -> None:
    spec = read()
    assert (spec.objective, spec.strategy, spec.seed) == ("tokens_per_s_per_device", "guided", 0)
    assert (spec.probe.warmup, spec.probe.iterations, spec.probe.deadline_s) == (2, 10, 300)
    assert (spec.budget.trials, spec.budget.node_hours, spec.budget.wall_time_s) == (20, None, None)
    assert spec.stop == StopSettings(early=True, converged_within=None, remeasure=3)
    assert spec.warnings == ()


def test_a_campaign_is_stored_without_presets_and_ranges() -> None:
    spec = read()
    assert spec.model == model_preset("gpt-22b")
    mapping = spec.to_mapping()
    assert mapping["model"]["hidden_size"] == 6144
    assert mapping["cluster"]["device_memory_bytes"] == 64 << 30
    assert mapping["space"]["tp"] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        (
            {"strategy": "random", "stop": {"converged_within": 0.02}},
            ["stop.converged_within has no effect with strategy random:"],
        ),
        ({"strategy": "random"}, []),
        ({"stop": {"converged_within": 0.02}}, []),
        (
            {"stop": {"converged_within": 0.02}, "objective": ["tokens_per_s", "memory_headroom"]},
            [],
        ),
        ({"cluster": {"name": "hal"}}, ["cluster 'hal' is not a preset"]),
    ],
)
def test_a_guess_and_a_setting_without_effect_are_warned_of_once(
    changes: dict[str, Any], starts: list[str]
) -> None:
    warnings = read(**changes).warnings
    assert len(warnings) == len(starts)
    assert all(map(str.startswith, warnings, starts)), warnings
    assert CampaignSpec.from_mapping(read(**changes).to_mapping()).warnings == warnings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cluster": {"name": "hal"}, "space": {"global_batch_size": 8}},
        {"space": "paper-table-v", "model": "gpt-175b"},
        {"strategy": "exhaustive", "budget": ..., "seed": 7, "objective": "tokens_per_s"},
        {"budget": {"node_hours": 1.5, "wall_time": "2h"}, "probe": {"deadline": "90s"}},
        {"cluster": "local-cpu", "model": {"preset": "tiny", "num_layers": 2}},
        {"constraints": {"memory_headroom": 0.1}, "knowledge": "none", "start_from": ["a", "b"]},
        {"stop": {"early": False, "converged_within": 0.02, "remeasure": 0}, "strategy": "random"},
    ],
    ids=str,
)
def test_a_campaign_survives_the_round_trip_through_json(changes: dict[str, Any]) -> None:
    spec = read(**changes)
    resolved = json.loads(json.dumps(spec.to_mapping(), allow_nan=False))
    assert CampaignSpec.from_mapping(resolved) == spec
    if "stop" in changes:
        assert spec.stop == StopSettings(**changes["stop"])


def test_the_first_of_several_objectives_ranks() -> None:
    names = ("tokens_per_s", "memory_headroom", "tokens_per_node_hour")
    spec = read(objective=[*names])
    assert (spec.objective, spec.objectives) == ("tokens_per_s", names)
    assert spec.to_mapping()["objective"] == [*names]
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    assert read(objective=["tokens_per_s"]).to_mapping()["objective"] == "tokens_per_s"


def test_a_wall_time_is_seconds_or_has_a_unit() -> None:
    durations = {90: 90, 0.5: 0.5, "90s": 90, "10m": 600, "2h": 7200, "1.5 d": 129600}
    for duration, seconds in durations.items():
        for name in ("wall_time", "wall_time_s"):
            assert read(budget={name: duration}).budget.wall_time_s == seconds, duration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"favourite": "red"}, "unknown campaign field 'favourite'; choose from name, model, "),
        ({"name": ...}, "name: the field is missing"),
        ({"name": 0}, "name: 0 is not 1 to 64 characters"),
        ({"cluster": None}, "cluster: the field is missing"),
        ({"name": "two words"}, "name: 'two words' is not 1 to 64 characters of A-Z a-z 0-9 . _ -"),
        ({"name": "x" * 65}, "is not 1 to 64 characters"),
        ({"name": ".."}, "'..' is not 1 to 64 characters"),
        ({"name": "175"}, "'175' is not 1 to 64 characters"),
        ({"name": "line\n"}, "is not 1 to 64 characters"),
        ({"model": "gpt-3"}, "model: unknown model 'gpt-3'"),
        ({"cluster": {"preset": "summit"}}, "cluster: unknown cluster preset 'summit'"),
        ({"space": {"global_batch_size": 8, "tp": "two"}}, "space.tp: 'two' is not a whole number"),
        ({"space": {"tp": 2}}, "space.global_batch_size: there is none; tokens/s grow"),
        ({"space": []}, "space: the search space is [], not a mapping"),
        ({"objective": "speed"}, "objective: 'speed' is unknown; choose from tokens_per_s_per_dev"),
        ({"objective": "tokens_per_second"}, "(did you mean 'tokens_per_s'?)"),
        ({"strategy": "hyper"}, "strategy: 'hyper' is unknown"),
        ({"seed": -1}, "seed: -1 is not a whole number of at least 0"),
        ({"budget": ...}, "budget: strategy 'guided' needs at least one bound of trials, node_h"),
        ({"budget": 20}, "budget: the budget is 20, not a mapping"),
        ({"budget": {"wall_time_s": 0}}, "budget.wall_time_s: 0 is not a duration"),
        ({"probe": {"warmup": 1}}, "probe.warmup: 1 is not a whole number of at least 2"),
        ({"probe": {"compile": 1}}, "probe.compile: 1 is not true or false"),
        ({"probe": {"steps": 3}}, "probe: unknown setting 'steps'"),
        ({"warnings": "beware"}, "warnings: 'beware' is not a list"),
        ({"warnings": [3]}, "warnings: [3] is not a list"),
        ({"warnings": ["x" * 1001]}, "of at most 1000 characters"),
        ({"warnings": ["x"] * 17}, "is not a list of at most 16 strings"),
        ({"warnings": ["x"] * 16, "cluster": {"name": "hal"}}, "not a list of at most 16 strings"),
        ({"budget": {"wall_time_s": 1e308}}, "budget.wall_time_s: 1e+308 is longer than 100000000"),
        ({"probe": {"deadline": "99999d"}}, "probe.deadline: '99999d' is longer than 1000000000 s"),
        ({"objectives": "tokens_per_s"}, "unknown campaign field 'objectives' (did you mean 'obje"),
        ({"constraints": []}, "constraints: constraints is [], not a mapping"),
        ({"constraints": {"memory": 0.1}}, "constraints: unknown constraint 'memory'"),
        ({"constraints": {"memory_headroom": 1}}, "constraints.memory_headroom: 1 is not a share"),
        ({"constraints": {"memory_headroom": -0.1}}, "-0.1 is not a share of the memory"),
        ({"knowledge": "all"}, "knowledge: 'all' is unknown; choose from auto, none"),
        ({"start_from": "first"}, "start_from: 'first' is not a list of campaigns' names"),
        ({"start_from": ["a", "a"]}, "start_from: 'a' is listed more than once"),
        ({"start_from": [str(n) for n in range(33)]}, "start_from: 33 campaigns are more than 32"),
        ({"stop": {"early": "yes"}}, "stop.early: 'yes' is not true or false"),
        ({"stop": {"converged_within": 2}}, "stop.converged_within: 2 is not a share between 0"),
        ({"stop": {"remeasure": -1}}, "stop.remeasure: -1 is not a whole number of at least 0"),
        ({"stop": {"remeasure": 21}}, "stop.remeasure: 21 is more than 20"),
        ({"stop": {"earlier": True}}, "unknown setting 'earlier' (did you mean 'early'?)"),
    ],
)
def test_a_malformed_campaign_is_refused_with_the_field(
    changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(**changes)


def test_a_document_that_is_no_campaign_is_refused() -> None:
    for document in (None, "tiny", 3, [], [{}], {1: 2}):
        with pytest.raises(CampaignInvalidError, match=r"^the campaign (is|has the key) .* not "):
            CampaignSpec.from_mapping(document)


def test_a_campaign_without_a_legal_layout_is_refused_by_the_limits_of_its_trainer() -> None:
    spec = read(space={"global_batch_size": 256, "tp": 5, "precision": "bf16"})
    with pytest.raises(NoLegalLayoutError, match=r"none of the 1 combinations is legal: .*tp=5"):
        spec.legal_set()
    space = written()["space"] | {"precision": "fp8"}
    cluster = {"preset": "h100-sxm", "num_nodes": 4}
    with pytest.raises(NoLegalLayoutError, match="precision=fp8 is not supported by the embedded"):
        read(space=space, cluster=cluster).legal_set()
    baseline = {"tp": 8, "num_nodes": 4, "zero_stage": 1}
    other = read(space=space, cluster=cluster, probe={"trainer": "mine"}, baseline=baseline)
    assert len(other.legal_set()) > 0
    assert other.baseline.precision == "fp8"


def test_a_model_slightly_over_the_memory_is_accepted() -> None:
    # 16 bytes a parameter of fp32 training alone are 128 MiB here.
    def of_memory(device_memory_gb: float) -> CampaignSpec:
        device = {"devices_per_node": 1, "device_memory_gb": device_memory_gb}
        cluster = {"preset": "local-cpu", **device}
        return read(model="small", cluster=cluster, space={"global_batch_size": 1})

    of_memory(0.14).refuse_if_too_large()
    with pytest.raises(ModelTooLargeError):
        of_memory(0.08).refuse_if_too_large()


def wide(**changes: Any) -> CampaignSpec:
    """A hundred thousand legal layouts: many times more than are estimated at once."""
    space = {
        "global_batch_size": {"max": 1 << 20},
        "num_nodes": [8, 16, 32, 64],
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4, 8],
        "micro_batch_size": {"from": 1, "to": 32},
        "num_microbatches": {"from": 1, "to": 64},
        "recompute": ["none", "full"],
        "precision": "bf16",
    }
    return read(space=space, cluster={"preset": "frontier", **changes})


def test_of_many_layouts_a_single_one_that_fits_lets_the_campaign_in() -> None:
    legal = wide().legal_set()
    assert len(legal) > 15 * ROWS_AT_ONCE
    estimates = peak_memory_bytes(legal.columns(), wide().model)
    smallest = float(estimates.min())
    just_enough = int(smallest * (1 - ESTIMATE_MARGIN)) + 1
    assert np.count_nonzero(estimates * (1 - ESTIMATE_MARGIN) <= just_enough) < 10
    wide(device_memory_bytes=just_enough).refuse_if_too_large(legal)
    small = wide(device_memory_bytes=just_enough - 1)
    tracemalloc.start()
    try:
        with pytest.raises(ModelTooLargeError) as caught:
            small.refuse_if_too_large(legal)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20  # one column of all would be 2 MiB, and there are dozens
    message = str(caught.value)
    assert message.startswith(f"gpt-22b is too large for every one of the {len(legal)} legal")
    assert f"smallest estimate is {smallest / GIB:.2f} GiB" in message
    assert f"a device of frontier has {(just_enough - 1) / GIB:.2f} GiB" in message
    key = re.search(r"\((n\d\S+)\)", message)
    assert key[1] in {legal.layout(int(i)).key for i in np.flatnonzero(estimates == smallest)}


def test_a_probe_request_carries_what_the_ranks_need() -> None:
    spec = read(seed=3, probe={"warmup": 3, "iterations": 4, "deadline": "1m", "compile": True})
    layout = spec.legal_set().layout(0)
    assert spec.probe_request(layout) == ProbeRequest(
        model=spec.model,
        layout=layout,
        seed=3,
        warmup=3,
        iterations=4,
        deadline_s=60,
        compile=True,
        memory_limit_bytes=CLUSTER_PRESETS["frontier"].device_memory_bytes,
    )


def test_a_model_that_fits_only_without_the_headroom_is_too_large_with_it() -> None:
    space = {"global_batch_size": 8, "precision": "bf16"}
    fits = read(space=space, cluster={"preset": "h100-sxm", "device_memory_gb": 1000})
    (estimate,) = peak_memory_bytes(fits.legal_set().columns(slice(None)), fits.model)
    cluster = {"preset": "h100-sxm", "device_memory_gb": int(estimate / 2**30 * 0.9)}
    read(space=space, cluster=cluster).refuse_if_too_large()
    tight = read(space=space, cluster=cluster, constraints={"memory_headroom": 0.4})
    assert tight.constraints.allowed_memory_bytes(1000) == 600
    with pytest.raises(ModelTooLargeError, match="beside the headroom of 40% that was asked for"):
        tight.refuse_if_too_large()


BUDGET = {"trials": 10, "node_hours": None, "wall_time_s": 600.0}


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({"trials": 40}, {"trials": 40}),
        ({"wall_time": None}, {"wall_time_s": None}),
        ({"wall_time_s": None}, {"wall_time_s": None}),
        ({"wall_time": "1h"}, {"wall_time_s": 3600.0}),
        ({"node_hours": 2}, {"node_hours": 2}),
        ({}, {}),
    ],
)
def test_bounds_that_are_not_named_stay_and_null_takes_one_away(
    changes: dict[str, Any], after: dict[str, Any]
) -> None:
    assert changed_budget(BUDGET, changes, strategy="random") == BUDGET | after
    lost = changed_budget({"trials": 3}, {"trials": None}, strategy="exhaustive")
    assert Budget(**lost) == Budget(), "an exhaustive campaign may lose its last bound"


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"trials": 0}, "budget.trials", "0 is not a whole number"),
        ({"node_hours": float("nan")}, "budget.node_hours", "not a number from 1e-06 to"),
        ({"wall_time": "soon"}, "budget.wall_time", "not a duration"),
        ({"wall_time": "1h", "wall_time_s": 5}, "budget.wall_time", "not both"),
        ({"wall_time": None, "wall_time_s": 5}, "budget.wall_time", "not both"),
        ({"trails": 5}, "budget.trails", "did you mean 'trials'"),
        ({"trials": None, "wall_time_s": None}, "budget", "at least one bound"),
        ([], "budget", "not a mapping"),
    ],
    ids=str,
)
def test_a_wrong_bound_is_named(changes: Any, where: str, says: str) -> None:
    with pytest.raises(CampaignInvalidError, match=says) as caught:
        changed_budget(BUDGET, changes, strategy="random")
    assert caught.value.field == where


@pytest.mark.parametrize(
    ("model", "space", "says"),
    [
        ({}, {"context_parallel_size": 2}, "(here it is called 'cp')"),
        ({}, {"ulysses": 2}, "(here it is called 'cp')"),
        ({}, {"expert_tensor_parallel_degree": 2}, "(here it is called 'etp')"),
        ({"num_local_experts": 8}, {}, "(here it is called 'num_experts')"),
        ({"family": "mixtral"}, {}, "(here it is called 'llama')"),
        ({"capacity_factor": 1}, {}, "experts that drop tokens over a capacity"),
        (
            {},
            {"precision": "mxfp4"},
            "types of 4 and 8 bits beside those of precision: not covered",
        ),
        ({}, {"tensor_model_parallel_size": 2}, "(here it is called 'tp')"),
        ({}, {"data_parallel_shard_degree": 8}, "(here it is said as dp, which is this number"),
        ({}, {"data_parallel_replicate_degree": 2}, "beside shards, as zero_replicas)"),
        ({}, {"pipeline_parallel_schedule": "1F1B"}, "(here it is called 'schedule')"),
        ({}, {"sharding_strategy": "FULL_SHARD"}, "(here it is called 'zero_stage')"),
        ({}, {"bf16": True}, "(here it is said as precision: bf16)"),
    ],
)
def test_a_word_of_other_trainers_is_recognised_by_name(
    model: dict[str, Any], space: dict[str, Any], says: str
) -> None:
    said = refusal(model={"preset": "tiny", **model}, space={"global_batch_size": 8, **space})
    assert says in said
    assert "did you mean" not in said


def test_other_words_are_not_known() -> None:
    for name in (None, 3, [], "tp", "", "_size", "_parallel_parallel_parallel"):
        assert known_word(name) == "", name


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
    found = spec.baseline.to_mapping()
    assert found | filled_in | baseline == found
    assert spec.to_mapping()["baseline"] == found
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec


def test_knobs_that_follow_from_nothing_or_leave_devices_idle_must_be_stated() -> None:
    space = {**SPACE, "global_batch_size": {"min": 4, "max": 64}, "num_microbatches": [1, 2]}
    with pytest.raises(CampaignInvalidError, match=r"baseline\.num_microbatches: it is missing"):
        make_spec({"tp": 2}, space)
    stated = make_spec({"tp": 2, "num_microbatches": 2}, space).baseline
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


def simulation(**changes: Any) -> CampaignSpec:
    return spec_of(cluster="local-cpu", space={"global_batch_size": 8, "tp": [1, 2]}, **changes)


@pytest.mark.parametrize(
    ("said", "seed"), [(True, 0), ({}, 0), ({"seed": 5}, 5), (False, None), (None, None)]
)
def test_a_campaign_says_whether_it_is_simulated_and_with_which_seed(
    said: object, seed: int | None
) -> None:
    spec = simulation(simulated=said)
    assert (None if spec.simulated is None else spec.simulated.seed) == seed
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    assert ("simulated" in spec.to_mapping()) == is_simulator(spec.trainer) == (seed is not None)


def test_its_probes_are_the_simulators_with_its_seed_and_the_rules_of_others() -> None:
    spec = simulation(simulated={"seed": 5, "version": 3})
    assert spec.trainer == "simulator-3"
    assert spec.rule_scopes == simulation().rule_scopes
    assert SimulationSettings().trainer == simulator_trainer(SIMULATOR_VERSION)
    request = spec.probe_request(Layout())
    assert request.simulation_seed == 5
    assert ProbeRequest.from_mapping(request.to_mapping()) == request
    assert "simulation_seed" not in simulation().probe_request(Layout()).to_mapping()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"simulated": True, "budget": {"wall_time": "10m"}},
            "budget.wall_time_s: the probes of a simulated campaign take simulated time",
        ),
        ({"simulated": {"seed": -1}}, "simulated.seed: -1"),
        ({"simulated": "frontier"}, "simulated: "),
        ({"simulated": {"sead": 1}}, "did you mean 'seed'"),
        ({"probe": {"trainer": "simulator-1"}}, "add `simulated: true` to the campaign"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_in_words(changes: Any, problem: str) -> None:
    with pytest.raises(SearchSpaceError, match=re.escape(problem)):
        simulation(**changes)


def test_tables_of_simulated_campaigns_say_so() -> None:
    source = own_source("rehearsal", simulator_trainer(), seed=5)
    assert source == "simulated by simulator-2, seed 5: layout-tuner campaign rehearsal"
    sizes = {"seq_length": 8, "num_devices": 1, "global_batch_size": 8}
    key = CellKey(source=source, cluster="box", model="tiny", **sizes)
    assert key.is_simulated
    assert key.software
