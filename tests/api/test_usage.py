"""GET /v1/usage, the page, the metric by owner, the command and the client's method."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape

import pytest
from sqlalchemy import update

from layout_tuner.api.process.metrics import _ServiceCollector
from layout_tuner.client.clients import Client
from layout_tuner.results_db.models.service_tables import PastUse
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CLUSTER, Api, Command, answered, ends, measured_as_asked


@pytest.fixture
def used(api: Api) -> Api:
    """The service, in which "ann" and "bob" have a campaign each with one trial."""
    worker = api.register(devices_per_node=4)
    for owner, price in (("ann", "2.50 EUR"), ("bob", "")):
        headers = api.holder(owner, "submitter")
        campaign = {
            "name": f"of-{owner}",
            "cluster": {**CLUSTER, **({"node_hour_price": price} if price else {})},
            "model": "tiny",
            "objective": "tokens_per_s",
            "strategy": "random",
            "budget": {"trials": 5},
            "space": {"global_batch_size": 8, "tp": [1, 2], "pp": [1, 2], "dp": 1},
        }
        answered(api.http.post("/v1/campaigns", json=campaign, headers=headers), 201)
        stored = api.store.campaigns.by_name(f"of-{owner}")
        layout = Layout(tp=2, micro_batch_size=8)
        api.store.trials.add(stored.id, layout)
        lease = api.lease(worker)
        api.report(worker, lease, measured_as_asked(lease, layout, duration_s=36.0))
    return api


def test_rows_and_sums_are_node_hours(used: Api) -> None:
    found = used.get("/usage", by="owner")
    assert {row["name"]: round(row["node_hours"], 6) for row in found["rows"]} == {
        "ann": 0.01,
        "bob": 0.01,
    }
    assert found["total"]["node_hours"] == pytest.approx(0.02)
    assert found["total"]["money"] == {"EUR": pytest.approx(0.025)}
    (day,) = found["days"]
    assert day["name"] == found["until"]
    half = found["total"]["idle"]  # two of four devices
    assert half == pytest.approx(found["total"]["probes"])
    assert used.get("/usage", simulated="true")["rows"] == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"by": "moon"}, "'owner', 'group', 'campaign' or 'cluster'"),
        ({"since": "2999-01-01"}, "since: 2999-01-01 is in the future"),
        ({"until": "2999-01-01"}, "until: 2999-01-01 is in the future"),
        ({"since": "3d", "until": "5d"}, ", the first day"),
        ({"since": "yesterday"}, "neither a day such as 2026-11-01 nor as long ago as 7d"),
        ({"since": "2026-02-30"}, "neither a day such as"),
        ({"since": "2026-11-01T12:00"}, "neither a day such as"),
        ({"since": "99999999d"}, "neither a day such as"),
        ({"tokens": "many"}, "is not a number of tokens"),
        ({"tokens": "0"}, "is not a whole number from 1"),
    ],
)
def test_nonsense_gets_one_sentence(api: Api, asked: dict[str, str], said: str) -> None:
    answered(api.http.get("/v1/usage", params=asked), 422, said)
    if "by" not in asked:
        assert said in unescape(api.http.get("/usage", params=asked).text)


def test_csv_has_no_formulas(used: Api) -> None:
    with used.store._db.write() as session:
        session.execute(update(PastUse).where(PastUse.owner == "bob").values(name="=1+1"))
    rows = used.table("/usage", by="campaign", format="csv")
    assert {row["name"] for row in rows} == {"of-ann", "'=1+1"}
    assert {row["money"] for row in rows} == {"0.03 EUR", ""}


def test_what_one_may_not_see_is_in_no_sum(used: Api) -> None:
    with used.store._db.write() as session:
        campaign = used.store.campaigns.by_name("of-ann")
        session.get_one(Campaign, campaign.id).visibility = "private"
    viewer = used.holder("cid", "viewer")
    found = used.http.get("/v1/usage", params={"by": "campaign"}, headers=viewer).json()
    assert [row["name"] for row in found["rows"]] == ["of-bob"]
    assert found["total"]["node_hours"] == pytest.approx(0.01)
    page = used.http.get("/usage", params={"by": "campaign"}, headers=viewer).text
    assert "of-bob" in page
    assert "of-ann" not in page


def test_the_page_has_a_plot_a_table_and_links(used: Api) -> None:
    page = unescape(answered(used.http.get("/usage", params={"by": "campaign"}), 200).text)
    campaign = used.store.campaigns.by_name("of-ann").id
    assert f'<a href="/campaigns/{campaign}">of-ann</a>' in page
    assert ">all</td>" in page
    assert 'href="/v1/usage?by=campaign&since=30d&tokens=1T&format=csv"' in page
    colours = set(re.findall(r'<path [^>]*stroke="var\((--part[^"]*)\)"', page))
    assert colours == {"--part1", "--part3"}
    empty = used.http.get("/usage", params={"since": "9d", "until": "8d"}).text
    assert "No campaign used a node in these days." in empty


def test_the_metric_by_owner_outlives_deletion(used: Api) -> None:
    line = 'layout_tuner_owner_node_seconds_total{owner="ann"} 36.0'
    assert line in used.http.get("/metrics").text.splitlines()
    campaign = used.store.campaigns.by_name("of-ann").id
    used.store.campaigns.cancel(campaign)
    used.store.campaigns.delete(campaign)
    stats = used.store.statistics.service_stats()
    assert stats.owner_node_seconds == {"ann": pytest.approx(36), "bob": pytest.approx(36)}


def test_the_metric_by_owner_never_falls(used: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = _ServiceCollector(used.store)
    monkeypatch.setattr("layout_tuner.api.process.metrics.READ_EVERY_S", 0.0)
    for cost, shown in ((36.0, 36.0), (30.0, 36.0), (40.0, 40.0)):
        with used.store._db.write() as session:
            booked = update(PastUse).where(PastUse.owner == "ann")
            session.execute(booked.values(probes=cost, idle=0.0))
        (found,) = [each for each in metrics.collect() if "owner_node" in each.name]
        assert {each.labels["owner"]: each.value for each in found.samples}["ann"] == shown


def test_client_and_command_show_the_same(used: Api, client: Client, command: Command) -> None:
    found = client.usage(by="campaign", since="1d")
    assert found.since == found.until - timedelta(days=1)
    assert {row.name for row in found.rows} == {"of-ann", "of-bob"}
    assert client.usage_csv(by="campaign").startswith("name,campaign_id,campaigns,trials,probes")
    shown = ends(command("usage", "--by", "campaign"), 0, "of-ann", "node-hours by campaign")
    assert shown.stdout.splitlines()[-1].split()[0] == "all"
    ends(command("usage", "--csv", "--json"), 2, "exclude each other")
    ends(command("usage", "--since", "2999-01-01"), 2, "is in the future")
    assert command("usage", "--csv").stdout.splitlines()[1].startswith("ann,,1,1,")
