"""What the beliefs themselves expect of two figures of `search_unknown`.

Worlds are drawn from the prior of a trainer that is not known: hypothesis, factors, outcomes and
step times. In them the belief is right by construction, so what it reaches there is what a correct
update can reach on average. Posteriors are exact: weighted draws from the prior, instead of
Laplace's approximation.
"""

# ruff: noqa: N803, N806 (arrays carry their shape in the name: D draws, W worlds, N layouts,
# H hypotheses)

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.results_file import table
from layout_tuner.predictions.belief.best_chances import NUM_DRAWS, LayoutDraws
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief
from layout_tuner.predictions.belief.peaks.memory_evidence import LEVEL_SHARES, usable_bytes
from layout_tuner.predictions.belief.peaks.memory_fit import LOGISTIC_PER_NORMAL, logistic
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.estimates.peak_memory import NUM_MEMORY_FACTORS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.tables import CellKey, TableCell
from layout_tuner.tuner.replay.run import ReplayRun

Floats = NDArray[np.float64]
Outcomes = Mapping[CellKey, NDArray[np.bool_]]
"""Whether each layout of a cell ran, in each world; shape [worlds, layouts]."""

_NUM_DRAWS: Final = 20_000
_NUM_WORLDS: Final = 200
_SHARED: Final = sum(LEVEL_SHARES[:2])
"""Share of a factor's variance that the cells of one trainer on one cluster have in common."""
_LEAST: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Losses:
    """Log losses in nats, of each world."""

    mixture: Floats
    best: Floats
    """Of the hypothesis that is the best in hindsight."""


def expected_figures(
    cells: Sequence[TableCell], runs: Sequence[ReplayRun], most_gap: float, most_regret: float
) -> str:
    """A row for each figure: as measured, and as the belief expects it.

    Args:
        cells: the cells, of one trainer on one cluster.
        runs: guided searches of them, as long as outcomes are told.
        most_gap: how much more log loss than the best hypothesis was asked, in nats.
        most_regret: the regret of the first probe that was asked.
    """
    exact = _Exact(cells)
    told = Counter((run.cell, frozenset(probe.layout for probe in run.probes)) for run in runs)
    real = exact.losses({cell.key: _ran(cell)[None] for cell in cells}, told)
    drawn = exact.losses(exact.worlds(), told)
    first = float(np.mean([run.regret_after(1) for run in runs]))
    gaps = drawn.mixture - drawn.best
    regrets, least = _first_regrets(cells, runs)
    rows = [
        ("log loss of the mixture, nats", *_shares(float(real.mixture[0]), drawn.mixture), "-"),
        (
            "the same less that of the best hypothesis, nats",
            *_shares(float(real.mixture[0] - real.best[0]), gaps),
            f"{np.mean(gaps <= most_gap):.0%}",
        ),
        (
            "regret of the first probe",
            *_shares(first, regrets),
            f"{np.mean(regrets <= most_regret):.0%}",
        ),
        ("the least expected of any first probe", "-", f"{least.mean():.3f}", "-", "-"),
    ]
    header = (
        "what, by the exact posterior",
        "measured",
        "expected",
        "worlds at most as measured",
        "as asked",
    )
    return table(header, rows)


def _shares(measured: float, drawn: Floats) -> tuple[str, str, str]:
    return f"{measured:.3f}", f"{drawn.mean():.3f}", f"{np.mean(drawn <= measured):.0%}"


def _ran(cell: TableCell) -> NDArray[np.bool_]:
    return np.array([row.status == "completed" for row in cell.rows])


class _Exact:
    """The prior of some cells as draws, and exact posteriors by weights of the draws."""

    def __init__(self, cells: Sequence[TableCell]) -> None:
        self._cells = {cell.key: cell for cell in cells}
        self._rng = np.random.default_rng(0)
        self._memory = {cell.key: _prior(cell) for cell in cells}
        self._prior_H = np.array(self._memory[cells[0].key].priors)
        drawn = self._rng.standard_normal((_NUM_DRAWS, NUM_MEMORY_FACTORS))
        self._fits = {cell.key: self._each_fits(cell, drawn) for cell in cells}

    def worlds(self) -> Outcomes:
        """Outcomes of all layouts; a world has one hypothesis for all cells."""
        shape = (_NUM_WORLDS, NUM_MEMORY_FACTORS)
        chosen_W = self._rng.choice(len(self._prior_H), _NUM_WORLDS, p=self._prior_H)
        shared = np.sqrt(_SHARED) * self._rng.standard_normal(shape)
        outcomes = {}
        for key, cell in self._cells.items():
            own = np.sqrt(1.0 - _SHARED) * self._rng.standard_normal(shape)
            fits_WN = np.stack(self._each_fits(cell, shared + own))[
                chosen_W, np.arange(_NUM_WORLDS)
            ]
            outcomes[key] = self._rng.random(fits_WN.shape) < fits_WN
        return outcomes

    def losses(
        self, outcomes: Outcomes, told: Counter[tuple[CellKey, frozenset[Layout]]]
    ) -> Losses:
        """Of the layouts that were not told, pooled over searches."""
        mixture, single, count = 0.0, 0.0, 0
        for (key, layouts), searches in told.items():
            is_told = np.array([row.layout in layouts for row in self._cells[key].rows])
            ran_WN = outcomes[key]
            logs, fits = zip(
                *(_posterior(fits_DN, ran_WN, is_told) for fits_DN in self._fits[key]), strict=True
            )
            logs_WH = np.log(self._prior_H) + np.stack(logs, axis=1)
            odds_WH = np.exp(logs_WH - logs_WH.max(axis=1, keepdims=True))
            weights_WH = odds_WH / odds_WH.sum(axis=1, keepdims=True)
            fits_WHN = np.stack(fits, axis=1)
            rest_WN = ran_WN[:, ~is_told]
            mixed_WN = np.einsum("wh,whn->wn", weights_WH, fits_WHN)
            mixture = mixture + searches * _nats(rest_WN, mixed_WN)
            single = single + searches * _nats(rest_WN[:, None], fits_WHN)
            count += searches * rest_WN.shape[1]
        return Losses(mixture=np.asarray(mixture) / count, best=np.min(single, axis=1) / count)

    def _each_fits(self, cell: TableCell, drawn: Floats) -> list[Floats]:
        """Probability of fitting at given factors, by hypothesis; shape [draws, layouts] each."""
        capacity = float(cell.cluster.device_memory_bytes)
        columns = LayoutColumns.of_each(row.layout for row in cell.rows)
        return [
            _fits(belief, columns, cell, capacity, drawn)
            for belief in self._memory[cell.key].beliefs
        ]


def _prior(cell: TableCell) -> TrainerMemory:
    return TrainerMemory.prior(cell.cluster, software=cell.key.software)


def _fits(
    belief: MemoryBelief, columns: LayoutColumns, cell: TableCell, capacity: float, drawn: Floats
) -> Floats:
    terms = belief.terms(columns, cell.model)
    usable = usable_bytes(capacity, belief.storage)
    expected = terms.num_bytes.sum(axis=1)[:, None]
    sums = expected + np.einsum("df,efn->edn", drawn, terms.deviation_bytes)
    peaks_DN = np.maximum(sums, 0.1 * expected).max(axis=0)
    noise_N = np.hypot(terms.scatter_bytes / usable, belief.storage.spread.noise).max(axis=0)
    return logistic(LOGISTIC_PER_NORMAL * np.log(usable / peaks_DN) / noise_N)


def _posterior(
    fits_DN: Floats, ran_WN: NDArray[np.bool_], is_told: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Logarithm of the evidence of each world's outcomes, and P(fits) of the other layouts."""
    sure = np.clip(fits_DN[:, is_told], _LEAST, 1.0 - _LEAST)
    told = ran_WN[:, is_told]
    odds_WD = np.exp(told @ np.log(sure).T + ~told @ np.log1p(-sure).T)
    total_W = odds_WD.sum(axis=1)
    return np.log(total_W / len(fits_DN)), odds_WD @ fits_DN[:, ~is_told] / total_W[:, None]


def _nats(ran: NDArray[np.bool_], fits: Floats) -> Floats:
    chances = np.where(ran, fits, 1.0 - fits)
    return np.asarray(-np.log(np.maximum(chances, _LEAST)).sum(axis=-1))


def _first_regrets(cells: Sequence[TableCell], runs: Sequence[ReplayRun]) -> tuple[Floats, Floats]:
    """Regret of the layouts that the searches probe first, in each joint draw; mean over cells.

    Draws in which no layout of some cell runs are left out. The second array is the regret of the
    layouts with the least expected regret.
    """
    probed, least, is_sound = [], [], np.ones(NUM_DRAWS, dtype=bool)
    for cell in cells:
        draws = LayoutDraws(
            model=cell.model,
            cluster=cell.cluster,
            software=cell.key.software,
            time=TimeCalibration.fit(),
            memory=_prior(cell),
        )
        columns = LayoutColumns.of_each(row.layout for row in cell.rows)
        log_s_DN, runs_DN = draws.joint(columns, float(cell.cluster.device_memory_bytes))
        speeds_DN = np.where(runs_DN, np.exp(-log_s_DN), 0.0)
        is_sound &= runs_DN.any(axis=1)
        best_D1 = np.maximum(speeds_DN.max(axis=1, keepdims=True), np.finfo(float).tiny)
        places = {row.layout: place for place, row in enumerate(cell.rows)}
        first = [places[run.probes[0].layout] for run in runs if run.cell == cell.key]
        regrets_DN = 1.0 - speeds_DN / best_D1
        probed.append(regrets_DN[:, first].mean(axis=1))
        least.append(regrets_DN[:, regrets_DN[runs_DN.any(axis=1)].mean(axis=0).argmin()])
    return np.mean(probed, axis=0)[is_sound], np.mean(least, axis=0)[is_sound]
