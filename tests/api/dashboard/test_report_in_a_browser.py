from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.api.dashboard.browser import visiting
from tests.api.populated_service import Populated


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_readable_and_loads_nothing(
    browser: Browser, populated: Populated, scheme: str
) -> None:
    with visiting(
        browser,
        populated.url,
        populated.headers("viewer"),
        color_scheme=scheme,
        viewport={"width": 380, "height": 800},
    ) as visitor:
        asked: list[str] = []
        visitor.page.on("request", lambda request: asked.append(request.url))
        page = visitor.open("/v1/campaigns/first/report")
        expect(page.get_by_role("heading", name="Winner")).to_be_visible()
        expect(page.get_by_role("region", name="Nodes and devices")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 380
        assert len(asked) == 1
        found = Axe().run(page)
        assert not found.response["violations"], found.generate_report()
