"""Fair shares and quotas over HTTP: who reads what, who sets what, and what a campaign says."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, Api, answered, bearer
from tests.kit.store import make_worker, take_leases
from tests.results_db.access.test_fair_shares import make

QUOTA = {"node_hours": 1.0, "beyond": "wait"}


@pytest.fixture
def tokens(api: Api) -> dict[str, str]:
    named = {"a": "submitter", "b": "viewer"}
    return {
        name: api.post("/tokens", {"name": name, "role": role}, status=201)["token"]
        for name, role in named.items()
    }


def read(api: Api, token: str, path: str) -> Any:
    return answered(api.http.get(f"/v1{path}", headers=bearer(token)), 200).json()


def test_one_s_own_share_is_read(api: Api, tokens: dict[str, str]) -> None:
    store = api.store
    worker = make_worker(store).id
    make(store, "a", trials=2)
    make(store, "b", trials=2)
    take_leases(store, worker, 2)
    shares = api.get("/shares")["shares"]
    assert [each["owner"] for each in shares] == ["a", "b"]
    assert [each["had"] for each in shares] == [pytest.approx(0.5, rel=0.1)] * 2
    assert [(each["running"], each["waiting"]) for each in shares] == [(1, 1)] * 2
    for name, token in tokens.items():
        (own,) = read(api, token, "/shares")["shares"]
        assert (own["owner"], own["waiting"]) == (name, 1)
        assert own["had"] == pytest.approx(0.5, rel=0.1)


def test_a_quota_is_set_read_and_removed(api: Api, tokens: dict[str, str]) -> None:
    path = "/v1/quotas/owner/a/week"
    put = answered(api.http.put(path, json=QUOTA), 200).json()
    assert (put["name"], put["node_hours"], put["beyond"], put["until"]) == ("a", 1.0, "wait", None)
    assert read(api, tokens["a"], "/quotas")["quotas"] == [put]
    assert read(api, tokens["b"], "/quotas")["quotas"] == []
    for name in tokens:
        headers = bearer(tokens[name])
        answered(api.http.put(path, json=QUOTA, headers=headers), 403)
        answered(api.http.delete(path, headers=headers), 403)
    answered(api.http.delete(path), 204)
    answered(api.http.delete(path), 404, "has no quota for a week")
    actions = [each["action"] for each in api.get("/audit", target="a")["entries"]]
    assert actions[:2] == ["quota.remove", "quota.put"]


@pytest.mark.parametrize(
    ("path", "changes", "status", "said"),
    [
        ("owner/nobody/day", {}, 404, "there is no owner 'nobody'"),
        ("owner/a/day", {"node_hours": 0}, 422, "is not above 0"),
        ("owner/a/day", {"node_hours": 1e9}, 422, "at most 1e+08"),
        ("owner/a/day", {"until": "2020-01-01T00:00:00Z"}, 422, "is past"),
        ("owner/a/hour", {}, 422, "day"),
        ("owner/a/day", {"beyond": "warn"}, 422, "refuse"),
    ],
)
def test_a_bad_quota_is_one_sentence(
    api: Api, tokens: dict[str, str], path: str, changes: dict[str, Any], status: int, said: str
) -> None:
    put = api.http.put(f"/v1/quotas/{path}", json=QUOTA | changes)
    answered(put, status, said)
    assert api.get("/quotas")["quotas"] == []


def test_a_budget_beyond_a_quota_is_a_conflict(api: Api, tokens: dict[str, str]) -> None:
    given = QUOTA | {"beyond": "refuse"}
    answered(api.http.put("/v1/quotas/owner/*/day", json=given), 200)
    document = CAMPAIGN | {"budget": {"node_hours": 2}}
    posted = api.http.post("/v1/campaigns", json=document, headers=bearer(tokens["a"]))
    problem = answered(posted, 409, "'a' has 1 of 1 node-hours left in this day").json()
    assert problem["type"].endswith("quota-exceeded")
    assert api.get("/campaigns")["campaigns"] == []


def test_a_campaign_says_why_it_waits(api: Api, tokens: dict[str, str]) -> None:
    asks = {"a": bearer(tokens["a"]), "c": api.holder("c", "submitter")}
    worker = make_worker(api.store).id
    for owner, name in (("a", "first"), ("a", "second"), ("c", "third")):
        document = CAMPAIGN | {"name": name}
        made = answered(api.http.post("/v1/campaigns", json=document, headers=asks[owner]), 201)
        api.store.trials.add(made.json()["id"], Layout())
    (lease,) = take_leases(api.store, worker, 1)
    assert lease.campaign_name == "first"

    def why(name: str) -> str:
        return str(api.get(f"/campaigns/{name}")["progress"]["waiting_reason"])

    assert why("second") == (
        "other owners are before: a has had 100% of the recent node-hours on local-cpu, and is "
        "entitled to 50%"
    )
    assert why("third").startswith("the devices are taken, c is next: c has had 0%")
    answered(api.http.put("/v1/quotas/owner/a/day", json=QUOTA | {"node_hours": 0.01}), 200)
    assert why("second").startswith("'a' has 0 of 0.01 node-hours left in this day, which ends at ")
    assert why("second").endswith(" UTC; it waits")
    assert why("third").startswith("the devices")
