"""How a probe of a mixture of experts routes: asked for, recorded, and never mixed up."""

from __future__ import annotations

import pytest

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import CampaignInvalidError, OutcomeInvalidError, SearchSpaceError
from search_spaces.protocol.contradictions import refuse_contradictions
from search_spaces.protocol.measurement import Measurement, routing_words
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.search_spaces.protocol.test_outcome_documents import make_measurement

CAMPAIGN = {
    "name": "first",
    "model": "tiny-moe",
    "cluster": "local-cpu",
    "space": {"global_batch_size": 8},
    "budget": {"trials": 3},
}


def test_a_campaign_passes_its_routing_to_each_probe() -> None:
    spec = CampaignSpec.from_document({**CAMPAIGN, "probe": {"balanced_routing": False}})
    assert spec.to_mapping()["probe"]["balanced_routing"] is False
    assert CampaignSpec.from_mapping(spec.to_mapping()) == spec
    request = spec.probe_request(Layout())
    assert not request.balanced_routing
    assert ProbeRequest.from_mapping(request.to_mapping()) == request


def test_balanced_routing_is_the_default_and_not_stated() -> None:
    spec = CampaignSpec.from_document(CAMPAIGN)
    assert spec.probe_request(Layout()).balanced_routing
    assert "balanced_routing" not in spec.to_mapping()["probe"]
    assert "balanced_routing" not in spec.probe_request(Layout()).to_mapping()
    assert "balanced_routing" not in make_measurement().to_mapping()


def test_dense_models_have_no_routing_to_measure() -> None:
    dense = {**CAMPAIGN, "model": "tiny", "probe": {"balanced_routing": False}}
    with pytest.raises(
        CampaignInvalidError, match=r"balanced_routing: false measures how unevenly"
    ):
        CampaignSpec.from_document(dense)
    with pytest.raises(CampaignInvalidError, match="is not true or false"):
        CampaignSpec.from_document({**CAMPAIGN, "probe": {"balanced_routing": "no"}})
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
    changes = {"warmup": 2}
    steps = [
        measured.iterations[0],
        *(
            type(each)(index=place, kind=each.kind, step_time_s=0.5, loss=7.0, grad_norm=1.0)
            for place, each in ((1, measured.iterations[0]), (2, measured.iterations[1]))
        ),
    ]
    tokens = 128
    whole = make_measurement(
        iterations=tuple(steps),
        tokens_per_step=tokens,
        tokens_per_s=2.0 * tokens,
        tokens_per_s_per_device=2.0 * tokens,
        peak_memory_bytes_by_stage=(1 << 20,),
        balanced_routing=measured.balanced_routing,
        expert_load=measured.expert_load,
    )
    asked = ProbeRequest(model=request.model, layout=request.layout, iterations=1, **changes)
    refuse_contradictions(whole, asked, device_memory_bytes=1 << 30, may_be_shortened=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"balanced_routing": True}, "state both, or neither"),
        ({"expert_load": 1.0}, "state both, or neither"),
        ({"balanced_routing": False, "expert_load": 0.5}, "the fullest expert has the mean"),
        ({"balanced_routing": False, "expert_load": float("nan")}, "expert_load"),
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(OutcomeInvalidError, match=says):
        make_measurement(**changes)


def test_people_read_how_a_probe_routed() -> None:
    assert routing_words(None, None) == ""
    assert routing_words(True, 1.0).startswith("balanced by force, not by the router")
    assert routing_words(False, 1.4) == "by the router; the fullest expert has 1.40 times the mean"
    stored = make_measurement(balanced_routing=False, expert_load=1.25)
    assert Measurement.from_mapping(stored.to_mapping()) == stored
