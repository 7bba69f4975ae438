from __future__ import annotations

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.api.dashboard.browser import visiting
from tests.api.populated_service import Populated


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_trials_stand_side_by_side_with_what_differs(
    browser: Browser, populated: Populated, scheme: str
) -> None:
    one, other, *_rest = populated.names["trial_id"]
    with visiting(
        browser,
        populated.url,
        populated.headers("viewer"),
        color_scheme=scheme,
        viewport={"width": 380, "height": 800},
    ) as visitor:
        page = visitor.open("/compare")
        page.get_by_label("Trial ids").fill(f"{one} {other}")
        page.get_by_role("button", name="Compare").click()
        knobs = page.get_by_role("region", name="Knob")
        row = knobs.get_by_role("row").filter(has_text="pipeline parallel, pp")
        expect(row.get_by_role("cell")).to_have_text(["yes", "1", "2"])
        row = knobs.get_by_role("row").filter(has_text="tensor parallel, tp")
        expect(row.get_by_role("cell")).to_have_text(["", "1", "1"])
        figures = page.get_by_role("region", name="Figure")
        row = figures.get_by_role("row").filter(has_text="state")
        expect(row).to_contain_text("FAILED (crashed)")
        expect(page.locator(".stacked")).to_have_count(1)  # the other was not measured
        expect(page.get_by_role("region", name="Memory by stage of trial 2")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 380
        found = Axe().run(page)
        assert not found.response["violations"], found.generate_report()


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("", 200, "Compare trials"),
        ("trial=1", 422, "1 trial was named; a comparison has 2 to 6."),
        ("&".join(f"trial={number}" for number in range(1, 8)), 422, "7 trials were named"),
        ("trial=1&trial=999999", 404, "999999"),
        ("trials=x", 422, ""),
    ],
)
def test_too_few_too_many_and_unknown_trials_are_refused(
    populated: Populated, query: str, status: int, says: str
) -> None:
    answer = httpx.get(
        f"{populated.url}/compare?{query}", headers=populated.headers("viewer"), timeout=30
    )
    assert answer.status_code == status
    assert says in answer.text
