"""Signing in and out, and the pages about the service: allocations, nodes, tokens, the audit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from layout_tuner.api.dashboard import access_pages
from tests.api.dashboard.browser import Visitor, look_at, session_of, visiting
from tests.kit.api import HEADERS, INTRODUCTION, TOKEN, answered, bearer
from tests.kit.fake_service import QuietHandler, serving
from tests.kit.persons import Signing, served
from tests.kit.populated import Populated, populated_service
from tests.kit.postgres import upgraded

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def visitor(browser: Browser, shared: Populated) -> Iterator[Visitor]:
    with visiting(browser, shared.url, shared.headers("admin")) as visitor:
        yield visitor


def test_a_worker_that_registers_appears_without_loading_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    with (
        served(tmp_path) as signing,
        visiting(browser, signing.url, storage_state=session_of(signing.url, TOKEN)) as visitor,
    ):
        page = visitor.open("/allocations")
        expect(page.get_by_text("No worker is registered now")).to_be_visible()
        expect(page.locator("#connection")).to_have_text("live")
        httpx.post(f"{signing.url}/v1/workers", json=INTRODUCTION, headers=HEADERS)
        expect(page.get_by_role("region", name="Allocations")).to_contain_text("on h")


def test_names_of_nodes_are_text_and_viewers_have_no_forms(shared: Populated) -> None:
    nodes = {"nodes": [{"name": "a/b<i>", "num_devices": 1}], "devices_per_node": 1}
    worker = {**INTRODUCTION, "name": MARKUP, "cluster": MARKUP, **nodes}
    answered(shared.ask("worker", "POST /v1/workers", json=worker), 201)
    page = shared.ask("admin", "GET /allocations")
    assert "<img" not in page.text
    assert "a/b&lt;i&gt;" in page.text
    node = {"cluster": MARKUP, "node": "a/b<i>"}
    for act, done in (("quarantine", "quarantined"), ("release", "released")):
        answer = answered(shared.ask("admin", f"POST /nodes/{act}", data=node), 303)
        assert answer.headers["location"] == f"/allocations?done={done}"
    page = shared.ask("viewer", "GET /allocations")
    assert (page.status_code, "<form" in page.text.partition("<main")[2]) == (200, False)


def test_a_token_is_shown_once_and_revoked(visitor: Visitor, shared: Populated) -> None:
    page = visitor.open("/tokens")
    page.get_by_label("Name of a person or worker").fill("visitor")
    page.get_by_label("Expires in").fill("2 weeks")
    page.get_by_role("button", name="Make the token").click()
    expect(page.get_by_role("alert")).to_contain_text("'2 weeks' is not a duration")
    page.get_by_label("Expires in").fill("14d")
    with page.expect_response("**/tokens") as answered:
        page.get_by_role("button", name="Make the token").click()
    assert answered.value.headers["cache-control"] == "no-store"
    token = page.get_by_role("region", name="The new token").inner_text()
    whoami = httpx.get(f"{shared.url}/v1/whoami", headers=bearer(token)).json()
    assert (whoami["name"], whoami["role"]) == ("visitor", "viewer")
    assert token not in page.url

    visitor.open("/tokens")
    assert token not in page.content()
    row = page.get_by_role("row").filter(has_text="visitor")
    expect(row).to_contain_text("valid")
    page.get_by_role("button", name="Revoke the token of visitor").click()
    page.get_by_role("dialog").get_by_role("button").nth(1).click()
    expect(page.get_by_text("The token is revoked")).to_be_visible()
    expect(row).to_have_count(0)
    assert httpx.get(f"{shared.url}/v1/whoami", headers=bearer(token)).status_code == 401
    page.get_by_role("link", name="with revoked ones").click()
    expect(row).to_contain_text("revoked")
    look_at(page)


def test_a_token_is_made_for_an_owner(visitor: Visitor, shared: Populated) -> None:
    page = visitor.open("/tokens")
    page.get_by_label("Name of a person or worker").fill("ann-laptop")
    page.get_by_label("Owner").fill("ann")
    page.get_by_role("button", name="Make the token").click()
    expect(page.get_by_role("region", name="The new token")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="ann-laptop")).to_contain_text("ann viewer")
    look_at(page)


def test_the_audit_is_filtered_and_has_pages(
    visitor: Visitor, shared: Populated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_pages, "AUDIT_PAGE", 3)
    for number in range(5):
        reason = {"reason": f"{number} {MARKUP}"}
        shared.ask("admin", "POST /v1/nodes/local-cpu/n0/quarantine", json=reason)
    page = visitor.open("/audit?action=node.quarantine&actor=a-admin")
    expect(page.get_by_role("row")).to_have_count(4)
    expect(page.get_by_role("row").nth(1)).to_contain_text(f"4 {MARKUP}")
    page.get_by_role("link", name="Older").click()
    expect(page.get_by_role("row").nth(1)).to_contain_text(f"1 {MARKUP}")
    assert "action=node.quarantine" in page.url
    page.get_by_label("Action").fill("campaign.cancel")
    page.get_by_label("By").fill("")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page.get_by_role("row").nth(1)).to_contain_text("campaign ended")
    page.get_by_label("From, UTC").fill("2100-01-01T00:00")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("No change passes these filters")).to_be_visible()
    for query in ("since=yesterday", "since=5", "until=0001-01-01T00:00", "actor=%00"):
        answered(shared.ask("admin", f"GET /audit?{query}"), 200, " is not ")
    look_at(visitor.open("/audit"))


def test_a_node_is_released_and_an_allocation_shows_what_runs_where_and_is_removed(
    browser: Browser, tmp_path: Path
) -> None:
    """On a service of its own, whose worker was heard of just now."""
    with (
        populated_service(upgraded(tmp_path).database_url) as populated,
        visiting(browser, populated.url, populated.headers("admin")) as visitor,
    ):
        page = visitor.open("/allocations")
        nodes = page.get_by_role("region", name="Nodes")
        row = nodes.get_by_role("row").filter(has_text="n0")
        expect(row).to_contain_text("in quarantine by a user: loud")
        page.get_by_role("button", name="Release n0").click()
        expect(page.get_by_text("The node was released")).to_be_visible()
        expect(row).to_contain_text("released")
        page.get_by_label("Reason to put n0 into quarantine").fill(f"smells {MARKUP}")
        page.get_by_role("button", name="Put n0 into quarantine").click()
        expect(row).to_contain_text(f"in quarantine by a user: smells {MARKUP}")
        assert page.locator("#content img").count() == 0
        look_at(page)

        allocations = page.get_by_role("region", name="Allocations")
        remove = page.get_by_role("button", name="Remove w", exact=True)
        expect(allocations.get_by_role("row").filter(has=remove)).to_contain_text("working")
        expect(page.get_by_role("link", name="first, trial 4")).to_be_visible()
        expect(page.get_by_text("1 trial of local-cpu not leased yet")).to_be_visible()
        remove.click()
        expect(page.get_by_role("dialog")).to_contain_text("Remove the allocation of w")
        page.get_by_role("dialog").get_by_role("button").nth(1).click()
        expect(page.get_by_text("The allocation was removed")).to_be_visible()
        command = f"layout-tuner worker --url {populated.url} --token-file worker.token"
        expect(page.get_by_text(command)).to_be_visible()
        page.get_by_role("link", name="with those that have ended").click()
        expect(allocations).to_contain_text("ended")


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    with served(tmp_path_factory.mktemp("sign-in-page"), wrong_codes=1000) as signing:
        yield signing


def expect_signed_in(page: Page, signing: Signing, path: str = "/") -> None:
    expect(page.get_by_role("heading", name="Campaigns")).to_be_visible()
    expect(page).to_have_url(f"{signing.url}{path}")
    expect(page.get_by_text("local admin")).to_be_visible()


def test_the_address_of_a_code_signs_in_and_is_not_in_the_history(
    browser: Browser, signing: Signing
) -> None:
    with visiting(browser, signing.url) as visitor:
        page = visitor.open("/?state=RUNNING")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        address = f"/sign-in#code={signing.code()}"
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        visitor.open(address)
        expect_signed_in(page, signing)
        # The stream of events runs with the cookie.
        expect(page.locator("#connection")).to_have_text("live")
        page.go_back()
        expect(page).to_have_url(f"{signing.url}/?state=RUNNING")
        assert all("code" not in url.partition("#")[0] for url in asked)
        visitor.open("/")
        assert "code" not in page.evaluate("() => document.referrer")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        visitor.open("/")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        page.go_back()
        page.go_back()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        # Chromium reports the refused second use of a code as a fault of the page.
        assert not visitor.faults
        visitor.open(address)
        expect(page.get_by_text("was used before")).to_be_visible()
        (fault,) = visitor.faults
        assert "401" in fault
        visitor.faults.clear()


def test_a_token_signs_in_without_scripts(browser: Browser, signing: Signing) -> None:
    record, token = signing.store.access.create_token("ana", "viewer")
    with visiting(browser, signing.url, java_script_enabled=False) as visitor:
        visitor.is_checked = False  # there is no script to ask about violations
        page = visitor.open("/?state=RUNNING")
        field = page.get_by_label("One-time code or token")
        field.fill("lt_wrong")
        field.press("Enter")
        expect(page.get_by_text("does not sign in")).to_be_visible()
        visitor.faults.clear()  # the browser reports the status 401
        field.fill(token)
        field.press("Enter")
        expect(page).to_have_url(f"{signing.url}/?state=RUNNING")
        expect(page.get_by_text("ana viewer")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    signing.store.access.revoke_token(record.id)


def test_a_link_in_a_web_mail_works(browser: Browser, signing: Signing) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            for name, path in (("a page", "?state=RUNNING"), ("a code", f"sign-in#code={code}")):
                self.wfile.write(f'<p><a href="{signing.url}/{path}">{name}</a>'.encode())

    code = signing.code()
    context = browser.new_context()
    page = context.new_page()
    with serving(Handler) as address:
        mail = f"{address.replace('127.0.0.1', 'localhost')}/"  # which is another site
        page.goto(mail)
        page.get_by_role("link", name="a page").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        page.go_back()
        expect(page).to_have_url(mail)
        # Somebody else's code must not sign in by a click on a link alone.
        page.get_by_role("link", name="a code").click()
        button = page.get_by_role("button", name="Sign in with the code of this address")
        expect(button).to_be_visible()
        assert context.cookies() == []
        button.click()
        expect_signed_in(page, signing)
        (cookie,) = context.cookies()
        assert (cookie["sameSite"], cookie["httpOnly"]) == ("Strict", True)
        page.goto(mail)
        page.get_by_role("link", name="a page").click()
        expect_signed_in(page, signing, "/?state=RUNNING")
        page.reload()
        expect_signed_in(page, signing, "/?state=RUNNING")
    context.close()


def test_a_person_allows_a_command_line_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    host = {"host": "login1.example.org"}
    with served(tmp_path) as signing, visiting(browser, signing.url) as visitor:
        made = httpx.post(f"{signing.url}/v1/device-codes", json=host).json()
        page = visitor.open(f"/device?code={made['code']}")
        page.get_by_label("One-time code or token").fill(TOKEN)
        page.get_by_role("button", name="Sign in", exact=True).click()
        expect(page.get_by_text(made["code"])).to_be_visible()
        expect(page.locator("main")).to_contain_text("login1.example.org, 127.0.0.1 wants to act")
        look_at(page)
        page.get_by_role("button", name="Allow").click()
        expect(page.get_by_text("the command goes on by itself")).to_be_visible()
        secret = {"secret": made["secret"]}
        answered(httpx.post(f"{signing.url}/v1/device-tokens", json=secret), 201, '"admin"')
        page.get_by_label("Code that the command shows").fill("bcdf ghjk")
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_role("alert")).to_contain_text("no command waits with this code")
        look_at(page)
