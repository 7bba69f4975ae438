"""The benchmark of the workers at small size: its results follow from what the ranks wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_workers import measure, storm_figures
from benchmarks.trainer.turn_around import RANK_ENTRY, DeviceTimeShare, TurnAround, recorded_service
from benchmarks.workers.fault_storm import Storm, spread, storm
from benchmarks.workers.rank_faults import FAULTS, fault_named, seed_of
from benchmarks.workers.rank_records import Moment, by_group

pytestmark = pytest.mark.ranks


def make_moment(at_s: float, what: str, group: str = "a", **changes: float) -> Moment:
    return Moment(at_s=at_s, what=what, group=group, rank=0, **changes)  # type: ignore[arg-type]


def make_storm(**changes: object) -> Storm:
    clean = {"wrong": [], "left_running": [], "left": [], "files_left": []}
    figures = {"descriptors": (30, 31), "memory_gone_bytes": 1 << 20, "wall_s": 100.0}
    return Storm(**{"num_probes": 200, "num_faults": 60, **clean, **figures, **changes})  # type: ignore[arg-type]


def test_a_group_lasts_from_its_first_rank_to_the_last_word_of_any() -> None:
    first, second = by_group(
        [
            make_moment(1.0, "entered"),
            make_moment(2.0, "iteration", step_time_s=0.5),
            make_moment(3.0, "iteration", step_time_s=0.25),
            make_moment(3.5, "result"),
            make_moment(4.0, "entered", "b"),
            make_moment(4.5, "fault", "b"),
        ]
    )
    assert (first.entered_s, first.first_iteration_s, first.last_s) == (1.0, 2.0, 3.5)
    assert (first.num_iterations, first.iterations_s) == (2, 0.75)
    assert (second.entered_s, second.first_iteration_s, second.last_s) == (4.0, None, 4.5)


def test_torchrun_is_compared_by_medians() -> None:
    turn = TurnAround(gaps_s=(0.1, 0.2, 0.9), torchrun_s=(3.0, 1.0, 2.0))
    assert (turn.gap_s, turn.times) == (0.2, 10.0)
    assert turn.gap_p90_s > 0.8
    assert DeviceTimeShare(iterations_s=6.0, wall_s=8.0, num_probes=2, num_devices=2).share == 0.75


def test_every_fault_has_seeds_of_its_own() -> None:
    seeds = [seed_of(fault, again) for again in range(3) for fault in FAULTS]
    assert seeds == list(range(1, 3 * len(FAULTS) + 1))
    assert sum(spread(60).values()) == 60
    assert set(spread(60)) == set(FAULTS)


def test_whatever_is_left_misses_what_is_asked() -> None:
    assert all(figure.reached for figure in storm_figures(make_storm()))
    for what in ("left", "left_running", "files_left", "wrong"):
        figures = storm_figures(make_storm(**{what: ["17 a daemon"]}))
        assert [figure.reached for figure in figures].count(False) == 1, what
    assert not all(f.reached for f in storm_figures(make_storm(descriptors=(30, 90))))
    assert not all(f.reached for f in storm_figures(make_storm(memory_gone_bytes=1 << 32)))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_turn_around_is_measured_through_the_whole_product() -> None:
    figures = measure("turn-around", 1)
    assert len(figures) == 4
    assert all("s" in figure.measured for figure in figures)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_storm_of_faults_leaves_nothing(tmp_path: Path) -> None:
    """Every way to fail that costs no node; the costly ones have tests of their own."""
    faults = {fault: 1 for fault in FAULTS if fault.attempts == 1}
    faults[fault_named("loses its zygote")] = 1
    with recorded_service(tmp_path, num_workers=0) as service:
        found = storm(service, num_probes=len(faults) + 5, faults=faults, rank_entry=RANK_ENTRY)
    assert found.wrong == []
    assert (found.left, found.left_running, found.files_left) == ([], [], [])
    assert found.descriptors[1] <= found.descriptors[0] + 8
