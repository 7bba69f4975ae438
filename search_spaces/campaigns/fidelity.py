"""The fidelity of a probe: in full, or a cheap one that runs a part of the layout's work.

A step is linear in the micro-batches, and its memory depends on those in flight alone, so a probe
with fewer of them tells nearly as much for a fraction of the node-seconds. Fewer data-parallel
replicas take fewer nodes. Fewer layers are cheaper still, but say nothing of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES, violations
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.probe_defaults import DEFAULT_ITERATIONS, DEFAULT_WARMUP

T = TypeVar("T", float, NDArray[np.float64])

_ROUNDS: Final = 2
"""Fewest micro-batches of a cheap probe, in pipeline depths: one fills the pipeline, one keeps it
full."""
_LEAST_MICROBATCHES: Final = 8
"""Fewest micro-batches of a cheap probe, however short the pipeline."""
_LEAST_SAVING: Final = 2
"""A part is reduced only by at least this factor: less is not worth the error."""
_ITERATIONS: Final = 4
"""Timed iterations of a cheap probe, at most."""
PROBE_START_S: Final = 60.0
"""Assumed seconds of a probe before its first iteration and after its last: a large job's processes
start, connect and build the model in about a minute."""
_LEAST_LAYERS: Final = 2
"""Fewest layers of each virtual stage."""
PART: Final = "~"
"""Parts the key of a layout from what a cheap probe of it runs; no key of a layout has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """The part of a layout that a cheap probe runs."""

    num_microbatches: int
    """Micro-batches of each replica."""
    dp: int
    """Data-parallel replicas."""
    num_layers: int

    def reduced(self, layout: Layout) -> Layout:
        """The layout that the probe runs: it takes nodes in proportion to its replicas."""
        num_nodes = max(layout.num_nodes * self.dp // layout.dp, 1)
        return replace(
            layout, num_nodes=num_nodes, dp=self.dp, num_microbatches=self.num_microbatches
        )

    def reduced_model(self, model: ModelShape) -> ModelShape:
        """The model that the probe trains."""
        return with_layers(model, self.num_layers)

    def key(self, layout: Layout, model: ModelShape) -> str:
        """The name of the probe: the layout's key, and what is reduced."""
        layers = f"-l{self.num_layers}" if self.num_layers < model.num_layers else ""
        return f"{layout.key}{PART}mb{self.num_microbatches}-dp{self.dp}{layers}"

    def words(self, layout: Layout, model: ModelShape) -> str:
        """What the probe runs, for people."""
        parts = (
            (self.num_microbatches, layout.num_microbatches, "micro-batches"),
            (self.dp, layout.dp, "replicas"),
            (self.num_layers, model.num_layers, "layers"),
        )
        return ", ".join(f"{run} of {whole} {what}" for run, whole, what in parts if run < whole)

    def keeps_memory(self, model: ModelShape) -> bool:
        """Whether the probe's memory is that of the layout: it trains all layers."""
        return self.num_layers == model.num_layers


def cheap_iterations(iterations: int) -> int:
    """Timed iterations of a cheap probe, of those of a full one.

    The extrapolation is off by more than the mean of a few iterations is.
    """
    return min(iterations, _ITERATIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCosts:
    """What decides the node-seconds of a probe, beside its layout."""

    start_s: float = PROBE_START_S
    """Seconds of a probe outside of its steps."""
    warmup: int = DEFAULT_WARMUP
    """Steps before the timed ones."""
    iterations: int = DEFAULT_ITERATIONS
    """Timed steps of a full probe."""

    def seconds(self, step_s: T) -> T:
        """Seconds of a full probe, from those of a step."""
        return self.start_s + (self.warmup + self.iterations) * step_s

    def node_s(self, num_nodes: int, step_s: float, *, is_cheap: bool = False) -> float:
        """Node-seconds of a probe."""
        if is_cheap:
            return replace(self, iterations=cheap_iterations(self.iterations)).node_s(
                num_nodes, step_s
            )
        return num_nodes * self.seconds(step_s)


def is_cheap(key: str) -> bool:
    """Whether the key of a trial is that of a cheap probe (`Fidelity.key`).

    A job's settings have a `~` and a dot each (`JobSettings.key`), the part of a cheap probe has no
    dot.
    """
    return key.count(PART) > key.count(".")


def with_layers(model: ModelShape, num_layers: int) -> ModelShape:
    """The model with this number of layers; if it is another one, the name says so.

    Dense layers and those with experts stay in proportion; less than one dense layer is none. Kinds
    of layers that are stated stay in proportion and in order, at least one layer of each.
    """
    if num_layers == model.num_layers:
        return model
    name = f"{model.name}-{num_layers}-layers"
    if model.layer_kinds:
        return replace(
            model, name=name, num_layers=num_layers, layer_kinds=_fewer_kinds(model, num_layers)
        )
    dense = model.num_dense_layers * num_layers // model.num_layers
    changes: dict[str, Any] = {"num_layers": num_layers, "num_dense_layers": dense}
    if model.num_experts and not dense:
        changes["ffn_hidden_size"] = model.moe_ffn_hidden_size
    return replace(model, name=name, **changes)


def _fewer_kinds(model: ModelShape, num_layers: int) -> tuple[str, ...]:
    """The kinds of so many layers: of each kind some, evenly from where they stand."""
    exact = {each.kind: num_layers * len(each.layers) / model.num_layers for each in model.kinds}
    counts = {kind: max(int(number), 1) for kind, number in exact.items()}
    while (over := sum(counts.values()) - num_layers) != 0:
        step = 1 if over < 0 else -1
        changeable = [kind for kind in counts if counts[kind] + step >= 1]
        counts[max(changeable, key=lambda kind: step * (exact[kind] - counts[kind]))] += step
    kept = [
        (each.layers[(2 * index + 1) * len(each.layers) // (2 * counts[each.kind])], each.kind)
        for each in model.kinds
        for index in range(counts[each.kind])
    ]
    return tuple(kind for _, kind in sorted(kept))


def fidelity_of(layout: Layout, probed: Layout, num_layers: int) -> Fidelity:
    """The fidelity at which a probe ran `probed` for a layout."""
    assert probed == replace(
        layout, num_nodes=probed.num_nodes, dp=probed.dp, num_microbatches=probed.num_microbatches
    ), f"{probed.key} is no part of {layout.key}"
    return Fidelity(num_microbatches=probed.num_microbatches, dp=probed.dp, num_layers=num_layers)


def fidelities(layout: Layout, model: ModelShape, cluster: Cluster) -> list[Fidelity]:
    """The cheap probes of a layout, by the micro-batches that they run.

    Each has twice as many as the one before, up to half of the layout's: with more, what happens
    once a step is a smaller share of what is measured. For each number: all replicas; then fewer;
    then also fewer layers.

    Each is legal on the cluster. Empty: the layout is cheap already.
    """
    rounds = max(_ROUNDS * layout.pp, _LEAST_MICROBATCHES)
    num_microbatches = -(-rounds // layout.pp) * layout.pp  # the interleaved schedule needs this
    found: list[Fidelity] = []
    while num_microbatches * _LEAST_SAVING <= layout.num_microbatches:
        found += _of_microbatches(num_microbatches, layout, model)
        num_microbatches *= 2
    return [each for each in found if _is_legal(each, layout, model, cluster)]


def _of_microbatches(count: int, layout: Layout, model: ModelShape) -> list[Fidelity]:
    """The cheap probes of so many micro-batches: all replicas; fewer; and also fewer layers."""
    found = [Fidelity(num_microbatches=count, dp=layout.dp, num_layers=model.num_layers)]
    dp = _fewest_replicas(layout)
    if dp * _LEAST_SAVING <= layout.dp:
        found.append(replace(found[0], dp=dp))
    layers = _LEAST_LAYERS * layout.pp * layout.vpp - sum(layout.counted_ends)
    # Stages that are written out have their layers.
    has_each_kind = not model.layer_kinds or layers >= len(model.kinds)
    if layers * _LEAST_SAVING <= model.num_layers and has_each_kind and not layout.is_written_out:
        found.append(replace(found[-1], num_layers=layers))
    return found


def _fewest_replicas(layout: Layout) -> int:
    """The fewest replicas that fill whole nodes and divide the experts alike.

    All where ZeRO shards the states over them.
    """
    if layout.zero_stage:
        return layout.dp  # the shards, and with them the memory, would grow
    ranks_per_node = layout.num_devices // layout.num_nodes
    return next(
        dp
        for dp in range(1, layout.dp + 1)
        if layout.dp % dp == 0
        and layout.num_devices // layout.dp * dp % ranks_per_node == 0
        and layout.tp * layout.cp * dp % (layout.etp * layout.ep) == 0
    )


def _is_legal(fidelity: Fidelity, layout: Layout, model: ModelShape, cluster: Cluster) -> bool:
    # The trainer's own limits, and spaces that let tp leave a node, were checked for the layout.
    scopes = OTHER_TRAINER_SCOPES - {"redundant"}
    return not violations(
        fidelity.reduced(layout),
        fidelity.reduced_model(model),
        cluster,
        allow_tp_across_nodes=True,
        scopes=scopes,
    )
