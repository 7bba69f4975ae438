"""What many runs come to."""

import pytest

from tests.tuner.replay.made_run import make_run
from tuner.replay.report import summarize


def test_a_run_that_fails_to_get_there_counts_one_probe_more_than_it_was_allowed() -> None:
    runs = [make_run(0.04), make_run(0.5, 0.01), make_run(0.5, 0.4, 0.3, 0.2)]
    to = summarize(runs)["probes_to"]
    assert to["0.05"] == {
        "median": 2.0,
        "mean": pytest.approx((1 + 2 + 11) / 3),
        "q25": 1.5,
        "q75": 6.5,
        "reached": pytest.approx(2 / 3),
    }
    assert to["0.02"]["median"] == 11.0
    assert to["0"]["reached"] == 0.0


def test_failed_probes_are_counted_over_the_run_and_up_to_the_first_find() -> None:
    runs = [make_run(None, None, 0.0, None, 0.5), make_run(0.01, None, 0.5)]
    summary = summarize(runs)
    assert summary["failed_probes"] == 2.0
    assert summary["failed_share_to"]["0.05"] == 2 / 4
    assert summary["failed_share_to"]["0"] == (2 + 1) / (3 + 3)


def test_regret_after_some_probes_is_that_of_the_best_so_far() -> None:
    runs = [make_run(None, 0.6, 0.3, 0.5, 0.2), make_run(0.4, 0.8, 0.1)]
    summary = summarize(runs)
    assert summary["regret_after"] == pytest.approx(
        {"1": 0.7, "3": 0.2, "5": 0.15, "10": 0.15, "20": 0.15}
    )
    assert summary["mean_regret_after"]["1"] == pytest.approx(0.7)


def test_seconds_of_search_are_shared_out_over_the_probes() -> None:
    runs = [make_run(0.5, 0.4, search_s=3.0), make_run(0.5, 0.4, 0.3, search_s=1.0)]
    assert summarize(runs)["seconds_per_probe"] == 4.0 / 5
