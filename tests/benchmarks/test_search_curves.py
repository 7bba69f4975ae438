"""The curves of regret over what searches spent."""

import numpy as np

from benchmarks.search.search_curves import regret_by_cost, regret_by_probes
from tests.tuner.replay.made_run import make_run


def test_anytime_curves_hold_the_best_so_far_and_its_quartiles() -> None:
    runs = [make_run(None, 0.6, 0.2), make_run(0.4, 0.5), make_run(0.3, 0.1, 0.2)]
    curve = regret_by_probes(runs, 4)
    np.testing.assert_allclose(curve.spent, [1, 2, 3, 4])
    np.testing.assert_allclose(curve.median, [0.4, 0.4, 0.2, 0.2])
    np.testing.assert_allclose(curve.low, [0.35, 0.25, 0.15, 0.15])
    np.testing.assert_allclose(curve.high, [0.7, 0.5, 0.3, 0.3])


def test_regret_by_cost_changes_only_when_a_probe_is_paid_in_full() -> None:
    # Every probe costs 2 node-seconds, and 4 are one unit.
    curve = regret_by_cost([make_run(0.4, 0.2, 0.1)], units=[4.0], grid=[0.0, 0.4, 0.5, 1.0, 9.0])
    np.testing.assert_allclose(curve.median, [1.0, 1.0, 0.4, 0.2, 0.1])
