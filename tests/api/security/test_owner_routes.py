"""Owners and groups over HTTP, and what the tokens of one owner may do for each other."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.api.security.roles import ACCESS
from layout_tuner.results_db.actor import Actor
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.api.security.test_gate import OF_SUBMITTERS
from tests.kit.api import CAMPAIGN, Api, answered, bearer


def token(api: Api, name: str, role: str = "submitter", **more: Any) -> dict[str, str]:
    made = api.post("/tokens", {"name": name, "role": role, **more}, status=201)
    assert made["owner"] == more.get("owner", name)
    return bearer(made["token"])


def put(api: Api, path: str, body: Any = None) -> Any:
    return answered(api.http.put(f"/v1{path}", json=body), 200).json()


def everything(api: Api) -> tuple[Any, ...]:
    return api.get("/owners"), api.get("/groups"), api.get("/tokens"), api.store.access.audit()


LAB = {"name": "lab", "weight": 3.0, "members": ["ann"]}


@pytest.fixture
def laptop(api: Api) -> dict[str, str]:
    """The headers of a token of ann, who is in the group `lab`, as bob is in `site`."""
    headers = token(api, "ann-laptop", owner="ann")
    put(api, "/owners/bob", {"weight": 2})
    put(api, "/groups/lab", {"weight": 3, "members": ["ann"]})
    put(api, "/groups/site", {"members": ["bob"]})
    return headers


def test_an_owner_gets_a_weight(api: Api) -> None:
    bob = {"name": "bob", "weight": 2.0, "subject": None, "groups": []}
    assert put(api, "/owners/bob", {"weight": 2}) == bob


@pytest.mark.usefixtures("laptop")
def test_a_group_is_changed_field_by_field(api: Api) -> None:
    new = {**LAB, "name": "new"}
    assert put(api, "/groups/new", {"weight": 3, "members": ["ann"]}) == new
    assert put(api, "/groups/new", {"weight": 4}) == {**new, "weight": 4.0}


@pytest.mark.usefixtures("laptop")
def test_members_of_a_group_are_named_join_and_leave(api: Api) -> None:
    assert put(api, "/groups/lab", {"members": ["bob"]})["members"] == ["bob"]
    assert put(api, "/groups/lab", {"join": ["ann"]})["members"] == ["ann", "bob"]
    assert put(api, "/groups/lab", {"leave": ["ann", "bob"]})["members"] == []


def test_a_submitter_sees_its_own_groups_an_admin_all(api: Api, laptop: dict[str, str]) -> None:
    def seen_by(headers: dict[str, str] | None) -> list[str]:
        groups = answered(api.http.get("/v1/groups", headers=headers), 200).json()["groups"]
        return [each["name"] for each in groups]

    assert (seen_by(laptop), seen_by(None)) == (["lab"], ["lab", "site"])
    put(api, "/groups/lab", {"leave": ["ann"]})
    assert seen_by(laptop) == []


def test_a_token_names_its_owner_and_groups(api: Api, laptop: dict[str, str]) -> None:
    who = api.http.get("/v1/whoami", headers=laptop).json()
    assert (who["name"], who["owner"], who["groups"]) == ("ann-laptop", "ann", ["lab"])


@pytest.mark.usefixtures("laptop")
def test_owners_are_listed_with_their_groups(api: Api) -> None:
    put(api, "/groups/lab", {"join": ["bob"]})
    assert {each["name"]: each["groups"] for each in api.get("/owners")["owners"]} == {
        "ann": ["lab"],
        "bob": ["lab", "site"],
    }


@pytest.mark.usefixtures("laptop")
def test_a_group_is_deleted_once(api: Api) -> None:
    answered(api.http.delete("/v1/groups/lab"), 204)
    answered(api.http.delete("/v1/groups/lab"), 404, "there is no group 'lab'")


ODD = "A-Z a-z 0-9 . _ @ -"
MANY = {"members": [f"person-{number}" for number in range(20_000)]}
REFUSED: dict[str, tuple[str, str, Any, int, str]] = {
    "odd owner": ("PUT", "owners/a%20b", {"weight": 1}, 422, f"owner='a b' is not 1 to 64 characters of {ODD}"),
    "long owner": ("PUT", f"owners/{'a' * 65}", {"weight": 1}, 422, ODD),
    "NUL": ("PUT", "owners/%00", {"weight": 1}, 422, ODD),
    "odd group": ("PUT", "groups/%C3%A9quipe", {}, 422, f"group='équipe' is not 1 to 64 characters of {ODD}"),
    "another field": ("PUT", "owners/ann", {"wait": 2}, 422, "wait"),
    "weight of 0": ("PUT", "owners/ann", {"weight": 0}, 422, "weight=0.0 is not from 0.001 to 1000"),
    "weight of 10^9": ("PUT", "groups/lab", {"weight": 1e9}, 422, "weight=1000000000.0 is not from"),
    "text as weight": ("PUT", "owners/ann", {"weight": "2"}, 422, "weight"),
    "unknown field": ("PUT", "groups/lab", {"wight": 2}, 422, "wight"),
    "20,000 members": ("PUT", "groups/lab", MANY, 422, "would have 20000 members; a group has at most 10000"),
    "unknown member": ("PUT", "groups/lab", {"members": ["ann", "amm"]}, 404, "there is no owner 'amm'"),
    "unknown owner": ("PUT", "groups/lab", {"join": ["ann", "amm"]}, 404, "there is no owner 'amm'"),
    "unknown group": ("PUT", "groups/lap", {"join": ["ann"]}, 404, "there is no group 'lap'"),
    "no member": ("PUT", "groups/lab", {"leave": ["bob"]}, 404, "'bob' is not in the group 'lab'"),
    "NUL in a group": ("DELETE", "groups/l%00p", None, 422, "holds a NUL character"),
    "odd owner of a token": ("POST", "tokens", {"name": "x", "role": "viewer", "owner": "a b"}, 422, "owner='a b' is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_in_a_sentence(api: Api, case: str) -> None:
    method, path, body, status, said = REFUSED[case]
    put(api, "/owners/ann", {"weight": 2})
    put(api, "/groups/lab", {"members": ["ann"]})
    before = everything(api)
    answer = answered(api.http.request(method, f"/v1/{path}", json=body), status)
    problem = answer.json()
    assert said in problem["detail"] + str(problem.get("errors"))
    assert everything(api) == before


class TwoTokens:
    """Two tokens of ann, and one of bob."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.laptop, self.ci = (token(api, f"ann-{it}", owner="ann") for it in ("laptop", "ci"))
        self.bob = token(api, "bob")

    def ask(self, who: dict[str, str], method: str, path: str, **sent: Any) -> Any:
        headers = who | sent.pop("headers", {})
        return self.api.http.request(method, path, headers=headers, **sent)


@pytest.mark.parametrize("operation", OF_SUBMITTERS, ids=lambda operation: operation.name)
def test_tokens_of_one_owner_change_each_others_things(api: Api, operation: Any) -> None:
    two = TwoTokens(api)
    owned = ACCESS[operation.name].owned
    if owned in ("campaign", "trial"):
        made = answered(two.ask(two.laptop, "POST", "/v1/campaigns", json=CAMPAIGN), 201).json()
        assert made["created_by"] == "ann"
        trial = api.store.trials.add(made["id"], Layout(num_microbatches=8))
        named = {"campaign": "first", "trial": str(trial.id)}[owned]
    else:
        laptop = api.store.by(Actor(name="ann-laptop", role="submitter", owner="ann"))
        laptop.catalogue.put(owned, "own", {}, notes="")
        named = "own"
    url = operation.url(named)
    refused = two.ask(two.bob, operation.method, url)
    answered(refused, 403, "belongs to 'ann', and 'bob' changes only things of its own")
    answer = two.ask(two.ci, operation.method, url, follow_redirects=False)
    assert answer.status_code not in (401, 403, 429, 500), answer.text


def test_a_request_repeats_itself_with_another_token_of_its_owner(api: Api) -> None:
    two = TwoTokens(api)
    key = {"Idempotency-Key": "once"}
    first, again = (
        two.ask(who, "POST", "/v1/campaigns", json=CAMPAIGN, headers=key)
        for who in (two.laptop, two.ci)
    )
    assert first.json()["id"] == again.json()["id"]
    other = two.ask(two.bob, "POST", "/v1/campaigns", json=CAMPAIGN, headers=key)
    answered(other, 409, "'first'")


def test_campaigns_stay_with_the_owner_of_a_revoked_token(api: Api) -> None:
    two = TwoTokens(api)
    answered(two.ask(two.laptop, "POST", "/v1/campaigns", json=CAMPAIGN), 201)
    for each in api.get("/tokens")["tokens"]:
        if each["owner"] == "ann":
            answered(api.http.delete(f"/v1/tokens/{each['id']}"), 200)
    answered(two.ask(two.ci, "POST", "/v1/campaigns/first/pause"), 401)
    later = token(api, "ann-later", owner="ann")
    assert two.ask(later, "POST", "/v1/campaigns/first/pause").json()["created_by"] == "ann"
    assert [each["name"] for each in api.get("/owners")["owners"]] == ["ann", "bob"]
    (entry,) = api.store.access.audit(action="campaign.pause")
    assert entry.actor == "ann-later"


def test_the_data_directory_s_token_is_an_owner_too(api: Api) -> None:
    assert api.get("/owners")["owners"] == []
    assert api.submit()["created_by"] == "local"
    local = {"name": "local", "weight": 1.0, "subject": None, "groups": []}
    assert api.get("/owners")["owners"] == [local]
    ops = token(api, "ops", owner="local")
    answered(api.http.post("/v1/campaigns/first/pause", headers=ops), 200)
