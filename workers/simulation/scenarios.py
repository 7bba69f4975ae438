"""The scenarios of the simulation by name, and their simulated measurement tables.

A scenario is a model, a cluster and a space of layouts. The source of its table says that it is
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.documents.reading import nearest, shown
from layout_tuner.errors import LayoutInvalidError
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES, violations
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.rule import Scope
from layout_tuner.search_spaces.spaces.search_space import LegalSet, SearchSpace, enumerate_legal
from layout_tuner.search_spaces.tables import CellKey, MeasurementTable, TableCell, TableRow
from layout_tuner.trainers.simulator import SIMULATED
from layout_tuner.workers.errors import ScenarioUnknownError
from layout_tuner.workers.simulation.machine import Machine, node_slowness
from layout_tuner.workers.simulation.simulated_peaks import device_bytes, rank_memory
from layout_tuner.workers.simulation.steps import steps
from layout_tuner.workers.simulation.stress import distortion, memory_error
from layout_tuner.workers.simulation.trace import step_trace

Truth = Literal["events", "stress"]
"""What is measured: a machine a little better here and worse there than the described one, or one
on which every constant is far off, with a distortion on top (`stress`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """The layouts of one campaign, on a random machine."""

    name: str
    """Its name on the command line."""
    about: str
    """A description of one line."""
    model: ModelShape
    cluster: Cluster
    space: SearchSpace
    """The space of layouts, which all use the same devices and the same batch."""
    truth: Truth = "events"
    """What step times follow."""

    def legal_set(self) -> LegalSet:
        """Its layouts: those that some trainer could run."""
        return enumerate_legal(self.space, self.model, self.cluster, scopes=OTHER_TRAINER_SCOPES)


def scenario(name: str) -> Scenario:
    """The scenario of a name; ScenarioUnknownError with all of them for another name."""
    if name not in SCENARIOS:
        raise ScenarioUnknownError(f"unknown scenario {shown(name)}{nearest(name, SCENARIOS)}")
    return SCENARIOS[name]


def _space(nodes: int, batch: int, **changes: Any) -> SearchSpace:
    return SearchSpace(
        **{
            "global_batch_size": batch,
            "num_nodes": nodes,
            "tp": [1, 2, 4, 8],
            "pp": [1, 2, 4, 8, 16],
            "vpp": [1, 2, 4],
            "micro_batch_size": [1, 2, 4, 8],
            "zero_stage": [0, 1],
            "recompute": ["none", "selective", "full"],
            "sequence_parallel": [False, True],
            "precision": "bf16",
            **changes,
        }
    )


# The size of the simulated landscapes that guided searches were first tried on: some 6,700 layouts,
# of which 70 % run out of memory.
_FRONTIER_SPACE: Final = _space(
    3,
    960,
    pp=[1, 2, 3, 4, 6, 8, 12, 24],
    vpp=[1, 2, 3, 4, 6, 8, 12],
    micro_batch_size=[1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32, 40],
)

_STRESS_22B: Final = Scenario(
    name="stress-22b",
    about="22B on three Frontier-like nodes, every constant far off and a distortion on top",
    model=model_preset("gpt-22b"),
    cluster=CLUSTER_PRESETS["frontier"],
    space=_FRONTIER_SPACE,
    truth="stress",
)

_SCENARIOS: Final = (
    _STRESS_22B,
    replace(
        _STRESS_22B,
        name="frontier-22b",
        about="the same layouts on a machine that is little off",
        truth="events",
    ),
    Scenario(
        name="frontier-175b",
        about="175B on 16 Frontier nodes; 640 micro-batches at dp 2, so that a step takes minutes",
        model=model_preset("gpt-175b"),
        cluster=CLUSTER_PRESETS["frontier"],
        space=_space(16, 1280, recompute="full", micro_batch_size=[1, 2, 4]),
    ),
    Scenario(
        name="h100-8b",
        about="Llama 8B with sequences of 8,192 on 8 H100 nodes, event by event",
        model=model_preset("llama-8b"),
        cluster=CLUSTER_PRESETS["h100-sxm"],
        space=_space(8, 256),
    ),
    Scenario(
        name="a100-1.3b",
        about="1.3B on one A100 node, event by event",
        model=model_preset("gpt-1.3b"),
        cluster=CLUSTER_PRESETS["a100-sxm"],
        space=_space(1, 128, pp=[1, 2, 4, 8]),
    ),
)

SCENARIOS: Final[Mapping[str, Scenario]] = {scenario.name: scenario for scenario in _SCENARIOS}


def simulated_table(described: Scenario | str, seed: int) -> MeasurementTable:
    """Simulated measurements of every layout of a scenario, on the machine of a seed.

    Equal seeds give equal tables.

    Raises:
        ScenarioUnknownError: there is no scenario of that name.
    """
    chosen = scenario(described) if isinstance(described, str) else described
    legal = chosen.legal_set()
    layouts = [legal.layout(position) for position in range(len(legal))]
    peaks, steps = _truth(chosen, layouts, legal.columns(), seed)
    rows = tuple(
        _row(chosen, layout, peak, step_s, number=number)
        for number, (layout, peak, step_s) in enumerate(zip(layouts, peaks, steps, strict=True), 1)
    )
    first = layouts[0]
    source = f"{SIMULATED} {chosen.name}, seed {seed}"
    key = CellKey.of(source, chosen.cluster, chosen.model, first)
    cluster = replace(chosen.cluster, num_nodes=first.num_nodes)
    cell = TableCell(key=key, model=chosen.model, cluster=cluster, rows=rows)
    return MeasurementTable(cells=(cell,), notes=(f"{SIMULATED}: nobody has measured these rows",))


def simulated_part(name: str, seed: int, layout: Layout, fidelity: Fidelity) -> TableRow:
    """What a cheap probe of a layout measures on the machine of `simulated_table`.

    Only for scenarios whose truth is not distorted afterwards.

    Raises:
        ScenarioUnknownError: there is no scenario of that name.
    """
    chosen = scenario(name)
    assert chosen.truth == "events", f"{name} distorts whole layouts, and has no parts of them"
    machine, slowness = _machine(chosen, layout.num_nodes, seed)
    part, model = fidelity.reduced(layout), fidelity.reduced_model(chosen.model)
    peak = _peak_bytes(part, model, machine, seed)
    step_s = float("nan")
    if peak <= chosen.cluster.device_memory_bytes:
        step_s = steps([part], model, machine, node_slowness=slowness)[0].step_s
    return _row(replace(chosen, model=model), part, peak, step_s, number=1)


def simulated_trace(name: str, seed: int, key: str) -> dict[str, Any]:
    """A step of the layout of a key, on the machine of `simulated_table`, as a Chrome trace.

    Raises:
        ScenarioUnknownError: there is no scenario of that name.
        LayoutInvalidError: the key is none, or not that of a layout of the scenario's model.
    """
    chosen, layout = scenario(name), Layout.of_key(key)
    broken = violations(layout, chosen.model, chosen.cluster, scopes=_OF_TRACES)
    if broken:
        raise LayoutInvalidError(f"{key}: {'; '.join(broken)}")
    return step_trace(layout, chosen.model, _machine(chosen, layout.num_nodes, seed)[0])


_OF_TRACES: Final[frozenset[Scope]] = frozenset({"model", "machine", "device"})


def _machine(chosen: Scenario, num_nodes: int, seed: int) -> tuple[Machine, list[float]]:
    """The machine of a seed, and how slow its nodes are."""
    rng = np.random.default_rng([seed, 0])
    described = Machine.of(chosen.cluster)
    is_stress = chosen.truth == "stress"
    machine = described.stressed(rng) if is_stress else described.drawn(rng)
    return machine, node_slowness(num_nodes, rng)


def _peak_bytes(layout: Layout, model: ModelShape, machine: Machine, seed: int) -> float:
    ranks = rank_memory(layout, model, machine, seed=seed)
    return max(device_bytes(layout, machine, rank) for rank in ranks)


def _truth(
    chosen: Scenario, layouts: Sequence[Layout], columns: LayoutColumns, seed: int
) -> tuple[Floats, Floats]:
    """Peak and step time of each layout; the time is undefined if it does not fit."""
    noise_rng, stress_rng = (np.random.default_rng([seed, part]) for part in (1, 2))
    machine, slowness = _machine(chosen, layouts[0].num_nodes, seed)
    peaks = np.array([_peak_bytes(each, chosen.model, machine, seed) for each in layouts])
    distorted: Floats = np.ones(len(layouts))
    if chosen.truth == "stress":
        peaks *= memory_error(stress_rng)
        distorted = distortion(columns, stress_rng)
    fitting = np.flatnonzero(peaks <= chosen.cluster.device_memory_bytes).tolist()
    walked = steps([layouts[i] for i in fitting], chosen.model, machine, node_slowness=slowness)
    times = np.full(len(layouts), np.nan)
    times[fitting] = [step.step_s for step in walked]
    noise = np.exp(machine.noise * noise_rng.standard_normal(len(times)))
    return peaks, times * distorted * noise


def _row(
    chosen: Scenario, layout: Layout, peak_bytes: float, step_s: float, *, number: int
) -> TableRow:
    if peak_bytes > chosen.cluster.device_memory_bytes:
        return TableRow(layout=layout, status="out_of_memory", number=number)
    tokens = layout.global_batch_size * chosen.model.seq_length
    return TableRow(
        layout=layout,
        status="completed",
        tokens_per_s=float(tokens / step_s),
        step_time_s=float(step_s),
        peak_memory_bytes=round(float(peak_bytes)),
        number=number,
    )
