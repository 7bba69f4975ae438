"""What the budget of a campaign pays for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.predictions.belief.best_chances import ENOUGH, BestChances
from layout_tuner.predictions.belief.layout_predictions import RankedLayouts
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import ProbeCosts, fidelities
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.probe_defaults import DEFAULT_DEADLINE_S
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.search_spaces.spaces.search_space import LegalSet
from layout_tuner.units import SECONDS_PER_HOUR

_NEAR_BEST: Final = 10
"""Layouts whose cheap probes are taken to cost as much as all others."""

_USUAL_MOST: Final = 1 << 14
"""Layouts of which few budgets pay for all."""

Bound = Literal["trials", "node_hours", "wall_time_s", "layouts"]
"""What allows no further probe; layouts: every legal one is probed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoughtProbes:
    """What the budget of a campaign pays for, if its probes are the plan's layouts in order.

    The baseline is measured first, and is none of these probes. Probes that stop early and repeats
    of the best layouts are not predicted.
    """

    num_probes: int
    """Probes of the best layouts."""
    num_late: int = 0
    """How many of them are expected to last longer than the deadline: they end as timeouts."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """The deadline of a probe."""
    baseline_s: float | None = None
    """Seconds of the baseline's probe; None: the campaign names none."""
    expected_fitting: float
    """How many of them are expected to fit into memory."""
    node_hours: float
    """Node-hours that they and the baseline's probe hold."""
    wall_time_s: float
    """Seconds that they and the baseline's probe take one after another."""
    ended_by: Bound
    """The bound that allows no further probe."""
    probe_start_s: float
    """Assumed seconds of a probe outside of its iterations."""
    iterations: int
    """Iterations of a probe, warm-up included."""
    chance: float = 0.0
    """Probability that it finds a layout within 5 % of the best, if it pays for full probes of the
    layouts with the largest `best_chance`, one each. Those that the deadline ends find nothing."""
    cheap_probes: int | None = None
    """Cheap probes of layouts near the best, with all layers and the fewest micro-batches, that the
    node-hours of the budget pay for beside one probe of the best in full; below 0: they do not pay
    for that one; None: the campaign uses none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbePrices:
    """The seconds and nodes of full probes of the layouts that a budget may pay for, in order."""

    spec: CampaignSpec
    costs: ProbeCosts
    asked_s: Floats
    """Seconds of each if no deadline ends it."""
    seconds: Floats
    """Seconds of each, no longer than the deadline."""
    num_nodes: Ints
    is_late: Bools
    """Whether the deadline ends the probe."""
    is_other: Bools
    """Whether it is another layout than the campaign's baseline."""
    baseline_s: float | None
    """Seconds of the baseline's probe, no longer than the deadline; None: there is no baseline."""

    @classmethod
    def of(
        cls,
        spec: CampaignSpec,
        legal: LegalSet | JobSet,
        ranked: RankedLayouts,
        probe_start_s: float,
        *,
        baseline_step_s: float | None,
    ) -> ProbePrices:
        costs, deadline_s = spec.probe_costs(probe_start_s), spec.probe.deadline_s
        own = None if spec.baseline is None else legal.index_of(spec.baseline)
        own_s = None if baseline_step_s is None else costs.seconds(baseline_step_s)

        def of_best(count: int) -> ProbePrices:
            seconds, order = costs.seconds(ranked.step_time_s[:count]), ranked.order[:count]
            return cls(
                spec=spec,
                costs=costs,
                asked_s=seconds,
                seconds=np.minimum(seconds, deadline_s),
                num_nodes=legal.column("num_nodes", order),
                is_late=np.asarray(seconds > deadline_s),
                is_other=np.asarray(order != (-1 if own is None else own)),
                baseline_s=None if own_s is None else min(own_s, deadline_s),
            )

        prices = of_best(_USUAL_MOST)
        bounds = prices.bounds(np.flatnonzero(prices.is_other))
        num_priced = bounds.pop("layouts")
        most = max(bounds.values(), default=num_priced)
        return of_best(len(legal)) if most >= num_priced else prices

    @property
    def most_step_s(self) -> float:
        """The longest step with which a probe ends before the deadline; 0: none does."""
        left_s = self.spec.probe.deadline_s - self.costs.start_s
        return max(left_s, 0.0) / (self.costs.warmup + self.costs.iterations)

    @property
    def baseline_node_s(self) -> float:
        """Node-seconds of the baseline's probe."""
        return (self.baseline_s or 0.0) * (
            self.spec.baseline.num_nodes if self.spec.baseline else 0
        )

    def bounds(self, rows: Ints) -> dict[Bound, int]:
        """How many of some probes, in their order, each bound allows after the baseline's."""
        budget = self.spec.budget
        bounds: dict[Bound, int] = {"layouts": len(rows)}
        if budget.trials is not None:
            bounds["trials"] = budget.trials - (self.baseline_s is not None)
        if budget.node_hours is not None:
            node_s = self.baseline_node_s + np.cumsum(self.seconds[rows] * self.num_nodes[rows])
            most_s = budget.node_hours * SECONDS_PER_HOUR
            bounds["node_hours"] = int(np.searchsorted(node_s, most_s, "right"))
        if budget.wall_time_s is not None:
            wall_s = (self.baseline_s or 0.0) + np.cumsum(self.seconds[rows])
            bounds["wall_time_s"] = int(np.searchsorted(wall_s, budget.wall_time_s, "right"))
        return bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededProbes:
    """The full probes that find a layout within 5 % of the best with a probability of 90 %."""

    number: int
    """How many of the layouts with the largest `best_chance` to probe."""
    node_hours: float
    """Node-hours that these probes hold, if no deadline ends one."""
    longest_s: float
    """Seconds that the longest of them takes, which may be more than the deadline."""


def needed_probes(prices: ProbePrices, chances: BestChances) -> NeededProbes | None:
    """See `NeededProbes`; None: all that are compared do not suffice."""
    near = chances.near * chances.runs
    number = int(np.searchsorted(near, ENOUGH)) + 1
    if number > len(near):
        return None
    rows = chances.order[:number]
    node_s = float((prices.asked_s[rows] * prices.num_nodes[rows]).sum())
    return NeededProbes(
        number=number,
        node_hours=node_s / SECONDS_PER_HOUR,
        longest_s=float(prices.asked_s[rows].max()),
    )


def bought_probes(
    prices: ProbePrices, legal: LegalSet | JobSet, ranked: RankedLayouts, chances: BestChances
) -> BoughtProbes:
    """How many of the ranked layouts the budget pays for, one probe each."""
    others, is_other = np.flatnonzero(prices.is_other), prices.is_other[chances.order]
    ended_by, count = min(prices.bounds(others).items(), key=lambda bound: bound[1])
    rows = others[:count]
    most = min(prices.bounds(chances.order[is_other]).values())
    # The baseline is probed in any case, as one of the most likely where it is one.
    likely = int(np.searchsorted(np.cumsum(is_other), most, "right"))
    node_s = prices.baseline_node_s + float((prices.seconds[rows] * prices.num_nodes[rows]).sum())
    return BoughtProbes(
        num_probes=count,
        num_late=int(prices.is_late[rows].sum()),
        deadline_s=prices.spec.probe.deadline_s,
        baseline_s=prices.baseline_s,
        expected_fitting=float(ranked.fits[rows].sum()),
        node_hours=node_s / SECONDS_PER_HOUR,
        wall_time_s=(prices.baseline_s or 0.0) + float(prices.seconds[rows].sum()),
        ended_by=ended_by,
        probe_start_s=prices.costs.start_s,
        iterations=prices.costs.warmup + prices.costs.iterations,
        chance=float(chances.found[likely - 1] * chances.runs) if likely else 0.0,
        cheap_probes=_bought_cheap(prices, legal, ranked),
    )


def _bought_cheap(
    prices: ProbePrices, legal: LegalSet | JobSet, ranked: RankedLayouts
) -> int | None:
    """See `BoughtProbes.cheap_probes`: by the mean cost of those of the best ten layouts."""
    spec, costs = prices.spec, prices.costs
    if not spec.uses_cheap_probes or spec.budget.node_hours is None:
        return None
    node_s, kernels = [], kernels_of(spec.software, spec.cluster)
    for row, position in enumerate(ranked.order[:_NEAR_BEST]):
        layout, step_s = legal.layout(int(position)), ranked.step_time_s[row]
        full_node_s = layout.num_nodes * float(prices.seconds[row])
        parts = fidelities(layout, spec.model, spec.cluster)
        kept = [each for each in parts if each.keeps_memory(spec.model)]
        if not kept:  # it is cheap already
            node_s.append(full_node_s)
            continue
        part = min(kept, key=lambda each: (each.num_microbatches, each.dp))
        ran = part.reduced(layout)
        whole_s, part_s = step_time_s(
            LayoutColumns.of_each([layout, ran]), spec.model, spec.cluster, kernels=kernels
        )
        cheap_s = float(step_s * part_s / whole_s)
        cheap_node_s = costs.node_s(ran.num_nodes, cheap_s, is_cheap=True)
        node_s.append(min(cheap_node_s, ran.num_nodes * spec.probe.deadline_s, full_node_s))
    best_node_s = float(prices.seconds[0] * prices.num_nodes[0]) if prices.is_other[0] else 0.0
    full_node_s = prices.baseline_node_s + best_node_s
    left_node_s = spec.budget.node_hours * SECONDS_PER_HOUR - full_node_s
    bought = math.floor(left_node_s / float(np.mean(node_s)))
    # A cheap probe costs no more than the full one, also of the cheaper layouts behind the ten.
    full_probes = prices.bounds(np.flatnonzero(prices.is_other))["node_hours"]
    return max(bought, full_probes - 1) if bought >= 0 else bought
