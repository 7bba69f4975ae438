"""Chances and costs of a plan that do not contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.predictions.belief.plan import Plan, PlannedLayout, make_plan
from layout_tuner.predictions.belief.plan_parts.bought_probes import BoughtProbes
from layout_tuner.predictions.belief.plan_text import plan_lines
from tests.layout_tuner.predictions.belief.test_plan import SPACE, all_of, campaign


def text_of(plan: Plan) -> str:
    return " ".join(" ".join(plan_lines(plan, None)).split())


def test_where_nothing_fits_no_number_of_probes_has_a_chance() -> None:
    smallest = min(each.predicted.peak_memory_bytes for each in all_of(campaign()).layouts)
    # Submission refuses only what exceeds the memory by more than its margin.
    memory = {"preset": "frontier", "num_nodes": 4, "device_memory_bytes": int(0.85 * smallest)}
    plan = make_plan(campaign(cluster=memory))
    assert plan.expected_fitting < 0.5
    assert plan.some_fit < 0.1
    assert (plan.probes_needed, plan.needed) == (None, None)
    assert plan.budget.chance < 0.1
    assert sum(each.best_chance or 0.0 for each in plan.layouts) <= plan.some_fit + 1e-9
    text = text_of(plan)
    assert "has a 90 % chance" not in text
    assert f"since with probability {1 - plan.some_fit:.2f} no layout fits into memory" in text


LONG_STEPS = SPACE | {"global_batch_size": 4096}


@pytest.fixture(scope="module")
def late() -> Plan:
    """A plan whose probes all last longer than their deadline."""
    return make_plan(campaign(space=LONG_STEPS, probe={"deadline": "90s"}))


@pytest.fixture(scope="module")
def in_time() -> Plan:
    """The same with a deadline that none of them reaches."""
    return make_plan(campaign(space=LONG_STEPS, probe={"deadline": "10h"}))


def test_probes_longer_than_the_deadline_find_nothing(late: Plan) -> None:
    assert late.budget.num_late == late.budget.num_probes == 10
    assert late.budget.chance == 0.0


def test_probes_within_the_deadline_find_something(in_time: Plan) -> None:
    assert in_time.budget.num_late == 0
    assert in_time.budget.chance > 0.0


def test_what_a_search_needs_does_not_follow_its_deadline(late: Plan, in_time: Plan) -> None:
    assert late.needed is not None
    assert late.needed == in_time.needed


def test_a_plan_says_what_a_short_deadline_costs(late: Plan, in_time: Plan) -> None:
    text = text_of(late)
    assert "10 of them would last longer than probe.deadline, 90 s, and end as timeouts" in text
    raised = (
        f"if probe.deadline is raised from 90 s: the longest takes {late.needed.longest_s:,.0f} s"
    )
    assert raised in text
    assert "the budget buys a chance of under 1 %" in text
    assert "deadline" not in text_of(in_time)


def test_a_plan_says_the_node_hours_of_its_90_percent_and_the_chance_of_its_budget() -> None:
    probe = {"deadline": "10h"}
    plan = all_of(campaign(probe=probe))
    likely = sorted(plan.layouts, key=lambda each: (-(each.best_chance or 0.0), each.rank))
    assert plan.probes_needed is not None
    needed = likely[: plan.probes_needed]
    node_s = sum(each.layout.num_nodes * (60 + 12 * each.predicted.step_time_s) for each in needed)
    assert plan.needed is not None
    assert plan.needed.node_hours == pytest.approx(node_s / 3600)
    just, less = (
        make_plan(campaign(probe=probe, budget={"node_hours": node_s / 3600 * share})).budget.chance
        for share in (1.0001, 0.9999)
    )
    assert less < 0.9 <= just
    bound = make_plan(campaign(probe=probe, budget={"trials": 1}))
    assert bound.budget.chance < plan.budget.chance
    text = text_of(plan)
    assert f"and takes {plan.needed.node_hours:.3g} node-hours; the budget buys a chance of" in text


@pytest.mark.parametrize("deadline", ["62s", "70s", "10h"])
@pytest.mark.parametrize("node_hours", [2.0, 4.0])
@pytest.mark.parametrize("changes", [{}, {"global_batch_size": 2048}, {"num_nodes": 4}], ids=str)
def test_node_hours_pay_for_no_fewer_cheap_probes_than_full_ones(
    deadline: str, node_hours: float, changes: dict[str, Any]
) -> None:
    spec = campaign(
        space=SPACE | changes, budget={"node_hours": node_hours}, probe={"deadline": deadline}
    )
    bought = make_plan(spec).budget
    assert bought.cheap_probes is not None
    assert bought.num_probes > 0
    assert bought.cheap_probes + 1 >= bought.num_probes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"cluster": {"preset": "frontier", "num_nodes": 16}},
            "on {} of 16 nodes: the space has num_nodes of 4 at most",
        ),
        (
            {},
            "on {} of 4 nodes, since tokens_per_s_per_device is larger there (the best on 4 is rank ",
        ),
        (
            {"space": SPACE | {"global_batch_size": 8, "pp": 1, "tp": 1, "micro_batch_size": 1}},
            "on {} of 4 nodes: no layout on 4 nodes is legal",
        ),
    ],
    ids=["stated space", "objective", "illegal"],
)
def test_the_first_line_says_why_the_best_takes_fewer_nodes_than_there_are(
    changes: dict[str, Any], says: str
) -> None:
    plan = make_plan(campaign(**changes))
    taken = plan.layouts[0].layout.num_nodes
    assert plan.nodes.startswith(says.format(taken))
    assert plan.nodes in text_of(plan)
    if "rank" in says:
        rank = int(plan.nodes.partition("is rank ")[2].split(";")[0])
        first = next(each.rank for each in all_of(campaign()).layouts if each.layout.num_nodes == 4)
        assert rank == first


def test_a_plan_on_all_nodes_and_one_for_a_whole_machine_give_no_reason() -> None:
    assert make_plan(campaign(space=SPACE | {"num_nodes": 4})).nodes == ""
    assert make_plan(campaign(cluster="frontier", space=SPACE | {"num_nodes": 4})).nodes == ""


BASELINE = {"num_nodes": 4, "tp": 8, "pp": 1, "micro_batch_size": 1}
IN_TIME = {"deadline": "10h"}


def bought(spec_budget: dict[str, Any], **more: Any) -> BoughtProbes:
    return make_plan(campaign(probe=IN_TIME, budget=spec_budget, **more)).budget


@pytest.fixture(scope="module")
def baseline() -> PlannedLayout:
    """A baseline among all layouts of its plan."""
    plan = all_of(campaign(probe=IN_TIME, baseline=BASELINE))
    assert plan.baseline is not None
    return plan.baseline.planned


@pytest.fixture(scope="module")
def alone() -> BoughtProbes:
    """What two trials buy without a baseline."""
    return bought({"trials": 2})


@pytest.fixture(scope="module")
def own_s(baseline: PlannedLayout) -> float:
    """Seconds of the baseline's probe: its start, and twelve steps."""
    return 60 + 12 * baseline.predicted.step_time_s


def test_a_baseline_may_be_none_of_the_best(baseline: PlannedLayout) -> None:
    assert baseline.rank > 2
    assert (baseline.best_chance or 0.0) < 0.01


def test_trials_pay_the_probe_of_the_baseline_first(alone: BoughtProbes, own_s: float) -> None:
    beside = bought({"trials": 3}, baseline=BASELINE)
    assert (alone.num_probes, beside.num_probes) == (2, 2)
    assert (alone.baseline_s, beside.baseline_s) == (None, pytest.approx(own_s))
    assert beside.chance == alone.chance
    assert beside.node_hours == pytest.approx(alone.node_hours + 4 * own_s / 3600)


def test_one_trial_buys_the_baseline_and_no_chance() -> None:
    assert bought({"trials": 1}, baseline=BASELINE).chance == 0.0


def test_node_hours_pay_the_probe_of_the_baseline_first(alone: BoughtProbes, own_s: float) -> None:
    hours = alone.node_hours
    short = bought({"node_hours": hours * 1.0001}, baseline=BASELINE)
    paid = bought({"node_hours": (hours + 4 * own_s / 3600) * 1.0001}, baseline=BASELINE)
    assert short.num_probes < paid.num_probes == 2


def test_a_plan_says_that_the_baseline_is_measured_first() -> None:
    text = text_of(make_plan(campaign(budget={"trials": 3}, baseline=BASELINE)))
    assert "the budget pays for the baseline, which is measured first, and 2 probes of the" in text


def test_a_baseline_that_is_likely_the_best_is_found_by_its_own_probe() -> None:
    layouts = all_of(campaign(probe={"deadline": "10h"})).layouts
    best = max(layouts, key=lambda each: each.best_chance or 0.0)
    baseline = best.layout.to_mapping(every_knob=True)
    plan = make_plan(campaign(budget={"trials": 1}, probe={"deadline": "10h"}, baseline=baseline))
    assert plan.budget.num_probes == 0
    assert plan.budget.chance > 0.0
    every = all_of(campaign(budget={"trials": 10_000}, baseline=baseline))
    assert every.budget.num_probes == every.num_legal - 1


@pytest.mark.parametrize(
    ("fields", "probes", "ended_by"),
    [
        ({"budget": {"trials": 20_000}}, 20_000, "trials"),
        ({"budget": {"trials": 10**6}}, 21_760, "layouts"),
        ({"budget": {}, "strategy": "exhaustive"}, 21_760, "layouts"),
    ],
)
def test_a_budget_for_tens_of_thousands_of_probes_pays_for_all_of_them(
    fields: dict[str, Any], probes: int, ended_by: str
) -> None:
    space = SPACE | {
        "global_batch_size": {"min": 1, "max": 1 << 20},
        "micro_batch_size": {"from": 1, "to": 4},
        "num_microbatches": {"from": 1, "to": 160},
    }
    plan = make_plan(campaign(space=space, **fields))
    assert plan.num_legal == 21_760
    assert (plan.budget.num_probes, plan.budget.ended_by) == (probes, ended_by)
    assert plan.budget.expected_fitting <= plan.expected_fitting
    if probes == plan.num_legal:
        assert plan.budget.expected_fitting == pytest.approx(plan.expected_fitting)
