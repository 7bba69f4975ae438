"""The terms of blocks and output, computed once for all layouts that have the same blocks.

Millions of layouts have about a hundred different blocks: pp, dp, the number of micro-batches, the
schedule and ZeRO only say how many of them follow each other on the slowest path. Each of these
terms is a block's, times the micro-batches' slots over pp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.estimates.distinct_rows import distinct
from layout_tuner.predictions.estimates.links import level_links
from layout_tuner.predictions.estimates.rank_stages import StageCounts, layer_shapes
from layout_tuner.predictions.estimates.step_shape import StepShape
from layout_tuner.predictions.estimates.time_terms import (
    block_terms,
    head_terms,
    host_terms,
    other_terms,
)
from layout_tuner.predictions.estimates.trainer_kernels import TrainerKernels
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import has_kinds

_BLOCK_KNOBS: Final = (
    *("tp", "tp_columns", "cp", "ep", "etp", "micro_batch_size", "sequence_parallel"),
    *("recompute", "precision", "cp_comm_type", "schedule"),
)
"""What the terms of a block depend on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DistinctBlocks:
    """The terms of the different blocks of some layouts."""

    block_of: Ints
    """The block of each layout."""
    seconds: Mapping[str, Floats]
    """Seconds of each block by the term, on the slowest path over slots / pp; or sums of terms."""
    layer_s: Floats
    """Expected seconds of a block for a micro-batch."""
    head_s: Floats
    """The same of the output, with the layers of multi-token prediction."""
    kinds_s: tuple[Floats, ...] = ()
    """The same of each of `layer_shapes`, where stages have unlike layers."""
    pipelines: StageCounts | None = None
    """The layers of each stage there."""
    plain_of: Ints | None = None
    """The block of each layout without recomputation; None: none leaves it out of some layers."""

    @classmethod
    def of(
        cls,
        columns: LayoutColumns,
        model: ModelShape,
        cluster: Cluster,
        kernels: TrainerKernels,
        expected: Mapping[str, float],
    ) -> DistinctBlocks:
        """`expected` are the prior medians of the factors by the terms' names.

        Columns of two axes vary along the second in the number of micro-batches alone.
        """
        firsts = columns.firsts()
        levels = level_links(cluster, firsts)
        units = (level.unit for level in levels if not isinstance(level.unit, int))
        block_of, examples = distinct(firsts, _BLOCK_KNOBS, *units)
        one = np.ones_like(examples)
        # One slot, so that the seconds of a block are the same whichever layout is the example.
        alone = replace(
            firsts.rows(examples),
            pp=one,
            vpp=one,
            num_microbatches=one,
            recompute_layers=np.zeros_like(examples),
        )
        plain_of = None
        if columns.recompute_layers.any():
            plain = replace(alone, recompute=np.zeros_like(examples))
            alone, plain_of = LayoutColumns.joined([alone, plain]), block_of + examples.size
            examples = np.concatenate([examples, examples])
        levels = tuple(level.rows(examples) for level in levels)
        step = StepShape.of(alone, model, cluster, kernels, levels)
        blocks, ends = dict(block_terms(step)), dict(head_terms(step))
        layer_s = sum(expected[name] * term for name, term in blocks.items()) / model.num_layers
        head_s: Any = sum(expected[name] * term for name, term in ends.items())
        seconds = blocks | ends | dict(host_terms(step))
        for shape in model.mtp_shapes:
            beside = replace(step, model=shape)
            share = model.num_mtp_layers / model.num_layers
            mtp = dict(block_terms(beside))
            head_s = head_s + share * sum(expected[name] * term for name, term in mtp.items())
            for name, term in (mtp | dict(host_terms(beside))).items():
                seconds[name] = seconds.get(name, 0.0) + share * term
        shapes = layer_shapes(model).shapes if has_kinds(model) else ()
        kinds_s: list[Floats] = []
        pipelines = None
        if len(shapes) > 1 and (firsts.pp > 1).any():
            pipelines = StageCounts.of(firsts, model)
            for shape in shapes:
                own = block_terms(replace(step, model=shape))
                total = sum(expected[name] * term for name, term in own)
                kinds_s.append(np.asarray(total / model.num_layers))
        return cls(
            block_of=block_of,
            plain_of=plain_of,
            seconds=seconds,
            layer_s=np.asarray(layer_s),
            head_s=np.asarray(head_s),
            kinds_s=tuple(kinds_s),
            pipelines=pipelines,
        )

    def summed(self, factors: Mapping[str, float], kinds: Mapping[str, str]) -> DistinctBlocks:
        """The same with one sum of the terms times their factors for each kind of term."""
        sums: dict[str, Floats] = {}
        for name, term in self.seconds.items():
            grown = factors[name] * term
            sums[kinds[name]] = sums.get(kinds[name], 0.0) + grown
        return replace(self, seconds=sums)

    def terms(self, step: StepShape, rows: slice) -> Iterator[tuple[str, Floats]]:
        """All terms of some of the layouts, whose shape is `step`.

        They are those of `TERM_NAMES`, without those of cp and of experts where there are none, and
        of the traffic of attention scores where they are not stored.
        """
        block, times = self.block_of[rows].reshape(step.pp.shape), step.slots / step.pp
        share = step.recomputing_share
        plain = None if self.plain_of is None else self.plain_of[rows].reshape(step.pp.shape)

        def of(seconds: Floats) -> Floats:
            if plain is None or share is None:
                return seconds[block]
            others = seconds[plain]
            return np.asarray(others + share * (seconds[block] - others))

        for name, seconds in self.seconds.items():
            yield name, of(seconds) * times
        head_s, slowest_s = self.head_s[block], None
        if self.pipelines is not None:
            kinds_s = tuple(map(of, self.kinds_s))
            slowest_s = self.pipelines.slowest_s(rows, kinds_s, head_s)
        yield from other_terms(step, of(self.layer_s), head_s, slowest_s)
