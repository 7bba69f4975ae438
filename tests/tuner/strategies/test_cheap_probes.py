"""When a search has layouts probed in part, and when in full: on a simulated large job."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from statistics import median

import numpy as np
import pytest

from benchmarks.search.search_disturbances import NoisyProbes
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.observation import FAILED, INFEASIBLE, Observation
from layout_tuner.predictions.estimates.step_time import PRIOR, TERM_NAMES, time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity, ProbeCosts, fidelities
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables import TableCell, TableRow
from layout_tuner.tuner.replay.cell_layouts import CellLayouts
from layout_tuner.tuner.replay.run import ReplayRun, ReplayTask, observation_of, problem_of
from layout_tuner.tuner.strategies.ask_and_tell import AskLimits, LayoutSearch
from layout_tuner.tuner.strategies.cheap_probes import Candidate
from layout_tuner.tuner.strategies.registry import make_strategy
from layout_tuner.workers.simulation.scenarios import simulated_part, simulated_table

SCENARIO = "frontier-175b"
COSTS = ProbeCosts()
FRONTIER = replace(CLUSTER_PRESETS["frontier"], num_nodes=16)


@cache
def cell() -> TableCell:
    return simulated_table(SCENARIO, 0).cells[0]


def make_task(**changes: object) -> ReplayTask:
    task = ReplayTask(
        cell=cell(),
        strategy="guided",
        seed=0,
        pending=1,
        probes=16,
        parts=partial(simulated_part, SCENARIO, 0),
        costs=COSTS,
        stop_within=None,
    )
    return replace(task, **changes)


@cache
def replayed() -> ReplayRun:
    return make_task().run()


def make_search(other: TableCell | None = None) -> LayoutSearch:
    found = other or cell()
    problem = problem_of(found, CellLayouts(found), Knowledge(), costs=COSTS)
    return make_strategy("guided", problem, seed=0)


def outcome(layout: Layout, fidelity: Fidelity | None) -> Observation:
    if fidelity is None:
        (row,) = (row for row in cell().merged if row.layout == layout)
        return observation_of(row)
    seen = observation_of(simulated_part(SCENARIO, 0, layout, fidelity))
    keeps = fidelity.keeps_memory(cell().model)
    return seen if keeps else replace(seen, peak_memory_bytes=None)


def ask(search: LayoutSearch, left_node_s: float | None = None) -> tuple[Layout, Fidelity | None]:
    layout = search.ask(AskLimits(left_node_s=left_node_s))
    assert layout is not None
    return layout, search.fidelity(layout)


def probe(search: LayoutSearch) -> tuple[Layout, Fidelity | None]:
    """Tells what the probe that is asked for comes to."""
    layout, fidelity = ask(search)
    search.tell(layout, outcome(layout, fidelity), fidelity=fidelity)
    return layout, fidelity


def num_other_probes(search: LayoutSearch, layout: Layout, number: int) -> int:
    """The number of layouts of so many probes, of which none is of this layout."""
    others = {probe(search)[0] for _ in range(number)}
    assert layout not in others
    return len(others)


def test_cheap_probes_explore_and_the_best_of_them_is_measured_in_full() -> None:
    probes = replayed().probes
    full = [place for place, probe in enumerate(probes) if probe.fidelity is None]
    assert 3 <= full[0] <= 12, "it explores first, and not for ever"
    seen = {probe.layout for probe in probes[: full[0]]}
    assert len(seen) == full[0], "no layout is probed twice in part"
    assert probes[full[0]].layout in seen
    assert all(probe.leader_regret is None for probe in probes[: full[0]])
    assert all(probe.regret is None for probe in probes if probe.fidelity is not None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_layout_that_is_measured_in_full_is_good_on_most_machines() -> None:
    regrets = []
    for seed in range(4):
        machine = simulated_table(SCENARIO, seed).cells[0]
        run = make_task(cell=machine, parts=partial(simulated_part, SCENARIO, seed)).run()
        regrets.append(next(each.leader_regret for each in run.probes if each.fidelity is None))
    assert median(regret for regret in regrets if regret is not None) <= 0.05


def test_a_cheap_probe_costs_a_fraction_and_is_predicted_as_what_runs() -> None:
    probes = replayed().probes
    cheap = [probe.node_seconds for probe in probes if probe.fidelity]
    assert max(cheap) < 0.3 * min(probe.node_seconds for probe in probes if not probe.fidelity)
    errors = [
        abs(probe.prediction.step_time_s / probe.step_time_s - 1)
        for probe in probes[3:]
        if probe.step_time_s is not None  # it fits
    ]
    assert len(errors) >= 10
    assert median(errors) < 0.1
    # The whole layout takes twice as long and more. Which layouts are probed depends on how the
    # processor rounds.
    assert max(errors) < 0.4


def test_an_interrupted_search_goes_on_as_if_it_had_not_been() -> None:
    search, told = make_search(), []
    for _ in range(9):
        layout, fidelity = ask(search)
        seen = outcome(layout, fidelity)
        search.tell(layout, seen, fidelity=fidelity)
        told.append((layout, fidelity, seen))
    rebuilt = make_search()
    for layout, fidelity, seen in told:
        rebuilt.tell(layout, seen, fidelity=fidelity)
    assert ask(rebuilt) == ask(search)


def test_the_last_of_a_budget_goes_to_a_full_probe_of_the_best() -> None:
    search = make_search()
    probed = []
    for _ in range(2):
        layout, fidelity = probe(search)
        assert fidelity is not None
        probed.append(layout)
    last, fidelity = ask(search, left_node_s=COSTS.node_s(16, 240.0))
    assert fidelity is None
    assert last in probed


def test_a_rest_that_pays_for_no_full_probe_is_left_unless_nothing_ran_in_full() -> None:
    search = make_search()
    too_little = 0.7 * COSTS.node_s(16, 228.0)
    layout, fidelity = ask(search, left_node_s=too_little)
    assert not search.is_held_back
    search.tell(layout, outcome(layout, fidelity), fidelity=fidelity)
    search.tell(layout, outcome(layout, None))
    assert search.ask(AskLimits(left_node_s=too_little)) is None
    assert search.is_held_back
    ask(search, left_node_s=4.0 * too_little)
    assert not search.is_held_back
    full = next(row.layout for row in cell().merged if row.layout != layout)
    search.resume(full)
    left_node_s = COSTS.node_s(16, 240.0) + too_little
    assert search.ask(AskLimits(left_node_s=left_node_s)) is None, (
        "a full probe that runs takes the rest"
    )


@pytest.mark.parametrize("observation", [INFEASIBLE, FAILED])
def test_a_part_that_cannot_run_ends_its_layout_and_one_that_runs_does_not(
    observation: Observation,
) -> None:
    search = make_search()
    layout, fidelity = ask(search)
    search.tell(layout, observation, fidelity=fidelity)
    assert num_other_probes(search, layout, 14) < 14, "one that ran is measured in full"


def test_few_layers_are_probed_only_where_the_layout_surely_fits() -> None:
    model = cell().model
    few = [p for p in replayed().probes if p.fidelity and not p.fidelity.keeps_memory(model)]
    assert few
    for probe in few:
        assert probe.prediction.fit_probability > 0.8
        assert probe.prediction.peak_memory_bytes < 0.6 * cell().cluster.device_memory_bytes


def probe_until(search: LayoutSearch, *, few_layers: bool) -> tuple[Layout, Fidelity]:
    """Tells cheap probes until one of this kind, which is not told."""
    for _ in range(20):
        layout, fidelity = ask(search)
        if fidelity is not None and fidelity.keeps_memory(cell().model) != few_layers:
            return layout, fidelity
        search.tell(layout, outcome(layout, fidelity), fidelity=fidelity)
    raise AssertionError("no probe of this kind")


def test_a_probe_of_few_layers_that_runs_is_no_evidence_that_the_layout_fits() -> None:
    search = make_search()
    layout, fidelity = probe_until(search, few_layers=True)
    before = search.predict(layout)
    search.tell(layout, outcome(layout, fidelity), fidelity=fidelity)
    search.resume(layout)  # the prediction at its proposal is not remembered any more
    ask(search)
    after = search.predict(layout)
    assert after.fit_probability == pytest.approx(before.fit_probability, abs=1e-6)


TOLD, FAILS, RESUME, WITHDRAW = "told", "fails", "resume", "withdraw"


@pytest.mark.parametrize(
    ("story", "same_as"),
    [
        ([(TOLD, 1), (RESUME, None), (FAILS, 2), (RESUME, None), (WITHDRAW, None)], [(TOLD, 1)]),
        ([(WITHDRAW, None), (RESUME, None), (TOLD, 2)], [(TOLD, 2)]),
        # The verdict on the first changes; after a restart it ended last.
        ([(FAILS, 1), (TOLD, 2), (TOLD, 1)], [(TOLD, 2), (TOLD, 1)]),
        ([(TOLD, None), (FAILS, None), (TOLD, None)], [(TOLD, None)]),
    ],
    ids=["a failed repeat", "asked for again", "restart", "a verdict on losses that changes back"],
)
def test_what_a_search_knows_of_cheap_probes_does_not_depend_on_the_way(
    story: list[tuple[str, int | None]], same_as: list[tuple[str, int | None]]
) -> None:
    searches = make_search(), make_search()
    for search, events in zip(searches, (story, same_as), strict=True):
        layout, fidelity = ask(search)
        seen = outcome(layout, fidelity)
        for event, run in events:
            if event == RESUME:
                search.resume(layout, fidelity=fidelity)
            elif event == WITHDRAW:
                search.withdraw(layout, fidelity=fidelity)
            else:
                # Runs differ, so that it shows which of them counts.
                ran = replace(seen, step_time_s=(1.0 + 0.1 * (run or 0)) * seen.step_time_s)
                told = FAILED if event == FAILS else ran
                search.tell(layout, told, run=run, fidelity=fidelity)
        assert search._history.is_free(search._index(layout)), "it may be measured in full"
    assert searches[0]._history.cheap == searches[1]._history.cheap
    assert ask(searches[0]) == ask(searches[1])


def test_a_layout_whose_full_probe_was_withdrawn_is_not_proposed_again() -> None:
    search = make_search()
    layout, fidelity = ask(search)
    search.tell(layout, outcome(layout, fidelity), run=1, fidelity=fidelity)
    search.resume(layout)
    search.resume(layout, fidelity=fidelity)  # its cheap probe is repeated meanwhile
    search.tell(layout, outcome(layout, fidelity), run=2, fidelity=fidelity)
    for _ in range(3):
        assert ask(search)[0] != layout, "it runs in full"
    search.withdraw(layout)
    search.tell(layout, outcome(layout, fidelity), run=2, fidelity=fidelity)
    num_other_probes(search, layout, 8)


def make_search_with_headroom() -> tuple[LayoutSearch, list[TableRow], list[TableRow]]:
    """A search; the completed rows that keep its headroom, and that break it, by step time."""
    problem = replace(
        problem_of(cell(), CellLayouts(cell()), Knowledge(), costs=COSTS), min_memory_headroom=0.3
    )
    completed = [row for row in cell().merged if row.step_time_s is not None]
    completed.sort(key=lambda row: row.step_time_s)
    kept, broken = (
        [
            row
            for row in completed
            if (row.peak_memory_bytes <= problem.allowed_memory_bytes) is fits
        ]
        for fits in (True, False)
    )
    return make_strategy("guided", problem, seed=0), kept, broken


def tell_cheap(search: LayoutSearch, layout: Layout) -> None:
    parts = fidelities(layout, cell().model, cell().cluster)
    kept = [part for part in parts if part.keeps_memory(cell().model)]
    fidelity = min(kept, key=lambda part: (part.num_microbatches, part.dp))
    search.tell(layout, outcome(layout, fidelity), fidelity=fidelity)


def test_a_layout_that_breaks_the_headroom_does_not_keep_others_from_a_full_probe() -> None:
    search, kept, broken = make_search_with_headroom()
    search.tell(kept[-1].layout, outcome(kept[-1].layout, None))
    for row in (*kept[:-1], *broken):
        tell_cheap(search, row.layout)
    layout, fidelity = ask(search)
    assert fidelity is None
    assert layout in [row.layout for row in kept], "broken ones are faster, and are never ranked"


def test_the_first_full_probe_that_can_be_ranked_may_exceed_the_budget() -> None:
    search, kept, broken = make_search_with_headroom()
    search.tell(broken[0].layout, outcome(broken[0].layout, None))  # such as a baseline
    for row in kept[:2]:
        tell_cheap(search, row.layout)
    layout, fidelity = ask(search, left_node_s=8 * 3600.0)
    assert fidelity is None
    assert layout in [row.layout for row in kept[:2]]


def test_several_workers_do_not_all_measure_in_full_at_once() -> None:
    search = make_search()
    for _ in range(6):
        probe(search)
    left = 1.5 * COSTS.node_s(16, 240.0)
    full = 0
    for _ in range(4):
        asked = search.ask(AskLimits(left_node_s=left))
        full += asked is not None and search.fidelity(asked) is None
    assert full <= 1, "the budget pays for one"
    run = make_task(pending=4, probes=60, budget_node_s=40 * 3600.0).run()
    assert sum(probe.node_seconds for probe in run.probes) < 44 * 3600.0
    assert run.probes[-1].leader_regret is not None


def test_little_gain_of_others_does_not_keep_a_layout_from_being_measured_in_full() -> None:
    """What a cheap probe finds costs a full one, too, before it counts."""
    cheap = make_search()._proposer._cheap
    costs = {"left_node_s": np.inf, "node_s": 60e3, "cheap_node_s": 5e3}
    assert cheap.is_turn_of_full(gain=0.004, cheap_gain=0.001, **costs)
    assert cheap.is_turn_of_full(gain=0.004, cheap_gain=0.004, **costs)
    assert not cheap.is_turn_of_full(gain=0.004, cheap_gain=0.006, **costs)
    assert not cheap.is_turn_of_full(gain=0.004, cheap_gain=0.02, **costs)


def part_of(layout: Layout) -> Fidelity:
    """The part with all layers and the fewest micro-batches."""
    parts = fidelities(layout, cell().model, cell().cluster)
    return next(part for part in parts if part.keeps_memory(cell().model))


def test_a_quicker_reduction_than_estimated_makes_no_layout_without_one_look_slow() -> None:
    """After few micro-batches it is up to a third of what cheap probes of most layouts measure."""
    once = np.array([name.startswith(("data_", "weights_", "gather_")) for name in TERM_NAMES])
    factors, kernels = PRIOR * np.where(once, 0.1, 1.0), kernels_of(cell().key.software, FRONTIER)

    def takes_s(layout: Layout) -> float:
        terms = time_terms(layout, cell().model, FRONTIER, kernels=kernels)
        return float(terms.step_time_s(factors)[0])

    def seen(layout: Layout) -> Observation:
        step_s = takes_s(layout)
        return Observation.completed(1.0 / step_s, step_time_s=step_s, peak_memory_bytes=2**30)

    search = make_search()
    ran = [row.layout for row in cell().merged if row.step_time_s is not None]
    reducing = [each for each in ran if each.dp == 4 and each.pp < 16 and each.micro_batch_size < 4]
    alone = next(each for each in ran if each.dp == 1)
    for layout in (*reducing[:6], alone):
        part = part_of(layout)
        search.tell(layout, seen(part.reduced(layout)), fidelity=part)
    for layout in reducing[:3]:
        search.tell(layout, seen(layout))
    assert search.predict(alone).step_time_s == pytest.approx(takes_s(alone), rel=0.02)


def test_a_part_runs_the_longer_the_more_of_it_is_fixed() -> None:
    search = make_search()
    proposer = search._proposer
    belief = proposer._predictions.belief(search._history)

    def times_fewest(dp: int, zero_stage: int) -> float:
        """Micro-batches of the chosen part over the fewest that could be chosen."""
        knobs = {"tp": 8, "vpp": 1, "micro_batch_size": 1, "dp": dp, "zero_stage": zero_stage}
        layouts = (row.layout for row in cell().merged)
        layout = next(one for one in layouts if knobs.items() <= one.to_mapping().items())
        figures = {"log_s": 6.0, "log_sd": 0.05, "above_best": 0.0, "runs": 1.0}
        candidate = Candidate(row=search._index(layout), **figures)
        part, _ = proposer._cheap.choose(belief, candidate)
        return part.num_microbatches / part_of(layout).num_microbatches

    assert times_fewest(dp=1, zero_stage=0) == 1, "one replica has no gradients to reduce"
    assert times_fewest(dp=4, zero_stage=1) >= 2, "of the shortest part it may be half"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_searches_end_near_the_best_where_cheap_probes_of_others_looked_faster() -> None:
    """Of these three machines 60 probes, of which 55 and more were cheap, found none."""
    found = []
    for seed in (4, 19, 21):
        machine = simulated_table(SCENARIO, seed).cells[0]
        parts = partial(simulated_part, SCENARIO, seed)
        run = make_task(
            cell=machine,
            seed=seed,
            parts=parts,
            probes=60,
            stop_within=0.02,
            disturbance=NoisyProbes(),
        ).run()
        found.append(run.probes_to(0.02) is not None)
    assert sum(found) >= 2


def test_jobs_of_few_micro_batches_and_searches_without_costs_probe_in_full() -> None:
    small = simulated_table("a100-1.3b", 0).cells[0]
    few = tuple(row for row in small.rows if row.layout.num_microbatches <= 8)
    without_costs = problem_of(cell(), CellLayouts(cell()), Knowledge())
    for search in (
        make_search(replace(small, rows=few)),
        make_strategy("guided", without_costs, seed=0),
    ):
        assert ask(search)[1] is None


def test_the_budget_of_a_replay_ends_it_and_counts_starts_and_warm_up() -> None:
    run = make_task(budget_node_s=4 * 3600.0, probes=60).run()
    spent = np.cumsum([probe.node_seconds for probe in run.probes])
    assert spent[-1] >= 4 * 3600.0
    assert spent[-2] < 4 * 3600.0
    first = run.probes[0]
    nodes = first.fidelity.reduced(first.layout).num_nodes
    assert first.node_seconds == pytest.approx(nodes * (60.0 + 6 * first.step_time_s))
