"""The parts of the search benchmark: each figure against a made-up case whose answer is known."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_search
from benchmarks.search.search_cells import CellGroup, cells_table, failed_before, probes_needed
from benchmarks.search.search_conditions import DEFINED, wrong_cluster
from benchmarks.search.search_coverage import converged_at, held
from benchmarks.search.search_disturbances import NoisyProbes, SlowNode, SlowProbes
from benchmarks.search.search_known import known_cells
from benchmarks.search.search_recipes import read_recipes, recipes
from benchmarks.search.search_record import Part, Promise, SearchRecord
from benchmarks.search.search_runs import Effort
from search_spaces.estimates.prediction import Prediction
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.tables import read_table
from tests.search_spaces.tables.tables import layouts, make_row, make_text
from tests.tuner.replay.cells import make_cell
from tests.tuner.replay.made_run import KEY, make_run
from tuner.replay.run import ProbeConditions, ReplayedProbe, ReplayRun

ROW = make_cell([1.0]).merged[0]


def run_of(*probes: ReplayedProbe) -> ReplayRun:
    return ReplayRun(
        cell=KEY, strategy="guided", seed=0, num_probes=60, probes=probes, search_s=0.0
    )


def make_probe(
    regret: float,
    leader: float,
    *,
    slowdown: float = 1.0,
    predicted_s: float = 1.0,
    expected: float | None = None,
) -> ReplayedProbe:
    return ReplayedProbe(
        layout=Layout(),
        regret=regret,
        leader_regret=leader,
        ended_at_s=0.0,
        node_seconds=1.0,
        step_time_s=1.0,
        conditions=ProbeConditions(slowdown=slowdown),
        prediction=Prediction.of(
            log_step_time=math.log(predicted_s),
            log_step_time_sd=0.1,
            peak_memory_bytes=1.0,
            fit_probability=1.0,
            source="estimates",
        ),
        possible_improvement=expected,
    )


def test_the_share_of_slow_probes_is_as_stated_and_depends_on_the_seed_and_the_number_alone() -> (
    None
):
    slow = SlowProbes()
    met = [slow(ROW, seed, number).slowdown for seed in range(40) for number in range(100)]
    assert set(met) == {1.0, 1.5}
    assert np.mean(np.array(met) > 1) == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / 4000))
    other = make_cell([1.0, 2.0]).merged[1]
    assert [slow(other, 0, number).slowdown for number in range(100)] == met[:100]
    assert [SlowProbes(draw=1)(ROW, 0, number).slowdown for number in range(100)] != met[:100]


def test_noise_has_the_stated_spread() -> None:
    off = [math.log(NoisyProbes(noise=0.02)(ROW, 0, number).slowdown) for number in range(2000)]
    # The standard error of a standard deviation of n draws is its share 1 / sqrt(2 n).
    assert np.std(off) == pytest.approx(0.02, rel=4 / math.sqrt(2 * 2000))
    assert np.mean(off) == pytest.approx(0, abs=4 * 0.02 / math.sqrt(2000))


def test_a_probe_is_slow_if_and_only_if_it_runs_on_the_slow_node() -> None:
    disturbance, needed = SlowNode(), ROW.layout.num_nodes
    met = [disturbance(ROW, 3, number) for number in range(400)]
    assert {len(set(conditions.nodes)) for conditions in met} == {needed}
    slow = [set(conditions.nodes) for conditions in met if conditions.slowdown > 1]
    (culprit,) = set.intersection(*slow)
    assert all(culprit not in c.nodes for c in met if c.slowdown == 1.0)
    counts = Counter(node for conditions in met for node in conditions.nodes)
    assert len(counts) == 8
    assert len(slow) / 400 == pytest.approx(needed / 8, abs=0.1)


def test_the_definitions_of_reaching_five_percent_part_where_the_best_was_measured_slow() -> None:
    run = run_of(
        make_probe(0.0, 0.0, slowdown=1.5),  # the best, measured a third worse: leads alone
        make_probe(0.2, 0.2),
        make_probe(0.04, 0.04),
    )
    found = {name: count(run, 0.05) for name, count in DEFINED.items()}
    assert found == {"reached": 1, "stays": 3, "measured": 3, "ended early": None}


def test_a_run_that_loses_its_good_leader_does_not_stay() -> None:
    run = run_of(make_probe(0.01, 0.01, slowdown=1.5), make_probe(0.2, 0.2))
    assert (DEFINED["reached"](run, 0.05), DEFINED["stays"](run, 0.05)) == (1, None)


def test_figures_by_cell_count_a_missing_run_as_one_probe_more() -> None:
    runs = [make_run(0.5, None, 0.01), make_run(0.3, 0.2)]
    assert [probes_needed(run, 0.05) for run in runs] == [3, 11]
    assert [failed_before(run, 0.05) for run in runs] == [1, 0]
    row = cells_table(runs).splitlines()[2]
    assert row.endswith("| 2 | 7.0 | 7.0 | 11 | 0.50 | 40.0% | 40.0% |")


def test_intervals_are_judged_by_the_logarithm_and_by_the_number_of_the_probe() -> None:
    run = run_of(make_probe(0, 0, predicted_s=1.21), make_probe(0, 0, predicted_s=1.22))
    # 1.96 standard deviations of 0.1 are a factor of 1.2165.
    assert list(held([run])) == [True, False]
    assert list(held([run], 2, 5)) == [False]


def test_a_search_converges_by_the_rule_of_campaigns() -> None:
    sure, unsure = make_probe(0.1, 0.03, expected=0.01), make_probe(0.1, 0.03, expected=0.05)
    assert converged_at(run_of(*[sure] * 4)) is None, "five must have completed"
    assert converged_at(run_of(*[unsure] * 9)) is None
    assert converged_at(run_of(*[unsure] * 6, sure, unsure)) is None, "twice in a row"
    found = converged_at(run_of(*[unsure] * 6, sure, sure))
    assert found is not None
    assert (found.num_probes, found.regret) == (8, 0.03)


def test_wrong_constants_are_twice_or_half_and_equal_inside_a_table() -> None:
    true = CLUSTER_PRESETS["h100-sxm"]
    ratios = []
    for draw in range(30):
        wrong = wrong_cluster(true, np.random.default_rng(draw))
        peaks = {
            wrong.peak_flops_per_s[precision] / peak
            for precision, peak in true.peak_flops_per_s.items()
        }
        assert len(peaks) == 1
        ratios.append(
            (
                *peaks,
                wrong.memory_bandwidth_bytes_per_s / true.memory_bandwidth_bytes_per_s,
                wrong.host_operation_s / true.host_operation_s,
                wrong.inter_node_latency_s / true.inter_node_latency_s,
            )
        )
    assert set(np.ravel(ratios)) == {0.5, 2.0}
    assert len(set(ratios)) > 10, "each rate has a factor of its own"


RECIPE = (
    "source,device,num_devices,model,num_layers,hidden_size,ffn_hidden_size,num_heads,seq_length,"
    "vocab_size,tp,pp,dp,vpp,sequence_parallel,micro_batch_size,num_microbatches,zero_stage,"
    "recompute,precision,step_time_s,tflops_per_device,tflops_kind\n"
    "paper,a100-80gb,8,m,24,2048,8192,16,2048,51200,2,2,2,1,0,1,16,0,full,fp16,{}\n"
)


def test_a_recipes_step_follows_from_the_flops_that_its_source_counts(tmp_path: Path) -> None:
    layers, h, s, vocab, batch = 24, 2048, 2048, 51200, 32
    # arXiv:2104.04473, equation 3 for full recomputation, and 72 and 12 without it.
    hardware = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    found = []
    for stated in (",100,hardware", ",100,model", "2.5,100,model"):
        path = tmp_path / "recipes.csv"
        path.write_text(RECIPE.format(stated))
        (recipe,) = read_recipes(path)
        found.append(recipe.step_time_s)
    assert found == pytest.approx([hardware / 8e14, model / 8e14, 2.5])


def test_recipes_that_are_absent_are_said_to_be(tmp_path: Path) -> None:
    part = recipes(tmp_path)
    assert part.text == "The tables have no published_recipes.csv."
    assert {promise.row()[3] for promise in part.promises} == {"not run"}


def test_a_group_selects_cells_and_is_empty_without_its_table() -> None:
    tables = {"made": read_table(make_text(make_row(), make_row(model="other")))}
    group = CellGroup(title="others", table="made", cells="model=other")
    assert [cell.key.model for cell in group.of(tables)] == ["other"]
    assert group.of({}) == ()


def test_searches_that_know_other_cells_stand_beside_the_same_ones_cold(tmp_path: Path) -> None:
    on_eight = [layout for layout in layouts() if layout["dp"] > 1]
    on_four = [
        each
        | {
            "num_devices": 4,
            "dp": each["dp"] // 2,
            "num_microbatches": 2 * each["num_microbatches"],
        }
        for each in on_eight
    ]
    rows = [
        make_row(model="llama-3B", step_time_s=0.5 + place / 10, **layout)
        for place, layout in enumerate([*on_eight, *on_four])
    ]
    rows.append(make_row(model="llama-8B", num_layers=12))
    (tmp_path / "t.csv").write_text(make_text(*rows))
    part = known_cells({"nanotron_h100": read_table(tmp_path / "t.csv")}, Effort(seeds=1))
    shown = [line.split("|")[1:4] for line in part.text.splitlines()[2:]]
    assert [[word.strip() for word in row] for row in shown] == [
        ["nanotron 3B, cold", "2", "2"],
        ["nanotron 3B, other models", "2", "2"],
        ["nanotron 3B, cold", "2", "2"],
        ["nanotron 3B, all other cells", "2", "2"],
        ["nanotron 3B, cold", "1", "1"],
        ["nanotron 3B, all cells on fewer devices", "1", "1"],
        ["nanotron 8B, cold", "1", "1"],
        ["nanotron 8B, other models", "1", "1"],
        ["nanotron 8B, cold", "1", "1"],
        ["nanotron 8B, all other cells", "1", "1"],
        ["nanotron 8B, cold", "1", "1"],
        ["nanotron 8B, all cells on fewer devices", "1", "1"],
    ]


def test_a_record_of_one_part_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## Other\n\nkept\n")
    section = SearchRecord.read(path)
    section.intro = "How it was run."
    for title in ("one", "two"):
        promise = Promise(what=f"{title}: probes", asked="2", measured=1, most=2)
        section.add(Part(title=title, text=f"text of {title}", promises=(promise,)))
    section.write(path)
    again = SearchRecord.read(path)
    worse = Promise(what="two: probes", asked="2", measured=3, most=2)
    again.add(Part(title="two", text="new", promises=(worse,)))
    again.write(path)
    written = path.read_text()
    assert "## Other\n\nkept" in written
    assert "How it was run.\n\n| what | asked | measured | reached |" in written
    assert "| one: probes | 2 | 1 | yes |\n| two: probes | 2 | 3 | **no** |" in written
    assert "### one\n\ntext of one\n\n### two\n\nnew" in written


def test_a_promise_may_have_a_lower_bound() -> None:
    rows = [
        Promise(what="a", asked="", measured=measured, most=0.97, least=0.92).row()[3]
        for measured in (0.9, 0.95, 0.99)
    ]
    assert rows == ["**no**", "yes", "**no**"]


def test_parts_that_are_unknown_are_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_search", "--only", "near-top,luck"])
    with pytest.raises(SystemExit, match="--only luck: choose from tiny_local_cpu, stress"):
        bench_search.main()
