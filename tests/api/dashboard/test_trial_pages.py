"""The pages of a trial, of a comparison and of an export, and the report, in a browser."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from zipfile import ZipFile

import pytest
from markupsafe import escape
from playwright.sync_api import Browser, expect

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.exports.export import FORMATS
from tests.api.dashboard.browser import Visitor, assert_accessible, assert_fits, look_at
from tests.api.dashboard.explored import LAYOUTS, Explored
from tests.kit.api import answered
from tests.kit.store import completed, failed

MARKUP = "<img src=x onerror=alert(1)>"


def trial(explored: Explored, number: int, campaign: str = "first") -> int:
    return explored.store.trials.by_number(explored.store.campaigns.by_name(campaign).id, number).id


def test_a_measured_trial_is_drawn_and_markup_of_a_failed_one_is_text(
    browser: Browser, explored: Explored
) -> None:
    with explored.visitor(browser, "viewer") as visitor:
        page = visitor.open(f"/trials/{trial(explored, 4)}")
        expect(page.get_by_role("heading", name="Trial 4 COMPLETED")).to_be_visible()
        expect(page.locator("#trial-state")).to_contain_text(
            re.compile("runs at 2,800 tokens/s, .* Rank 4 of the leaderboard")
        )
        for label in ("Nodes and devices", "Pipeline schedule", "Memory by stage", "Step times"):
            expect(page.get_by_role("region", name=label).locator("svg")).to_be_visible()
        expect(page.locator(".keys")).to_contain_text("tensor parallel 20.0%")
        page.get_by_text("12 iterations as a table").click()
        expect(page.get_by_role("region", name="Iterations")).to_contain_text("warm-up")
        expect(page.get_by_role("region", name="Attempts")).to_contain_text("reported")
        expect(page.get_by_role("region", name="Log")).to_contain_text("the last line")
        expect(page.get_by_text("gloo")).to_be_visible()
        command = page.get_by_role("region", name="Command")
        expect(command).to_contain_text("layout-tuner probe --model tiny --pp 2 --num-microbatches")
        expect(page.get_by_role("button", name="Measure again")).to_have_count(0)  # a viewer's
        look_at(page)
        page.get_by_role("link", name="Rank 5").click()
        expect(page.locator("#trial-state")).to_contain_text("Rank 5 of the leaderboard")
        page.get_by_role("link", name=re.compile("^Rank 4")).click()
        page.get_by_role("link", name="Compare with rank 3").click()
        expect(page.get_by_role("heading", name="Compare trials")).to_be_visible()

        campaign = explored.submit("hostile")
        log = f"\x1b[31m{MARKUP}\x1b[0m\x07"
        outcome = failed(node=MARKUP, message=MARKUP, log_tail=log)
        visitor.open(f"/trials/{explored.run(campaign, LAYOUTS[0], outcome)}")
        expect(page.get_by_role("region", name="Log")).to_have_text(f"{MARKUP}\\u0007")
        expect(page.get_by_text(f"first on the node {MARKUP}.")).to_be_visible()
        expect(page.locator("main img")).to_have_count(0)
    explored.post("/campaigns/hostile/cancel")


def test_trials_are_tried_again_measured_again_and_cancelled(
    visitor: Visitor, explored: Explored
) -> None:
    campaign = explored.submit("buttons")
    lost = explored.run(campaign, LAYOUTS[1], failed())
    page = visitor.open(f"/trials/{lost}")
    expect(page.get_by_role("heading", name="Trial 1 FAILED (crashed)")).to_be_visible()
    expect(page.locator("#trial-state")).to_contain_text("Rank 1 of 2: crashed.")
    expect(page.get_by_text("The problem occurred first on the node node-1.")).to_be_visible()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("The layout is tried again, as a new trial.")).to_be_visible()
    expect(page.get_by_role("heading", name="Trial 2 PENDING")).to_be_visible()
    page.get_by_role("button", name="Cancel the trial").click()
    page.get_by_role("dialog").get_by_role("button").last.click()
    expect(page.get_by_role("heading", name=re.compile("CANCELLED"))).to_be_visible()
    expect(page.get_by_text("The trial is cancelled.")).to_be_visible()
    page.get_by_role("link", name="The trial that it repeats").click()
    expect(page.get_by_role("heading", name="Trial 1 FAILED (crashed)")).to_be_visible()
    page.goto(f"{explored.url}/trials/{explored.run(campaign, LAYOUTS[0], completed(LAYOUTS[0]))}")
    page.get_by_role("button", name="Measure again").click()
    expect(page.get_by_text("the leaderboard pools the runs")).to_be_visible()
    explored.post("/campaigns/buttons/cancel")


def test_buttons_are_shown_to_those_who_may_use_them(explored: Explored) -> None:
    campaign = explored.submit("somebodys", explored.token("submitter"))
    lost = explored.run(campaign, LAYOUTS[0], failed())
    measured = explored.measure(campaign, 1)
    for token, may in (
        (explored.token("submitter"), True),
        (explored.token("submitter", "another"), False),
        (explored.token("viewer"), False),
        (explored.admin_token, True),
    ):
        assert ("Try again" in explored.read(f"/trials/{lost}", token).text) == may
        campaign_page = explored.read("/campaigns/somebodys", token).text
        for action in ("pause", "cancel"):
            assert (f'action="/campaigns/somebodys/{action}"' in campaign_page) == may
        assert ('id="more"' in campaign_page) == (token != explored.token("viewer"))
        listed = explored.read("/campaigns/somebodys/trials", token).text
        assert (f'action="/trials/{measured}/repeat"' in listed) == may
    explored.post("/campaigns/somebodys/cancel")
    assert "Try again" not in explored.read(f"/trials/{lost}", explored.admin_token).text


def test_a_running_trial_updates_and_fits_a_phone(browser: Browser, explored: Explored) -> None:
    campaign = explored.submit("running")
    layout = Layout(pp=2, num_microbatches=8)
    running = explored.run(campaign, layout, None)
    beat = {"trial_id": running, "attempt": 1, "iterations_done": 3, "phase": "iterating"}
    explored.post(f"/workers/{explored.worker}/heartbeats", {"trials": [beat]})
    phone = {"width": 380, "height": 800}
    with explored.visitor(browser, viewport=phone) as visitor:
        page = visitor.open(f"/trials/{running}")
        expect(page.locator("#trial-state")).to_contain_text(
            "Attempt 1 is iterating on w: 3 iterations are done, of about 12."
        )
        expect(page.locator("#connection")).to_have_text("live")
        body = {
            "worker_id": explored.worker,
            "attempt": 1,
            "outcome": dataclasses.asdict(completed(layout)),
        }
        explored.post(f"/trials/{running}/outcome", body)
        expect(page.get_by_role("heading", name="Trial 1 COMPLETED")).to_be_visible()
        expect(page.get_by_role("heading", name="Where the step goes")).to_be_visible()
        assert_fits(page)
        assert_accessible(page)
    explored.post("/campaigns/running/cancel")


def test_trials_stand_side_by_side_with_what_differs(browser: Browser, explored: Explored) -> None:
    phone = {"width": 380, "height": 800}
    with explored.visitor(browser, "viewer", viewport=phone) as visitor:
        page = visitor.open("/compare?trials=first/1+2")
        page.get_by_label("Trials, as campaign/number").fill("first/1 4, first/5")
        page.get_by_role("button", name="Compare").click()
        expect(
            page.get_by_text("Trial 4 of first reaches 0.933 times the tokens/s of")
        ).to_be_visible()
        expect(page.get_by_text("Trial 5 of first cannot be compared with")).to_be_visible()
        knobs = page.get_by_role("region", name="Knob")
        row = knobs.locator("tbody tr").filter(has_text="pipeline parallel, pp")
        expect(row.locator("td")).to_have_text(["differs", "1", "2", "2"])
        row = knobs.locator("tbody tr").filter(has_text="global batch")
        expect(row.locator("td")).to_have_text(["", "8", "8", "8"])
        figures = page.get_by_role("region", name="Figure")
        row = figures.locator("tbody tr").filter(has_text="state")
        expect(row).to_contain_text("FAILED (crashed)")
        row = figures.locator("tbody tr").filter(has_text="step time")
        expect(row.locator("td").first).to_have_text("differs")  # the third has none
        assert figures.evaluate("(e) => e.scrollWidth - e.clientWidth") == 0  # blocks of lines
        bars = page.locator(".stacked")
        expect(bars).to_have_count(2)  # the third was not measured
        first, second = (
            sum(float(part.get_attribute("width") or 0) for part in bar.locator("rect").all())
            for bar in bars.all()
        )
        assert first / second == pytest.approx(2800 / 3000, rel=1e-3)  # one scale for both
        expect(page.get_by_role("region", name="Memory by stage of trial 4")).to_be_visible()
        look_at(page)


def test_two_layouts_of_a_campaign_are_compared_by_prediction_part_by_part(
    browser: Browser, explored: Explored
) -> None:
    with explored.visitor(browser, "viewer") as visitor:
        page = visitor.open("/compare?trials=first/1+4")
        expect(page.get_by_role("heading", name="Why, by prediction")).to_be_visible()
        trials = explored.store.trials
        one, two = (trials.get(trial(explored, at)).layout.key for at in (1, 4))
        expect(page.get_by_text(f"A is {one}, B is {two}")).to_be_visible()
        expect(page.get_by_text("The ratio is uncertain because of")).to_be_visible()
        step = page.get_by_role("region", name="seconds of a step")
        expect(step.locator("tbody tr").last).to_contain_text("step")
        memory = page.get_by_role("region", name="GiB of the fullest device")
        expect(memory.locator("tbody tr").first).to_contain_text("weights")
        look_at(page)
        page = visitor.open("/compare?trials=first/1+2+4")
        expect(page.get_by_role("heading", name="Why, by prediction")).to_have_count(0)


def test_too_few_too_many_and_unknown_trials_are_refused(explored: Explored) -> None:
    seven = "&".join(f"trial={number}" for number in range(1, 8))
    for path, status, says in (
        ("/compare?", 422, "0 trials cannot be compared: tick 2 to 6 trials in the list"),
        ("/compare?trial=1", 422, "1 trial cannot be compared"),
        (f"/compare?{seven}", 422, "7 trials cannot be compared"),
        ("/compare?trials=first/1+4", 200, "-6.7%"),
        ("/compare?trials=3", 422, "names no trial: write the campaign and the number"),
        ("/compare?trials=none/1", 404, "none"),
        ("/compare?trial=1&trial=999999", 404, "999999"),
        ("/compare?trials=x", 422, ""),
        ("/trials/999999", 404, ""),
        (f"/trials/{trial(explored, 1)}?done=Pwned", 200, "Trial 1"),
    ):
        answer = explored.read(path, explored.admin_token)
        assert (answer.status_code, says in answer.text) == (status, True), path
        assert "Pwned" not in answer.text


def test_the_report_is_readable_and_loads_nothing(browser: Browser, explored: Explored) -> None:
    phone = {"width": 380, "height": 800}
    with explored.visitor(browser, "viewer", viewport=phone) as visitor:
        asked: list[str] = []
        visitor.page.on("request", lambda request: asked.append(request.url))
        page = visitor.open("/v1/campaigns/both/report")
        expect(page.get_by_role("heading", name="Winner", exact=True)).to_be_visible()
        expect(page.get_by_role("region", name="Nodes and devices")).to_be_visible()
        assert len(asked) == 1
        look_at(page)


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
