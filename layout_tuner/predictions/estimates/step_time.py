"""The time of a training step in closed form, for one layout or for columns of many.

`time_terms` computes the seconds of each part of a step (a term) with the cluster's own constants.
A factor on each term says how many times longer it really takes. Before any measurement a factor is
log-normal about one over the efficiency that data sheets and papers suggest; it is wide where they
say little. `StepSums` combines the terms: some run side by side, and some hide behind others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.distinct_blocks import DistinctBlocks
from layout_tuner.predictions.estimates.step_shape import StepShape, offloaded_s
from layout_tuner.predictions.estimates.time_terms import EACH_MICROBATCH_S
from layout_tuner.predictions.estimates.trainer_kernels import ANY_TRAINER, TrainerKernels
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

Kind = Literal["device", "host", "reduction", "odds", "rest"]
"""How a term adds to the step. device and host run side by side, and the longer one counts. A
reduction counts as far as the backward pass of the last micro-batch does not hide it; odds are the
odds that it does not run beside that pass at all. rest is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorPrior:
    """The prior of one term's factor."""

    name: str
    """The term."""
    kind: Kind
    """How it adds to the step."""
    median: float
    """Median of measured seconds over seconds at the described constants."""
    log_sd: float
    """Standard deviation of its logarithm between clusters and software."""
    meaning: str


def _factor(name: str, kind: Kind, median: float, log_sd: float, meaning: str) -> FactorPrior:
    return FactorPrior(name=name, kind=kind, median=median, log_sd=log_sd, meaning=meaning)


_FACTORS: Final = (
    # Over the speed of the fastest products (`step_shape.ACHIEVED_SHARES`).
    _factor("matrices", "device", 1.12, 0.2, "matrix multiplications"),
    # FlashAttention-2 reaches 50 to 73 % of the peak forward (arXiv:2307.08691), about 60 with the
    # backward pass, and skips half of the products, which the term counts, under a causal mask.
    _factor("attention", "device", 1.0, 0.4, "attention"),
    # Bytes over the bandwidth. `TrainerKernels` says whether they are moved.
    _factor("attention_bytes", "device", 1.0, 0.5, "memory traffic of attention that is not fused"),
    _factor("matrix_bytes", "device", 0.7, 0.7, "memory traffic of the matrices"),
    _factor("elementwise", "device", 1.5, 0.5, "norms, activations, residual sums"),
    _factor("kernels", "device", 1.0, 0.6, "starting and draining kernels"),
    _factor("tensor_inside", "device", 1.1, 0.4, "tensor parallel inside a node"),
    _factor("tensor_across", "device", 2.2, 0.8, "tensor parallel between nodes"),
    _factor("latency_inside", "device", 1.8, 0.6, "latency of tensor parallelism inside a node"),
    _factor("latency_across", "device", 2.2, 0.8, "latency of tensor parallelism between nodes"),
    _factor("context", "device", 1.5, 0.8, "exchange of keys and values over cp"),
    # HybridEP's tables (B200, GB200, H100 with 50 GB/s a card; bf16, 8 experts a token) over these
    # rows: 1.0 on 8 ranks to 1.4 on 32 of an NVLink domain; 0.44, 0.64 and 0.85 on 2, 4 and 8
    # nodes, to each of which it sends a token once. A plain all-to-all sends each row.
    _factor("exchange_inside", "device", 1.1, 0.4, "exchange of tokens over ep inside a node"),
    _factor("exchange_across", "device", 0.9, 0.6, "exchange of tokens over ep between nodes"),
    _factor("exchange_latency", "device", 2.0, 0.8, "latency of the exchange of tokens"),
    _factor("head", "device", 1.12, 0.3, "output projection"),
    _factor("logits", "device", 1.0, 0.5, "logits and loss"),
    # The cluster's bandwidths are effective ones already.
    _factor("accumulation", "device", 1.0, 0.6, "adding up gradients"),
    _factor("imbalance", "device", 1.0, 0.4, "waiting for the slowest stage of the best split"),
    _factor(
        "equal_layers", "device", 0.5, 0.8, "waiting for the output where layers are cut equally"
    ),
    _factor("host", "host", 1.5, 0.6, "the host's work on the blocks"),
    _factor("host_tensor", "host", 1.5, 0.6, "the host's work on the collectives of layers"),
    _factor("each_microbatch", "host", 1.0, 1.0, "a constant a micro-batch"),
    _factor("data_inside", "reduction", 1.1, 0.4, "gradient reduction inside a node"),
    _factor("data_across", "reduction", 1.5, 0.6, "gradient reduction between nodes"),
    _factor("data_congestion", "reduction", 0.1, 1.0, "congestion of the gradient reduction"),
    _factor("data_latency", "reduction", 1.5, 0.8, "latency of the gradient reduction"),
    # PyTorch's DDP overlaps it (arXiv:2006.15704). For sharded optimizers it is an option, off by
    # default: Megatron-LM's --overlap-grad-reduce and DeepSpeed's overlap_comm of ZeRO-1.
    _factor("data_overlap", "odds", 0.3, 1.0, "gradient reduction beside the backward pass"),
    _factor("shards_overlap", "odds", 3.0, 1.2, "gradient scattering beside the backward pass"),
    _factor("weights_gather", "rest", 3.0, 0.6, "gathering of the weights after a ZeRO step"),
    _factor("gather_latency", "rest", 3.0, 0.8, "latency of that gathering"),
    _factor("pipeline_inside", "rest", 1.5, 0.8, "transfers between stages inside a node"),
    _factor("pipeline_across", "rest", 1.1, 0.8, "transfers between stages on different nodes"),
    _factor("pipeline_latency", "rest", 2.0, 0.8, "latency between stages"),
    _factor("optimizer", "rest", 1.5, 0.6, "optimizer"),
    _factor("each_step", "rest", 1.0, 1.0, "a constant a step"),
)

FACTOR_PRIORS: Final[Mapping[str, FactorPrior]] = {factor.name: factor for factor in _FACTORS}
"""The priors of all terms by name, in the order of the terms."""

TERM_NAMES: Final = tuple(FACTOR_PRIORS)

_PLACES: Final = {name: place for place, name in enumerate(TERM_NAMES)}
_EACH_MICROBATCH: Final = _PLACES["each_microbatch"]
_TO_HOST: Final = "activations to the host and back"


def terms_of(kind: Kind) -> list[int]:
    """The positions of the terms of one kind."""
    return [place for place, factor in enumerate(_FACTORS) if factor.kind == kind]


PRIOR: Final = np.array([prior.median for prior in FACTOR_PRIORS.values()])

_EXPECTED: Final = {prior.name: prior.median for prior in FACTOR_PRIORS.values()}

_KINDS: Final[Mapping[str, Kind]] = {factor.name: factor.kind for factor in _FACTORS}

_TOGETHER: Final = 1 << 16
"""Layouts whose blocks are computed together."""
_CHUNK: Final = 4096
"""Layouts that are computed together: the intermediate arrays fit into the cache."""

_DEVICE: Final = terms_of("device")
_HOST: Final = terms_of("host")
_REDUCTION: Final = terms_of("reduction")
_ODDS: Final = terms_of("odds")
_SUMMED: Final = {
    "device": _DEVICE,
    "host": _HOST,
    "reduction": _REDUCTION,
    "rest": terms_of("rest"),
}
"""The places of the terms of each kind whose seconds are summed."""
_IS_KIND: Final = np.array(
    [[prior.kind == kind for kind in _SUMMED] for prior in FACTOR_PRIORS.values()]
)
"""Whether a term is of a kind; shape [terms, kinds]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSums:
    """The terms of each layout's step summed by kind, each times its factor.

    Two activities side by side take the 4-norm of their times: about the longer one, and 1.19 times
    either where they are equal.
    """

    device: Floats
    """Seconds of the devices of the slowest stage."""
    host: Floats
    """Seconds of its hosts, side by side with the devices."""
    reduction: Floats
    """Seconds of the reduction of the gradients."""
    odds: Floats
    """Odds that the reduction does not run beside the backward pass."""
    rest: Floats
    """Seconds that are added."""
    backward_share: Floats
    """Share of the stage's work that can hide the reduction (`StepShape.backward_share`)."""

    @property
    def busy(self) -> Floats:
        """Seconds in which devices or hosts work."""
        return _longer(self.device, self.host)

    @property
    def waited(self) -> Floats:
        """Seconds of the reduction that the backward pass does not hide."""
        exposed = self._exposed
        return exposed + self._beside * (self.reduction - exposed)

    @property
    def total(self) -> Floats:
        """Seconds of a step."""
        return self.busy + self.waited + self.rest

    @property
    def device_weight(self) -> Floats:
        """Derivative of the total by the seconds of the devices."""
        return self._busy_weight * (self.device / self.busy) ** 3

    @property
    def host_weight(self) -> Floats:
        return self._busy_weight * (self.host / self.busy) ** 3

    @property
    def reduction_weight(self) -> Floats:
        exposed = (self.reduction / self._side_by_side) ** 3
        return exposed + self._beside * (1.0 - exposed)

    @property
    def odds_weight(self) -> Floats:
        """Derivative of the total by the logarithm of the odds, in seconds."""
        return self._beside * (1.0 - self._beside) * (self.reduction - self._exposed)

    @property
    def _window(self) -> Floats:
        return self.backward_share * self.busy

    @property
    def _side_by_side(self) -> Floats:
        return _longer(self.reduction, self._window)

    @property
    def _exposed(self) -> Floats:
        window = self._window
        return _longer(self.reduction, window) - window

    @property
    def _beside(self) -> Floats:
        """Probability that the reduction does not run beside the backward pass."""
        return self.odds / (1.0 + self.odds)

    @property
    def _busy_weight(self) -> Floats:
        """Derivative of the total by `busy`: a longer backward pass hides more of the reduction."""
        gained = (self._window / self._side_by_side) ** 3 - 1.0
        return 1.0 + (1.0 - self._beside) * self.backward_share * gained


def _longer(first: Floats, second: Floats) -> Floats:
    squares = np.square(np.square(first)) + np.square(np.square(second))
    return np.asarray(np.sqrt(np.sqrt(squares)), dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeTerms:
    """The terms of each layout's step, in seconds with the cluster's own constants."""

    names: tuple[str, ...]
    seconds: NDArray[np.floating[Any]]
    """Seconds; one row per layout, one column per term. Terms of the kind odds have the seconds
    that are hidden or not."""
    backward_share: Floats
    """Share of the blocks' work in a step that can hide the reduction."""

    @classmethod
    def joined(cls, parts: Sequence[TimeTerms]) -> TimeTerms:
        """The rows of several, one after the other; at least one."""
        return cls(
            names=parts[0].names,
            seconds=np.concatenate([part.seconds for part in parts]),
            backward_share=np.concatenate([part.backward_share for part in parts]),
        )

    def step_time_s(self, factors: Floats = PRIOR) -> Floats:
        """Step time of each layout, with one factor per term, or one row of factors per layout."""
        return self._sums(factors).total

    def drawn_step_times_s(self, factors: Floats) -> Floats:
        """Step time of each layout with each row of factors; shape [rows, layouts]."""
        # A product for each kind: one for all has a weight for every term in every kind, and takes
        # seven times as long where there are few layouts.
        sums = {
            kind: factors[:, places] @ self.seconds[:, places].T for kind, places in _SUMMED.items()
        }
        odds = factors[:, _ODDS] @ (self.seconds[:, _ODDS] > 0).T
        return StepSums(**sums, odds=odds, backward_share=self.backward_share).total

    def shares(self, factors: Floats = PRIOR) -> Floats:
        """D log(step) / d log(factor) for each factor; one row per layout."""
        sums = self._sums(factors)
        grown = self.seconds * factors
        grown[:, _DEVICE] *= sums.device_weight[:, None]
        grown[:, _HOST] *= sums.host_weight[:, None]
        grown[:, _REDUCTION] *= sums.reduction_weight[:, None]
        grown[:, _ODDS] = np.where(self.seconds[:, _ODDS] > 0, sums.odds_weight[:, None], 0.0)
        return np.asarray(grown / sums.total[:, None], dtype=np.float64)

    def _sums(self, factors: Floats) -> StepSums:
        if factors.ndim == 1:
            return self._sums_alike(factors)
        seconds = self.seconds * factors
        sums = {kind: seconds[:, places].sum(axis=1) for kind, places in _SUMMED.items()}
        odds = np.where(self.seconds[:, _ODDS] > 0, np.atleast_2d(factors)[:, _ODDS], 0.0)
        return StepSums(**sums, odds=odds.sum(axis=1), backward_share=self.backward_share)

    def _sums_alike(self, factors: Floats) -> StepSums:
        """The sums for the same factors everywhere: one matrix product, since layouts are many."""
        weights = np.where(_IS_KIND, factors[:, None], 0.0).astype(self.seconds.dtype)
        sums = dict(zip(_SUMMED, (self.seconds @ weights).T, strict=True))
        return StepSums(
            **sums,
            odds=factors[_ODDS] @ (self.seconds[:, _ODDS] > 0).T,
            backward_share=self.backward_share,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePart:
    """One part of a layout's step time."""

    name: str
    """The term."""
    meaning: str
    seconds: float
    """Its expected seconds."""


def time_terms(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    cluster: Cluster,
    *,
    kernels: TrainerKernels = ANY_TRAINER,
    dtype: type[np.floating[Any]] = np.float64,
) -> TimeTerms:
    """All terms of the steps of all layouts.

    Columns are broadcast against each other and flattened. Searches of millions of layouts keep the
    terms in single precision. `kernels` are the trainer's (`kernels_of`).
    """
    columns = LayoutColumns.of(layouts).flattened()
    # Pages of terms that a model does not have are never written, and take no memory.
    seconds = np.zeros((len(TERM_NAMES), columns.tp.size), dtype=dtype)
    backward_share = np.empty(columns.tp.size)
    for rows, step, terms in _steps(columns, model, cluster, kernels):
        backward_share[rows] = step.backward_share
        for name, term in terms:
            seconds[_PLACES[name], rows] = term
    return TimeTerms(names=TERM_NAMES, seconds=seconds.T, backward_share=backward_share)


def step_time_s(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    cluster: Cluster,
    factors: Floats = PRIOR,
    kernels: TrainerKernels = ANY_TRAINER,
    *,
    is_tile: bool = False,
) -> Floats:
    """Expected seconds of a step of each layout.

    Columns are broadcast against each other and flattened, unless they are those of a tile
    (`layout_tiles`), whose shape the result then has. Factors are in the order of `TERM_NAMES`.
    """
    columns = LayoutColumns.of(layouts)
    columns = columns if is_tile else columns.flattened()
    total = np.empty(columns.shape)
    for rows, step, terms in _steps(columns, model, cluster, kernels, factors):
        sums: dict[str, Floats] = dict.fromkeys(get_args(Kind), np.zeros(()))
        for name, term in terms:
            if name in sums:
                sums[name] = sums[name] + term
            else:
                kind = _KINDS[name]
                grown = factors[_PLACES[name]] * (term > 0 if kind == "odds" else term)
                sums[kind] = sums[kind] + grown
        total[rows] = StepSums(**sums, backward_share=step.backward_share).total
    return total


def block_and_head_s(layout: Layout, model: ModelShape, cluster: Cluster) -> tuple[float, float]:
    """Expected seconds of a layer and of the output for a micro-batch of one layout."""
    columns = LayoutColumns.of_each([layout])
    blocks = DistinctBlocks.of(columns, model, cluster, ANY_TRAINER, _EXPECTED)
    return float(blocks.layer_s[0]), float(blocks.head_s[0])


def step_time_parts(
    layout: Layout,
    model: ModelShape,
    cluster: Cluster,
    factors: Floats = PRIOR,
    kernels: TrainerKernels = ANY_TRAINER,
) -> list[TimePart]:
    """The parts of one layout's step; they add up to the step time.

    The host counts as far as the devices wait for it, and a reduction as far as no backward pass
    hides it. Offloaded activations are a part of their own of the term `each_microbatch`.
    """
    terms = time_terms(layout, model, cluster, kernels=kernels)
    seconds = (terms.seconds * factors)[0]
    sums = terms._sums(factors)
    seconds[_HOST] *= (sums.busy - sums.device) / sums.host
    seconds[_REDUCTION] *= sums.waited / np.maximum(sums.reduction, np.finfo(float).tiny)
    seconds[_ODDS] = 0.0
    away_s = float(offloaded_s(LayoutColumns.of(layout), model, cluster))
    offload_s = seconds[_EACH_MICROBATCH] * away_s / (EACH_MICROBATCH_S + away_s)
    seconds[_EACH_MICROBATCH] -= offload_s
    parts = [
        TimePart(name=name, meaning=FACTOR_PRIORS[name].meaning, seconds=float(part))
        for name, part in zip(TERM_NAMES, seconds, strict=True)
        if part > 0
    ]
    to_host = TimePart(name="offload", meaning=_TO_HOST, seconds=float(offload_s))
    return [*parts, to_host] if offload_s > 0 else parts


def _steps(
    columns: LayoutColumns,
    model: ModelShape,
    cluster: Cluster,
    kernels: TrainerKernels,
    factors: Floats | None = None,
) -> Iterator[tuple[slice, StepShape, Iterator[tuple[str, Floats]]]]:
    """Chunks of the layouts with their shapes and terms.

    With `factors` the terms of blocks come as one sum for each kind.
    """
    numbers = columns.shape[-1] if columns.tp.ndim > 1 else 1
    # Few arrays of a tile have a value for each layout.
    length = _CHUNK if numbers == 1 else max(4 * _CHUNK // numbers, 1)
    for first in range(0, columns.tp.size, _TOGETHER):
        together = columns.rows(slice(first, first + _TOGETHER))
        blocks = DistinctBlocks.of(together, model, cluster, kernels, _EXPECTED)
        if factors is not None:
            blocks = blocks.summed(dict(zip(TERM_NAMES, factors, strict=True)), _KINDS)
        for start in range(0, together.tp.size, length):
            rows = slice(start, start + length)
            step = StepShape.of(together.rows(rows), model, cluster, kernels)
            place = slice(first + start, first + start + length)
            yield place, step, blocks.terms(step, rows)
