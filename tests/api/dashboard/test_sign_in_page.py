"""Signing in and out in a real browser."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.dashboard.browser import visiting
from tests.kit.persons import Signing, served


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


@contextmanager
def another_site(folder: Path, links: dict[str, str]) -> Iterator[str]:
    """The URL of a page of another site, with links; localhost is another site than 127.0.0.1."""
    items = "".join(f'<p><a href="{url}">{name}</a>' for name, url in links.items())
    (folder / "index.html").write_text(f"<!doctype html><title>mail</title>{items}")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Prints nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_a_link_in_a_web_mail_works(browser: Browser, signing: Signing, tmp_path: Path) -> None:
    links = {
        "a page": f"{signing.url}/?state=RUNNING",
        "a code": f"{signing.url}/sign-in#code={signing.code()}",
    }
    context = browser.new_context()
    page = context.new_page()
    with another_site(tmp_path, links) as mail:
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
