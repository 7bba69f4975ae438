"""What can be simulated: a model, a cluster and the layouts of one campaign, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from search_spaces.cluster import Cluster
from search_spaces.model_shape import ModelShape
from search_spaces.presets.clusters import CLUSTER_PRESETS
from search_spaces.presets.models import model_preset
from search_spaces.reading import nearest, shown
from search_spaces.rules import ALL_SCOPES
from search_spaces.space import LegalSet, SearchSpace, enumerate_legal
from tuner.errors import ScenarioUnknownError

Truth = Literal["events", "stress"]
"""What step times follow: a walk through the events of a step, or the closed form with every term
wrong and a distortion on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One campaign's worth of layouts, on a machine that a seed draws."""

    name: str
    """What it is asked for by."""
    about: str
    """What it is like, in a line."""
    model: ModelShape
    """What is trained."""
    cluster: Cluster
    """What the machine is described as."""
    space: SearchSpace
    """The layouts; all use the same devices and the same batch."""
    truth: Truth
    """What step times follow."""

    def legal_set(self) -> LegalSet:
        """Its layouts: whatever some trainer could run."""
        return enumerate_legal(
            self.space, self.model, self.cluster, scopes=ALL_SCOPES - {"trainer"}
        )


def scenario(name: str) -> Scenario:
    """The scenario of that name.

    Raises:
        ScenarioUnknownError: there is none; the message lists those that there are.
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

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {scenario.name: scenario for scenario in _SCENARIOS}
)
"""Every scenario by name."""
