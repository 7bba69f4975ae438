"""DeepHyper's centralised Bayesian optimisation with a surrogate of ours inside.

The surrogate answers what the belief expects of a layout, as a mean without deviation: DeepHyper's own
acquisition functions see one layout at a time and a normal distribution, and know neither what is
pending nor what may not fit, so all of that is in the figure already (decision 19). The one dimension
is the layout's place among the candidates, which comes back as it went in.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from deephyper.hpo import CBO, HpProblem
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PLACE = "place"


class ValueSurrogate(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor that was fitted elsewhere: the value of each candidate, negated, for CBO minimises."""

    def __init__(self, values: Floats) -> None:
        self.values = values

    def __sklearn_clone__(self) -> Self:
        return self

    def fit(self, _X: Any, _y: Any) -> Self:  # noqa: N803
        """Nothing: the belief has been told more than CBO ever hears."""
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """The negated value of each candidate, and a deviation of 0."""
        places = np.rint(np.asarray(X, dtype=np.float64)[:, 0]).astype(np.int64)
        mean = -self.values[places]
        return (mean, np.zeros_like(mean)) if return_std else mean


def ask_cbo(values: Floats, seed: int) -> int:
    """The place of the candidate that CBO proposes.

    Args:
        values: what each candidate is worth; more is better.
        seed: of CBO's generator.
    """
    problem = HpProblem()
    problem.add_hyperparameter((0, len(values)), _PLACE)
    points = [{_PLACE: place} for place in range(len(values))]
    problem.set_sampling_fn(lambda _: points)
    search = CBO(
        problem,
        random_state=seed,
        checkpoint_history_to_csv=False,
        surrogate_model=ValueSurrogate(np.append(values, values.min())),
        acq_func="UCB",
        acq_func_kwargs={"kappa": 0.0, "scheduler": {"type": "constant", "delay": 0}},
        acq_optimizer="sampling",
        acq_optimizer_kwargs={
            "n_points": len(values),
            "filter_duplicated": False,
            "filter_failures": "min",
            "max_total_failures": -1,
            "outliers_iqr_factor": math.inf,
        },
        objective_scaler="identity",
        n_initial_points=1,
    )
    # A point has to be told for CBO to look at its surrogate at all: one beyond the candidates.
    search.tell([({_PLACE: len(values)}, float(values.min()))])
    (point,) = search.ask(1)
    return int(point[_PLACE])
