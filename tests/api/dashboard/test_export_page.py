"""The preview of an export, and its downloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from zipfile import ZipFile

import httpx
import pytest
from markupsafe import escape
from playwright.sync_api import Browser, expect

from api.exporters import FORMATS
from search_spaces.spec.layout import Layout
from tests.api.dashboard.browser import look_at, visiting
from tests.kit.api import CAMPAIGN, HEADERS, INTRODUCTION
from tests.kit.live import live_service
from tests.kit.populated import Populated, settings_without_patience_or_limits
from tests.kit.store import TimelyStore, completed

INTERLEAVED = Layout(pp=2, dp=2, vpp=2, num_microbatches=4)


@pytest.fixture
def interleaved(sqlite_url: str) -> Iterator[str]:
    """The address of a service whose only trial is interleaved, on one node of four devices."""
    with (
        closing(TimelyStore(sqlite_url)) as store,
        live_service(settings_without_patience_or_limits(), store) as url,
        httpx.Client(base_url=url, headers=HEADERS, timeout=30) as http,
    ):
        space = {"global_batch_size": 8, "pp": 2, "dp": 2, "vpp": 2}
        campaign = http.post("/campaigns", json={**CAMPAIGN, "space": space}).json()["id"]
        about = {**INTRODUCTION, "cluster": "local-cpu", "devices_per_node": 4}
        worker = http.post("/workers", json=about).json()["worker_id"]
        trial = store.trials.add(campaign, INTERLEAVED).id
        http.post(f"/workers/{worker}/leases", json={"max_trials": 1, "wait_s": 0})
        outcome = dataclasses.asdict(completed(INTERLEAVED))
        body = {"worker_id": worker, "attempt": 1, "outcome": outcome}
        assert http.post(f"/trials/{trial}/outcome", json=body).json()["accepted"]
        yield url.removesuffix("/v1")


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
        look_at(page)


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


def test_a_knob_that_the_trainer_lacks_is_dropped_once_its_box_is_ticked(
    browser: Browser, interleaved: str
) -> None:
    with visiting(browser, interleaved, HEADERS) as visitor:
        page = visitor.open("/campaigns/first/export")
        box = page.get_by_label("without virtual stages, vpp")
        expect(page.get_by_role("region", name="job.json")).to_be_visible()
        expect(box).to_have_count(0)
        page.get_by_label("Format").select_option("megatron-deepspeed")
        expect(page.get_by_text("megatron-deepspeed lacks knobs of this layout")).to_be_visible()
        expect(box).not_to_be_checked()
        look_at(page)
        box.check()
        script = page.get_by_role("region", name="megatron-deepspeed.sh")
        expect(script).to_contain_text("# without vpp: DeepSpeed's pipeline")
        expect(box).to_be_checked()
        command = "--format megatron-deepspeed --trial 1 --without vpp --out job"
        expect(page.get_by_text(command)).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download megatron-deepspeed.sh").click()
        assert download.value.path().read_text() == script.text_content()


def test_a_layout_is_scaled_to_the_nodes_of_the_form(browser: Browser, interleaved: str) -> None:
    with visiting(browser, interleaved, HEADERS) as visitor:
        page = visitor.open("/campaigns/first/export?format=megatron-lm")
        nodes = page.get_by_label("Nodes")
        nodes.fill("2")
        page.get_by_role("button", name="Show").click()
        script = page.get_by_role("region", name="megatron-lm.sh")
        expect(script).to_contain_text("NUM_NODES=2")
        expect(page.get_by_text("--trial 1 --nodes 2 --out job")).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download megatron-lm.sh").click()
        assert "NUM_NODES=2" in download.value.path().read_text()
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy").last.click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied.startswith("layout-tuner export first")
        visitor.open("/campaigns/first/export?format=torchtitan-0.2&without=vpp")
        with page.expect_download() as download:
            page.get_by_role("link", name="Download all files as one archive").click()
        assert download.value.suggested_filename == "first-1-torchtitan-0.2.zip"
        with ZipFile(download.value.path()) as archive:
            for each in archive.namelist():
                shown = page.get_by_role("region", name=each).text_content()
                assert archive.read(each).decode() == shown
            assert len(archive.namelist()) > 1
        visitor.open("/campaigns/first/export?format=megatron-lm&nodes=2")
        nodes.fill("4")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("num_microbatches=1 is not divisible by pp=2")).to_be_visible()
        nodes.fill("many")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("'many' is not a number of nodes")).to_be_visible()


def test_the_page_lists_every_format_with_what_it_needs_and_refuses_other_files(
    shared: Populated,
) -> None:
    answer = httpx.get(
        f"{shared.url}/campaigns/first/export", headers=shared.headers("viewer"), timeout=30
    )
    for name, form in FORMATS.items():
        version, needs = map(escape, (form.adapter.target_version, form.adapter.needs))
        assert f"<li>{name} ({version}): needs {needs}</li>" in answer.text

    answer = httpx.get(
        f"{shared.url}/campaigns/first/export/passwd", headers=shared.headers("viewer")
    )
    assert answer.status_code == 409
    assert "job.json" in answer.text
