"""Why a campaign that runs no trial waits: each reason that its progress gives."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.store import failed

WAITS_FOR_ITS_TURN = "its search waits for its turn"


def waiting_reason(api: Api) -> str:
    """Why the campaign `waits` does not run a trial; empty while it waits for nothing."""
    return api.get("/campaigns/waits")["progress"]["waiting_reason"] or ""


@pytest.fixture
def api(http: TestClient) -> Api:
    return Api(http)


@pytest.fixture
def waiting(api: Api) -> int:
    """The id of the campaign `waits` on the cluster `here`, which has no worker yet."""
    return int(api.submit(name="waits", cluster={**CAMPAIGN["cluster"], "name": "here"})["id"])


@pytest.fixture
def driven(api: Api, waiting: int) -> int:
    """The same with a driver, and with a worker of one device."""
    api.store.driver.acquire()
    api.register("small", cluster="here", devices_per_node=1)
    api.store.campaigns.note_waiting(waiting, WAITS_FOR_ITS_TURN)
    return waiting


@pytest.fixture
def too_wide(api: Api, driven: int) -> int:
    """The id of a trial of `waits` that needs more devices than its worker has."""
    return api.store.trials.add(driven, Layout(tp=2, num_microbatches=8)).id


@pytest.mark.usefixtures("waiting")
def test_a_campaign_waits_for_a_driver(api: Api) -> None:
    assert "no driver is at work" in waiting_reason(api)


@pytest.mark.usefixtures("waiting")
def test_a_campaign_waits_for_a_worker_of_its_cluster(api: Api) -> None:
    api.store.driver.acquire()
    api.register("other", cluster="elsewhere")
    assert "no worker of cluster here" in waiting_reason(api)


@pytest.mark.usefixtures("driven")
def test_a_campaign_waits_for_what_its_driver_noted(api: Api) -> None:
    assert waiting_reason(api) == WAITS_FOR_ITS_TURN


@pytest.mark.usefixtures("too_wide")
def test_a_campaign_waits_for_enough_devices(api: Api) -> None:
    assert "needs 2 devices on 1 node," in waiting_reason(api)
    assert "(small) has 1 node of 1 device" in waiting_reason(api)


def test_a_campaign_with_a_fitting_worker_waits_for_nothing(api: Api, too_wide: int) -> None:
    worker = api.register("large", cluster="here")
    assert api.get("/campaigns/waits")["progress"]["waiting_reason"] is None
    assert api.lease(worker)["trial_id"] == too_wide
    assert api.get("/campaigns/waits")["progress"]["waiting_reason"] is None, "its trial runs"


@pytest.mark.usefixtures("too_wide")
def test_a_paused_campaign_waits_to_be_resumed(api: Api) -> None:
    worker = api.register("large", cluster="here")
    api.report(worker, api.lease(worker), failed())
    api.post("/campaigns/waits/pause")
    assert "paused" in waiting_reason(api)
