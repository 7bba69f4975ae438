from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.api.dashboard.browser import visiting
from tests.api.populated_service import Populated


def test_the_first_page_lists_campaigns_with_their_state(
    browser: Browser, populated: Populated
) -> None:
    with visiting(browser, populated.url, populated.headers("viewer")) as visitor:
        page = visitor.open("/")
        expect(page.get_by_role("heading", name="Campaigns")).to_be_visible()
        row = page.get_by_role("row").filter(has_text="ended")
        expect(row).to_contain_text("CANCELLED")
