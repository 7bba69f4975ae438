"""A real browser for tests of the pages: Debian's Chromium, driven by playwright.

`Visitor` watches every page for what no page may do: errors in the console, violations of the
content security policy, and requests to another machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, StorageState, expect, sync_playwright

from tests.kit.api import answered, bearer

PATIENCE_MS: Final = 20_000
CHROMIUM: Final = shutil.which("chromium")


_NOTE_VIOLATIONS: Final = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""

_CONTRAST: Final = (
    "() => axe.run({ runOnly: ['color-contrast', 'link-in-text-block'] })"
    ".then((found) => found.violations.map((each) => `${each.id}: ${each.nodes[0].html}`))"
)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser without a window; the tests are skipped where Chromium is not installed."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed; `make browser-packages` installs it")
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(kw_only=True)
class Visitor:
    """A page of the browser, and what went wrong on it."""

    page: Page
    url: str
    """The service's address, without a path."""
    is_checked: bool = True
    """Whether the page can be asked for violations: not without scripts."""
    faults: list[str] = field(default_factory=list)
    """Errors in the console, of scripts, and requests to other hosts."""

    def open(self, path: str) -> Page:
        """Goes to a page of the service."""
        self.page.goto(f"{self.url}{path}")
        return self.page

    def check(self) -> None:
        """Fails if a page did what no page may do."""
        if self.is_checked:
            assert not self.page.evaluate("() => window.violations")
        assert not self.faults, self.faults


def session_of(url: str, token: str) -> StorageState:
    """The cookies of a browser that is signed in, for the option `storage_state` of `visiting`."""
    own = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        made = answered(http.post("/v1/sign-in-codes", headers=bearer(token)), 201)
        sent = {"code": made.json()["code"], "next": "/"}
        assert http.post("/sign-in", json=sent, headers=own).is_success
        cookies: list[Any] = [
            {"name": each.name, "value": each.value, "url": url} for each in http.cookies.jar
        ]
    return {"cookies": cookies}


def assert_accessible(page: Page) -> None:
    """Fails if axe-core finds a violation on the page."""
    found = Axe().run(page)
    assert not found.violations_count, found.generate_report()


def assert_contrast(page: Page) -> None:
    """Fails if colours are hard to tell apart on a page that axe-core has looked at before."""
    assert not page.evaluate(_CONTRAST)


def assert_fits(page: Page) -> None:
    """Fails if the page is wider than its window; wide tables scroll by themselves."""
    over = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert over <= 0, f"the page is {over} px wider than the window"
    hidden = page.evaluate(
        "() => innerWidth > 520 ? [] : [...document.querySelectorAll('.stacks')]"
        ".filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.ariaLabel)"
    )
    assert not hidden, f"tables of a small screen scroll sideways: {hidden}"


def look_at(page: Page, *, folded: str | None = None) -> None:
    """Fails if a page is not accessible in light and dark, or wider than one of three windows.

    Of the rules of accessibility, those of contrast alone depend on the colours of the scheme.
    `folded` are details that are looked at unfolded.
    """
    _unfold(page, folded, True)
    page.emulate_media(color_scheme="light")
    assert_accessible(page)
    page.emulate_media(color_scheme="dark")
    assert_contrast(page)
    _unfold(page, folded, False)
    for width in (380, 800, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert_fits(page)


def _unfold(page: Page, folded: str | None, is_open: bool) -> None:
    if folded is not None:
        page.locator(folded).evaluate_all(
            "(all, how) => all.forEach((e) => (e.open = how))", is_open
        )


@contextmanager
def visiting(
    browser: Browser, url: str, headers: dict[str, str] | None = None, **options: Any
) -> Iterator[Visitor]:
    """A new page of a browser without history, checked at the end.

    Args:
        browser: of `running_browser`.
        url: the service.
        headers: of every request, for example a token's.
        options: of the browser's context: `viewport`, `color_scheme`, `timezone_id`, ...
    """
    context = browser.new_context(extra_http_headers=headers or {}, **options)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(_NOTE_VIOLATIONS)
    page = context.new_page()
    visitor = Visitor(page=page, url=url)
    page.on("pageerror", lambda error: visitor.faults.append(f"error: {error}"))
    page.on(
        "console", lambda line: visitor.faults.append(line.text) if line.type == "error" else None
    )
    host = urlsplit(url).netloc

    def note_host(asked: str) -> None:
        parts = urlsplit(asked)
        if parts.scheme in ("http", "https") and parts.netloc != host:
            visitor.faults.append(f"request to {parts.netloc}")

    page.on("request", lambda request: note_host(request.url))
    try:
        yield visitor
        visitor.check()
    finally:
        context.close()
