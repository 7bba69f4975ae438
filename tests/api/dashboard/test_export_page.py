"""The preview of an export, and its downloads."""

from __future__ import annotations

from collections.abc import Iterator
from zipfile import ZipFile

import pytest
from markupsafe import escape
from playwright.sync_api import Browser, expect

from api.exporters import FORMATS
from search_spaces.spec.layout import Layout
from tests.api.dashboard.browser import Visitor, look_at
from tests.api.dashboard.explored import Explored
from tests.kit.api import answered
from tests.kit.store import completed

INTERLEAVED = Layout(pp=2, dp=2, vpp=2, num_microbatches=4)


def test_preview_and_download_are_the_files_of_the_api(
    browser: Browser, explored: Explored
) -> None:
    with explored.visitor(browser, "viewer") as visitor:
        page = visitor.open("/campaigns/first/export")
        for format_name in ("embedded", "megatron-lm"):
            where = f"/v1/campaigns/first/exports?format={format_name}"
            bundle = explored.read(where, explored.token("viewer")).json()
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
            expect(page).to_have_url(f"{explored.url}/campaigns/first/export?format={format_name}")
            with page.expect_download() as download:
                page.get_by_role("link", name=f"Download {file['name']}").click()
            assert download.value.suggested_filename == file["name"]
            assert download.value.path().read_text() == file["content"]
        look_at(page)


def test_a_refusal_is_a_sentence_and_every_format_is_listed_with_what_it_needs(
    explored: Explored,
) -> None:
    explored.submit("not-measured")
    for path, says in (
        ("not-measured/export", "campaign &#39;not-measured&#39; has no ranked trial to export"),
        ("first/export?trial=5", "only COMPLETED trials are exported"),
        ("first/export?trial=99", "has no trial number 99"),
        ("first/export?trial=%3Cb%3E", "is not the number of a trial"),
        ("first/export?format=%3Cb%3E", "unknown export format &#39;&lt;b&gt;&#39;"),
        ("first/export?trial=&format=trainer", "<h2>job.json</h2>"),
    ):
        answer = answered(explored.read(f"/campaigns/{path}", explored.token("viewer")), 200, says)
    for name, form in FORMATS.items():
        version, needs = map(escape, (form.adapter.target_version, form.adapter.needs))
        assert f"<li>{name} ({version}): needs {needs}</li>" in answer.text
    passwd = explored.read("/campaigns/first/export/passwd", explored.token("viewer"))
    answered(passwd, 409, "job.json")
    explored.post("/campaigns/not-measured/cancel")


@pytest.fixture
def interleaved(explored: Explored) -> Iterator[None]:
    """A campaign whose only trial is interleaved, on one node of four devices."""
    space = {"global_batch_size": 8, "pp": 2, "dp": 2, "vpp": 2}
    campaign = explored.submit("interleaved", space=space)
    explored.run(campaign, INTERLEAVED, completed(INTERLEAVED))
    yield
    explored.store.campaigns.cancel(campaign)
    explored.store.campaigns.delete(campaign)


@pytest.mark.usefixtures("interleaved")
def test_a_knob_that_the_trainer_lacks_is_dropped_once_its_box_is_ticked(visitor: Visitor) -> None:
    page = visitor.open("/campaigns/interleaved/export")
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


@pytest.mark.usefixtures("interleaved")
def test_a_layout_is_scaled_to_the_nodes_of_the_form(visitor: Visitor) -> None:
    page = visitor.open("/campaigns/interleaved/export?format=megatron-lm")
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
    assert copied.startswith("layout-tuner export interleaved")
    visitor.open("/campaigns/interleaved/export?format=megatron-bridge")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download all files as one archive").click()
    assert download.value.suggested_filename == "interleaved-1-megatron-bridge.zip"
    with ZipFile(download.value.path()) as archive:
        for each in archive.namelist():
            shown = page.get_by_role("region", name=each).text_content()
            assert archive.read(each).decode() == shown
        assert archive.namelist() == ["megatron-bridge.sh", "megatron-bridge.yaml"]
        assert archive.getinfo("megatron-bridge.sh").external_attr >> 16 == 0o755
    visitor.open("/campaigns/interleaved/export?format=megatron-lm&nodes=2")
    nodes.fill("4")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("num_microbatches=1 is not divisible by pp=2")).to_be_visible()
    nodes.fill("many")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("'many' is not a number of nodes")).to_be_visible()
