"""The scenarios of the simulation by name, and their simulated measurement tables.

A scenario is a model, a cluster and a space of layouts. The source of its table says that it is
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from search_spaces.arrays import Floats
from search_spaces.campaigns.fidelity import Fidelity
from search_spaces.documents.reading import nearest, shown
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from search_spaces.spec.rules import OTHER_TRAINER_SCOPES
from search_spaces.spec.space import LegalSet, SearchSpace, enumerate_legal
from search_spaces.tables import CellKey, MeasurementTable, TableCell, TableRow
from workers.errors import LayoutNotSimulatedError, ScenarioUnknownError
from workers.simulation.machine import Machine
from workers.simulation.memory import peak_memory_bytes
from workers.simulation.steps import step_times_s
from workers.simulation.stress import StressedEstimates

Truth = Literal["events", "stress"]
"""What step times follow: a walk through the events of a step, or the closed form with every term
wrong and a distortion on top."""


_NOT_SIMULATED: Final = {"num_experts", "head_dim", "qk_norm", "attention_window"}
"""Fields of models that the simulated cluster does not have."""

SIMULATED: Final = "simulated"
"""The beginning of the source of a simulated table."""


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
    truth: Truth
    """What step times follow."""

    def __post_init__(self) -> None:
        if newer := self.model.to_mapping().keys() & _NOT_SIMULATED:
            raise ScenarioUnknownError(
                f"the simulated cluster has no {', '.join(sorted(newer))}, which the model "
                f"{self.model.name} has; simulate a dense model"
            )

    def legal_set(self) -> LegalSet:
        """Its layouts: those that some trainer could run."""
        return enumerate_legal(self.space, self.model, self.cluster, scopes=OTHER_TRAINER_SCOPES)


def scenario(name: str) -> Scenario:
    """The scenario of a name.

    Raises:
        ScenarioUnknownError: it is unknown; the message lists the scenarios.
    """
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

_SCENARIOS: Final = (
    Scenario(
        name="stress-22b",
        about="22B on three Frontier-like nodes; the estimates are wrong in form, memory included",
        model=model_preset("gpt-22b"),
        cluster=CLUSTER_PRESETS["frontier"],
        space=_FRONTIER_SPACE,
        truth="stress",
    ),
    Scenario(
        name="frontier-22b",
        about="the same layouts, walked event by event",
        model=model_preset("gpt-22b"),
        cluster=CLUSTER_PRESETS["frontier"],
        space=_FRONTIER_SPACE,
        truth="events",
    ),
    Scenario(
        name="frontier-175b",
        about="175B on 16 Frontier nodes; 640 micro-batches at dp 2, so that a step takes minutes",
        model=model_preset("gpt-175b"),
        cluster=CLUSTER_PRESETS["frontier"],
        space=_space(16, 1280, recompute="full", micro_batch_size=[1, 2, 4]),
        truth="events",
    ),
    Scenario(
        name="h100-8b",
        about="Llama 8B with sequences of 8,192 on 8 H100 nodes, event by event",
        model=model_preset("llama-8b"),
        cluster=CLUSTER_PRESETS["h100-sxm"],
        space=_space(8, 256),
        truth="events",
    ),
    Scenario(
        name="a100-1.3b",
        about="1.3B on one A100 node, event by event",
        model=model_preset("gpt-1.3b"),
        cluster=CLUSTER_PRESETS["a100-sxm"],
        space=_space(1, 128, pp=[1, 2, 4, 8]),
        truth="events",
    ),
)

SCENARIOS: Final[Mapping[str, Scenario]] = {scenario.name: scenario for scenario in _SCENARIOS}


_SIMULATED: Final[Mapping[str, Sequence[Any]]] = {
    **{name: (knob.default,) for name, knob in KNOBS.items() if knob.is_new},
    "zero_stage": (0, 1),
    "precision": ("fp32", "bf16", "fp16"),
}
"""The values of knobs that simulated clusters have, where they lack others."""


def simulated_table(described: Scenario | str, seed: int) -> MeasurementTable:
    """Simulated measurements of every layout of a scenario, on the machine of a seed.

    Equal seeds give equal tables.

    Raises:
        ScenarioUnknownError: there is no scenario of that name.
        LayoutNotSimulatedError: the space has layouts that simulated clusters lack.
    """
    chosen = scenario(described) if isinstance(described, str) else described
    for name, known in _SIMULATED.items():
        for value in chosen.space.values(name):
            if value not in known:
                raise LayoutNotSimulatedError(
                    f"{name}={value} is not simulated; leave it out of the space"
                )
    legal = chosen.legal_set()
    layouts = [legal.layout(position) for position in range(len(legal))]
    peaks, steps = _truth(chosen, layouts, legal.columns(), seed)
    rows = tuple(
        _row(chosen, layout, peak, step_s, number=number)
        for number, (layout, peak, step_s) in enumerate(zip(layouts, peaks, steps, strict=True), 1)
    )
    first = layouts[0]
    key = CellKey(
        source=f"{SIMULATED} {chosen.name}, seed {seed}",
        cluster=chosen.cluster.name,
        model=chosen.model.name,
        seq_length=chosen.model.seq_length,
        num_devices=first.num_devices,
        global_batch_size=first.global_batch_size,
    )
    cluster = replace(chosen.cluster, num_nodes=first.num_nodes)
    cell = TableCell(key=key, model=chosen.model, cluster=cluster, rows=rows)
    return MeasurementTable(cells=(cell,), notes=(f"{SIMULATED}: nobody has measured these rows",))


def simulated_part(name: str, seed: int, layout: Layout, fidelity: Fidelity) -> TableRow:
    """What a cheap probe of a layout measures on the machine of `simulated_table`.

    Only for scenarios whose truth is a walk through the events of a step.

    Raises:
        ScenarioUnknownError: there is no scenario of that name.
    """
    chosen = scenario(name)
    assert chosen.truth == "events", f"{name} has no machine that could run a part of a layout"
    machine = Machine.draw(chosen.cluster, layout.num_devices, np.random.default_rng([seed, 0]))
    part, model = fidelity.reduced(layout), fidelity.reduced_model(chosen.model)
    peak = peak_memory_bytes(part, model, machine, seed=seed)
    step_s = float("nan")
    if peak <= chosen.cluster.device_memory_bytes:
        step_s = float(step_times_s([part], model, machine)[0])
    return _row(replace(chosen, model=model), part, peak, step_s, number=1)


def _truth(
    chosen: Scenario, layouts: Sequence[Layout], columns: LayoutColumns, seed: int
) -> tuple[Floats, Floats]:
    """Peak and step time of each layout; the time is undefined if it does not fit."""
    machine_rng, noise_rng = (np.random.default_rng([seed, part]) for part in range(2))
    if chosen.truth == "stress":
        stressed = StressedEstimates.draw(columns, chosen.model, chosen.cluster, machine_rng)
        peaks, steps, noise = stressed.peaks, stressed.step_times_s, stressed.noise
    else:
        machine = Machine.draw(chosen.cluster, layouts[0].num_devices, machine_rng)
        peaks = np.array(
            [peak_memory_bytes(layout, chosen.model, machine, seed=seed) for layout in layouts]
        )
        fitting = np.flatnonzero(peaks <= chosen.cluster.device_memory_bytes).tolist()
        steps, noise = np.full(len(layouts), np.nan), machine.noise
        steps[fitting] = step_times_s([layouts[i] for i in fitting], chosen.model, machine)
    return peaks, steps * np.exp(noise * noise_rng.standard_normal(len(steps)))


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
