"""A real browser for tests of the pages: Debian's Chromium, driven by playwright.

`Visitor` watches every page for what no page may do: errors in the console, violations of the
content security policy, and requests to another machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

PATIENCE_MS: Final = 20_000
CHROMIUM: Final = shutil.which("chromium")

_NOTE_VIOLATIONS: Final = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser without a window; the tests are skipped where Chromium is not installed."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed; `make browser-packages` installs it")
    with sync_playwright() as playwright:
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
    faults: list[str] = field(default_factory=list)
    """Errors in the console, of scripts, and requests to other hosts."""

    def open(self, path: str) -> Page:
        """Goes to a page of the service."""
        self.page.goto(f"{self.url}{path}")
        return self.page

    def check(self) -> None:
        """Fails if a page did what no page may do."""
        violations = self.page.evaluate("() => window.violations")
        assert not violations
        assert not self.faults


def accessibility_problems(page: Page) -> list[str]:
    """What axe-core finds wrong with a page: the rule and the elements of each violation."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {', '.join(str(node['target']) for node in each['nodes'])}"
        for each in found
    ]


def look_at(page: Page) -> None:
    """Fails if a page is not accessible in light and dark, or is wider than a usual window."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=cast("Literal['light', 'dark']", scheme))
        assert accessibility_problems(page) == []
    for width in (380, 800, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow_px(page) == 0


def overflow_px(page: Page) -> int:
    """By how many pixels a page is wider than its window; 0: it is not."""
    wider: int = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    return max(wider, 0)


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
        "console",
        lambda line: visitor.faults.append(line.text) if line.type == "error" else None,
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
