"""Who sees a campaign: stated at submission, changed later, shown and filtered by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from layout_tuner.api.app import create_app
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
from tests.kit.api import CAMPAIGN, TOKEN, answered, bearer
from tests.kit.postgres import upgraded
from tests.kit.service_fixtures import TestClient
from tests.results_db.campaigns.test_imported_tables import varied_rows
from tests.search_spaces.tables.tables import make_text


class Shared:
    """A service with two members of a group and one who is in none."""

    def __init__(self, http: TestClient, store: Store) -> None:
        self.http, self.store = http, store
        store.owners.put_group("lab", members=["ann", "bob"], known_members=False)
        self.tokens = {
            name: store.access.create_token(name, "submitter")[1] for name in ("ann", "bob", "cid")
        } | {"root": store.access.create_token("root", "admin")[1]}

    def ask(self, who: str, method: str, path: str, status: int = 200, **sent: Any) -> Any:
        answer = self.http.request(
            method, path, headers=bearer(self.tokens[who]), follow_redirects=False, **sent
        )
        return answered(answer, status)

    def submit(self, who: str, name: str, status: int = 201, **query: Any) -> Any:
        document = {**CAMPAIGN, "name": name}
        path = "/v1/campaigns"
        return self.ask(who, "POST", path, status, json=document, params=query).json()

    def names(self, who: str, **query: Any) -> list[str]:
        listed = self.ask(who, "GET", "/v1/campaigns", params=query).json()["campaigns"]
        return [each["name"] for each in listed]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    data = upgraded(tmp_path_factory.mktemp("sharing"))
    settings = Settings(token=TOKEN, requests_per_s=1e6, default_visibility="private")
    with (
        closing(Store.open(data)) as store,
        TestClient(create_app(settings, store), raise_server_exceptions=False) as http,
    ):
        yield Shared(http, store)


def test_a_campaign_has_the_default_visibility(shared: Shared) -> None:
    made = shared.submit("ann", "plain")
    assert (made["visibility"], made["group"], made["priority"]) == ("private", "lab", 0)
    stated = shared.submit("ann", "stated", visibility="group", group="lab", priority=-3)
    assert (stated["visibility"], stated["group"], stated["priority"]) == ("group", "lab", -3)
    assert "plain" not in shared.names("bob")
    assert "stated" in shared.names("bob", visibility="group", group="lab")
    assert "stated" not in shared.names("bob", visibility="everyone")
    assert "stated" not in shared.names("bob", group="other")
    page = shared.ask("bob", "GET", "/?visibility=group").text
    assert "stated" in page
    assert "plain" not in page


@pytest.mark.parametrize(
    ("who", "query", "status", "said"),
    [
        ("cid", {"visibility": "group"}, 422, "'cid' is in no group: ask an administrator"),
        ("ann", {"group": "other"}, 422, "'ann' is in lab, and not in 'other': name the one"),
        ("ann", {"visibility": "secret"}, 422, "private"),
        ("ann", {"priority": 10_000}, 422, "1000"),
    ],
)
def test_wrong_sharing_is_refused(
    shared: Shared, who: str, query: dict[str, Any], status: int, said: str
) -> None:
    before = shared.names("root")
    assert said in str(shared.submit(who, "wrong", status, **query))
    assert shared.names("root") == before


def test_a_change_of_sharing_counts_at_once(shared: Shared) -> None:
    shared.submit("ann", "turned")
    path = "/v1/campaigns/turned"
    shared.ask("bob", "GET", path, 404)
    change = {"visibility": "group", "priority": 5}
    changed = shared.ask("ann", "PATCH", path, json=change).json()
    assert (changed["visibility"], changed["priority"]) == ("group", 5)
    shared.ask("bob", "GET", path)
    shared.ask("cid", "GET", path, 404)
    shared.ask("bob", "PATCH", path, 403, json={"visibility": "everyone"})
    shared.ask("ann", "PATCH", path, json={"visibility": "private"})
    shared.ask("bob", "GET", path, 404)
    (entry, *_) = shared.ask("root", "GET", "/v1/audit?action=campaign.update").json()["entries"]
    assert entry["details"] == {"visibility": {"from": "group", "to": "private"}}


def test_two_campaigns_of_a_name_are_not_both_for_all(shared: Shared) -> None:
    mine = shared.submit("ann", "twice")["id"]
    shared.submit("cid", "twice", visibility="everyone")
    refused = shared.ask(
        "ann", "PATCH", f"/v1/campaigns/{mine}", 409, json={"visibility": "everyone"}
    )
    assert "a campaign named 'twice' exists already" in refused.text
    assert shared.ask("ann", "GET", f"/v1/campaigns/{mine}").json()["visibility"] == "private"
    page = shared.ask("ann", "GET", "/?name_contains=twice").text
    links = re.findall(r'href="(/campaigns/[^"]+)"', page)
    theirs = {"/campaigns/twice", f"/campaigns/{mine + 1}"}
    assert set(links) == theirs
    for link in links:
        assert "twice" in shared.ask("ann", "GET", link).text


def test_a_clone_is_seen_by_those_of_its_original(shared: Shared) -> None:
    shared.submit("ann", "cloned", visibility="group")
    clone = shared.ask("bob", "POST", "/v1/campaigns/cloned/clone", 201).json()
    assert (clone["visibility"], clone["notes"]) == ("group", "clone of cloned")
    path = "/v1/campaigns/cloned/clone?visibility=everyone&priority=2"
    wider = shared.ask("bob", "POST", path, 201, json={"name": "wider"}).json()
    assert (wider["visibility"], wider["priority"], wider["notes"]) == ("everyone", 2, "")


def test_the_key_of_a_request_has_its_sharing(shared: Shared) -> None:
    key = {"Idempotency-Key": "once"}
    for visibility, status in (("group", 201), ("group", 201), ("everyone", 422)):
        answer = shared.http.post(
            f"/v1/campaigns?visibility={visibility}",
            json={**CAMPAIGN, "name": "keyed"},
            headers=bearer(shared.tokens["ann"]) | key,
        )
        answered(answer, status)
    answer = shared.http.post(
        "/v1/campaigns?visibility=everyone",
        json={**CAMPAIGN, "name": "keyed-too"},
        headers=bearer(shared.tokens["cid"]) | key,
    )
    answered(answer, 201)


def test_imported_tables_are_shared_likewise(shared: Shared) -> None:
    answer = shared.http.post(
        "/v1/campaigns/import?name=table&visibility=group",
        content=make_text(*varied_rows()),
        headers=bearer(shared.tokens["ann"]) | {"Content-Type": "text/csv"},
    )
    campaigns = answered(answer, 201).json()["campaigns"]
    assert {each["visibility"] for each in campaigns} == {"group"}
    name = campaigns[0]["name"]
    shared.ask("bob", "GET", f"/v1/campaigns/{name}/table")
    shared.ask("cid", "GET", f"/v1/campaigns/{name}/table", 404)


def test_pages_submit_and_change_who_sees(shared: Shared) -> None:
    page = shared.ask("ann", "GET", "/submit").text
    assert "<option>lab</option>" in page
    form = {"view": "yaml", "do": "submit", "visibility": "group", "group": "lab", "priority": "4"}
    form["yaml"] = json.dumps({**CAMPAIGN, "name": "typed"})
    answer = shared.ask("ann", "POST", "/submit", 303, data=form)
    assert answer.headers["location"] == "/campaigns/typed"
    page = shared.ask("bob", "GET", "/campaigns/typed").text
    assert "seen by group lab" in re.sub(r"\s+", " ", page)
    change = {"notes": "", "trials": "3", "visibility": "private", "group": "lab", "priority": "4"}
    shared.ask("ann", "POST", "/campaigns/typed/change", 303, data=change)
    shared.ask("bob", "GET", "/campaigns/typed", 404)
    read = shared.ask("ann", "GET", "/v1/campaigns/typed").json()
    assert (read["visibility"], read["priority"]) == ("private", 4)
    shared.ask("ann", "POST", "/campaigns/typed/clone", 303, data={"name": "typed-too"})
    assert shared.ask("ann", "GET", "/v1/campaigns/typed-too").json()["visibility"] == "private"


def test_the_other_view_of_a_form_keeps_who_sees(shared: Shared) -> None:
    form = {"view": "form", "do": "yaml", "name": "x", "visibility": "group", "priority": "7"}
    page = shared.ask("ann", "POST", "/submit", data=form).text
    assert "<option selected>group</option>" in page
    assert re.search(r'name="priority"[^>]*value="7"', page)
