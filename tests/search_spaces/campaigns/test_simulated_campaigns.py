"""The part of a campaign that says that it is simulated, and what goes with it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.campaigns.campaign_settings import SimulationSettings
from search_spaces.errors import SearchSpaceError
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.tables.table import CellKey, own_source
from search_spaces.trainers.simulator import SIMULATOR_VERSION, is_simulator, simulator_trainer
from tests.kit.campaigns import spec_of


def read(**changes: Any) -> CampaignSpec:
    return spec_of(cluster="local-cpu", space={"global_batch_size": 8, "tp": [1, 2]}, **changes)


@pytest.mark.parametrize(
    ("said", "seed"), [(True, 0), ({}, 0), ({"seed": 5}, 5), (False, None), (None, None)]
)
def test_a_campaign_says_whether_it_is_simulated_and_with_which_seed(
    said: object, seed: int | None
) -> None:
    spec = read(simulated=said)
    assert (None if spec.simulated is None else spec.simulated.seed) == seed
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    assert ("simulated" in spec.to_mapping()) == is_simulator(spec.trainer) == (seed is not None)


def test_its_probes_are_the_simulators_with_its_seed_and_the_rules_of_others() -> None:
    spec = read(simulated={"seed": 5, "version": 3})
    assert spec.trainer == "simulator-3"
    assert spec.rule_scopes == read().rule_scopes
    assert SimulationSettings().trainer == simulator_trainer(SIMULATOR_VERSION)
    request = spec.probe_request(Layout())
    assert request.simulation_seed == 5
    assert ProbeRequest.from_mapping(request.to_mapping()) == request
    assert "simulation_seed" not in read().probe_request(Layout()).to_mapping()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"simulated": True, "budget": {"wall_time": "10m"}},
            "budget.wall_time_s: the probes of a simulated campaign take simulated time",
        ),
        ({"simulated": {"seed": -1}}, "simulated.seed: -1"),
        ({"simulated": "frontier"}, "simulated: "),
        ({"simulated": {"sead": 1}}, "did you mean 'seed'"),
        ({"probe": {"trainer": "simulator-1"}}, "add `simulated: true` to the campaign"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_in_words(changes: Any, problem: str) -> None:
    with pytest.raises(SearchSpaceError, match=re.escape(problem)):
        read(**changes)


def test_tables_of_simulated_campaigns_say_so() -> None:
    source = own_source("rehearsal", simulator_trainer(), seed=5)
    assert source == "simulated by simulator-1, seed 5: layout-tuner campaign rehearsal"
    sizes = {"seq_length": 8, "num_devices": 1, "global_batch_size": 8}
    key = CellKey(source=source, cluster="box", model="tiny", **sizes)
    assert key.is_simulated
    assert key.software
