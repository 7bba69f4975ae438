from __future__ import annotations

import pickle
from typing import Any

import pytest
from sqlalchemy import select

from results_db.errors import TrialFilterInvalidError
from results_db.models.tables import MeasurementRow, Trial
from results_db.store import Store
from results_db.trials.filter import KNOB_FIELDS, TrialFilter
from results_db.trials.filter_sql import conditions
from search_spaces.protocol.metrics import METRICS
from search_spaces.spec.layout import LAYOUT_FIELDS, Layout
from tests.kit.store import ODD, failed, make_campaign, make_worker, run_trial

pytestmark = pytest.mark.sqlite_is_enough


@pytest.fixture
def two(store: Store) -> Store:
    """Trial 1 is plain and measured 100 tokens/s, trial 2 the odd one and measured 300."""
    campaign = make_campaign(store)
    make_worker(store, num_nodes=2, devices_per_node=32)
    for layout, tokens_per_s in ((Layout(), 100.0), (ODD, 300.0)):
        peaks = {"mfu": tokens_per_s / 1000, "peak_memory_bytes": int(tokens_per_s)}
        run_trial(store, campaign, layout, tokens_per_s=tokens_per_s, **peaks)
    return store


def found(store: Store, **stated: Any) -> list[int]:
    wanted = TrialFilter(**stated)
    query = select(Trial.number).outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
    with store._db.read() as session:
        return list(session.scalars(query.where(*conditions(wanted)).order_by(Trial.number)))


def test_each_knob_of_a_layout_holds_trials_to_its_values(two: Store) -> None:
    assert set(LAYOUT_FIELDS) < set(KNOB_FIELDS)
    for knob in KNOB_FIELDS:
        plain, odd = getattr(Layout(), knob), getattr(ODD, knob)
        assert found(two, **{knob: (odd,)}) == [2], knob
        assert found(two, **{knob: (plain,)}) == [1], knob
        assert found(two, **{knob: (plain, odd)}) == [1, 2], knob


def test_each_metric_has_a_least_and_a_most_that_include_their_ends(two: Store) -> None:
    first, second = (two.trials.get(id_) for id_ in (1, 2))
    for metric in METRICS:
        values = [
            trial.objective(metric)
            if metric == "tokens_per_node_hour"
            else getattr(trial.measurement, metric)
            for trial in (first, second)
        ]
        low, high = sorted(values)
        assert found(two, **{f"max_{metric}": low}) == [1 + values.index(low)], metric
        assert found(two, **{f"min_{metric}": high}) == [1 + values.index(high)], metric
        assert found(two, **{f"min_{metric}": low, f"max_{metric}": high}) == [1, 2], metric


@pytest.mark.sqlite_is_enough(False)
def test_states_reasons_nodes_and_bounds_are_filtered_by_and_all_must_hold(two: Store) -> None:
    campaign = two.campaigns.by_name("first").id
    run_trial(two, campaign, Layout(tp=4), failed("crashed"))
    two.trials.add(campaign, Layout(tp=8))
    assert found(two) == [1, 2, 3, 4]
    assert found(two, states=("FAILED", "PENDING")) == [3, 4]
    assert found(two, reasons=("crashed",)) == [3]
    assert found(two, nodes=("node-1",)) == [3]
    assert found(two, nodes=("node-2",)) == []
    assert found(two, tp=(2,), min_tokens_per_s=200.0) == [2]
    assert found(two, tp=(1,), min_tokens_per_s=200.0) == []
    assert found(two, min_tokens_per_s=0.0) == [1, 2], "what was not measured is left out"
    assert TrialFilter(min_mfu=0.0).needs_measurement
    assert not TrialFilter(tp=(1,)).needs_measurement


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"tp": (0, -1)}, "tp=-1 is not a whole number from 0 to 2147483647"),
        ({"tp": (True,)}, "tp=True is not a whole number"),
        ({"tp": (2**31,)}, "is not a whole number from 0 to 2147483647"),
        ({"tp": [1]}, "is not a tuple"),
        ({"tp": tuple(range(101))}, "tp lists 101 values; at most 100"),
        ({"precision": ("fp4",)}, "'fp4' is not one of fp32, bf16, fp16, fp8"),
        ({"sequence_parallel": (1,)}, "1 is not one of False, True"),
        ({"states": ("DONE",)}, "'DONE' is not one of PENDING"),
        ({"nodes": ("a\x00b",)}, "is not a text in printable characters"),
        ({"reasons": ("x" * 41,)}, "is longer than 40 characters"),
        ({"min_mfu": float("nan")}, "min_mfu=nan is not a finite number"),
        ({"max_mfu": float("inf")}, "max_mfu=inf is not a finite number"),
        ({"min_peak_memory_bytes": 1.5}, "min_peak_memory_bytes=1.5 is not a whole number"),
        ({"max_peak_memory_bytes": 2**63}, "is not a whole number up to"),
        ({"min_mfu": 0.5, "max_mfu": 0.4}, "min_mfu=0.5 is over max_mfu=0.4"),
    ],
)
def test_a_filter_that_no_trial_can_meet_is_refused(stated: dict[str, Any], words: str) -> None:
    with pytest.raises(TrialFilterInvalidError, match=words):
        TrialFilter(**stated)


def test_a_filter_is_a_value_and_has_no_other_fields() -> None:
    one, same = TrialFilter(min_mfu=0.3, tp=(2,)), TrialFilter(tp=(2,), min_mfu=0.3, pp=())
    assert one == same
    assert hash(one) == hash(same)
    assert one != TrialFilter(tp=(2,))
    assert pickle.loads(pickle.dumps(one)) == one
    assert (one.tp, one.pp, one.min_mfu, one.max_mfu) == ((2,), (), 0.3, None)
    assert TrialFilter(tp=(), min_mfu=None) == TrialFilter()
    with pytest.raises(TypeError, match="TrialFilter has no field 'tpp'"):
        TrialFilter(tpp=(2,))
    with pytest.raises(AttributeError, match="TrialFilter has no field 'tpp'"):
        _ = TrialFilter().tpp
