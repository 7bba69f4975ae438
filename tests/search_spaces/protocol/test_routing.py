"""How a probe of a mixture of experts routes: asked for, recorded, and never mixed up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import CampaignInvalidError, OutcomeInvalidError, SearchSpaceError
from search_spaces.protocol.measurement import Measurement, routing_words
from search_spaces.protocol.measurement_checks import refuse_contradictions
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.kit.campaigns import spec_of
from tests.search_spaces.protocol.test_outcome_documents import make_measurement


def read(model: str = "tiny-moe", **probe: Any) -> CampaignSpec:
    space = {"global_batch_size": 8}
    return spec_of(model=model, cluster="local-cpu", space=space, probe=probe)


def test_a_campaign_passes_its_routing_to_each_probe_and_by_default_states_none() -> None:
    spec = read(balanced_routing=False)
    assert spec.to_mapping()["probe"]["balanced_routing"] is False
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    request = spec.probe_request(Layout())
    assert not request.balanced_routing
    assert ProbeRequest.from_mapping(request.to_mapping()) == request
    plain = read()
    assert plain.probe_request(Layout()).balanced_routing
    for document in (plain.to_mapping()["probe"], plain.probe_request(Layout()).to_mapping()):
        assert "balanced_routing" not in document
    assert "balanced_routing" not in make_measurement().to_mapping()


def test_dense_models_have_no_routing_to_measure() -> None:
    with pytest.raises(CampaignInvalidError, match="balanced_routing: false measures how unevenly"):
        read("tiny", balanced_routing=False)
    with pytest.raises(CampaignInvalidError, match="is not true or false"):
        read(balanced_routing="no")
    with pytest.raises(SearchSpaceError, match="the model tiny has none; leave it out"):
        ProbeRequest(model=model_preset("tiny"), layout=Layout(), balanced_routing=False)


def test_a_measurement_of_other_routing_than_asked_for_is_refused() -> None:
    """The losses of a campaign are compared: all of its probes route in the same way."""
    request = ProbeRequest(model=model_preset("tiny-moe"), layout=Layout(), iterations=1)
    for routing in (None, False):
        load = None if routing is None else 1.5
        measured = make_measurement(balanced_routing=routing, expert_load=load)
        with pytest.raises(OutcomeInvalidError, match=r"is not what the probe was to do, true"):
            refuse(measured, request)
    dense = ProbeRequest(model=model_preset("tiny"), layout=Layout(), iterations=1)
    with pytest.raises(OutcomeInvalidError, match=r"is not what the probe was to do, none"):
        refuse(make_measurement(balanced_routing=True, expert_load=1.0), dense)


def refuse(measured: Measurement, request: ProbeRequest) -> None:
    warmup, timed = measured.iterations
    steps = [
        warmup,
        *(
            replace(each, index=at, step_time_s=0.5, loss=7.0)
            for at, each in ((1, warmup), (2, timed))
        ),
    ]
    whole = make_measurement(
        iterations=tuple(steps),
        tokens_per_step=128,
        tokens_per_s=256.0,
        tokens_per_s_per_device=256.0,
        peak_memory_bytes_by_stage=(1 << 20,),
        balanced_routing=measured.balanced_routing,
        expert_load=measured.expert_load,
    )
    asked = replace(request, warmup=2)
    refuse_contradictions(whole, asked, device_memory_bytes=1 << 30, may_be_shortened=False)


def test_impossible_loads_are_refused_and_others_told_in_words() -> None:
    for routing, load, says in (
        (True, None, "state both, or neither"),
        (None, 1.0, "state both, or neither"),
        (False, 0.5, "the fullest expert has the mean"),
        (False, float("nan"), "expert_load"),
    ):
        with pytest.raises(OutcomeInvalidError, match=says):
            make_measurement(balanced_routing=routing, expert_load=load)
    assert routing_words(None, None) == ""
    assert routing_words(True, 1.0).startswith("balanced by force, not by the router")
    assert routing_words(False, 1.4) == "by the router; the fullest expert has 1.40 times the mean"
    stored = make_measurement(balanced_routing=False, expert_load=1.25)
    assert Measurement.from_mapping(stored.to_mapping()) == stored
