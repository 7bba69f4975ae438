"""The preview of an export, and its downloads."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.api.dashboard.browser import look_at, visiting
from tests.api.populated_service import Populated


@pytest.mark.parametrize("format_name", ["embedded", "megatron-lm"])
def test_preview_and_download_are_the_files_of_the_api(
    browser: Browser, shared: Populated, format_name: str
) -> None:
    viewer = shared.headers("viewer")
    bundle = httpx.get(
        f"{shared.url}/v1/campaigns/first/exports?format={format_name}", headers=viewer
    ).json()
    with visiting(browser, shared.url, viewer) as visitor:
        page = visitor.open("/campaigns/first/export")
        page.get_by_label("Format").select_option(format_name)
        (file,) = bundle["files"]
        shown = page.get_by_role("region", name=file["name"])
        expect(shown).to_be_visible()
        assert shown.text_content() == file["content"]
        for note in bundle["notes"]:
            expect(page.get_by_role("listitem").filter(has_text=note)).to_be_visible()
        command = f"layout-tuner export first --format {format_name} --trial 1 --out job"
        expect(page.get_by_text(command)).to_be_visible()
        page.get_by_role("button", name="Show").click()
        expect(page).to_have_url(f"{shared.url}/campaigns/first/export?format={format_name}")
        with page.expect_download() as download:
            page.get_by_role("link", name=f"Download {file['name']}").click()
        assert download.value.suggested_filename == file["name"]
        assert download.value.path().read_text() == file["content"]


def test_a_refusal_is_a_sentence(shared: Populated) -> None:
    def page(query: str) -> str:
        answer = httpx.get(
            f"{shared.url}/campaigns/{query}", headers=shared.headers("viewer"), timeout=30
        )
        assert answer.status_code == 200
        return answer.text

    assert "campaign &#39;ended&#39; has no ranked trial to export" in page("ended/export")
    assert "only COMPLETED trials are exported" in page("first/export?trial=2")
    assert "has no trial number 99" in page("first/export?trial=99")
    assert "is not the number of a trial" in page("first/export?trial=%3Cb%3E")
    assert "unknown export format &#39;&lt;b&gt;&#39;" in page("first/export?format=%3Cb%3E")
    assert "<h2>job.json</h2>" in page("first/export?trial=&format=trainer")


def test_a_file_that_is_not_in_the_export_is_refused(shared: Populated) -> None:
    answer = httpx.get(
        f"{shared.url}/campaigns/first/export/passwd", headers=shared.headers("viewer")
    )
    assert answer.status_code == 409
    assert "job.json" in answer.text


def test_the_preview_is_accessible_at_every_width(browser: Browser, shared: Populated) -> None:
    with visiting(browser, shared.url, shared.headers("viewer")) as visitor:
        look_at(visitor.open("/campaigns/first/export?format=megatron-lm"))
