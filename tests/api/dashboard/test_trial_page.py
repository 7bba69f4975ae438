from __future__ import annotations

import dataclasses
import re
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from search_spaces.spec.layout import Layout
from tests.api.dashboard.browser import visiting
from tests.api.local_api import CAMPAIGN, INTRODUCTION
from tests.api.populated_service import Populated
from tests.results_db.factories import completed, failed

MARKUP = "<img src=x onerror=alert(1)>"


def post(populated: Populated, path: str, body: Any = None, role: str = "admin") -> Any:
    answer = httpx.post(
        f"{populated.url}/v1{path}", json=body, headers=populated.headers(role), timeout=30
    )
    assert answer.is_success, answer.text
    return answer.json()


def refuse_faults(page: Page) -> None:
    found = Axe().run(page)
    assert not found.response["violations"], found.generate_report()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_measured_trial_is_drawn_with_its_figures(
    browser: Browser, populated: Populated, scheme: str
) -> None:
    trial = populated.names["trial_id"][0]
    headers = populated.headers("viewer")
    with visiting(browser, populated.url, headers, color_scheme=scheme) as visitor:
        page = visitor.open(f"/trials/{trial}")
        expect(page.get_by_role("heading", name="Trial 1 COMPLETED")).to_be_visible()
        expect(page.locator("#trial-state")).to_contain_text("Rank 1 of the leaderboard")
        for label in ("Nodes and devices", "Pipeline schedule", "Memory by stage", "Step times"):
            expect(page.get_by_role("region", name=label).locator("svg")).to_be_visible()
        expect(page.locator(".keys")).to_contain_text("tensor parallel 20.0%")
        page.get_by_text("5 iterations as a table").click()
        expect(page.get_by_role("region", name="Iterations")).to_contain_text("warm-up")
        expect(page.get_by_role("region", name="Attempts")).to_contain_text("reported")
        expect(page.get_by_role("region", name="Log")).to_contain_text("the last line")
        expect(page.get_by_text("gloo")).to_be_visible()
        command = page.get_by_role("region", name="Command")
        expect(command).to_contain_text("layout-tuner probe --model tiny --num-microbatches")
        expect(page.get_by_role("button", name="Measure again")).to_have_count(0)  # a viewer's
        refuse_faults(page)


def test_a_failed_trial_says_why_and_is_tried_again(browser: Browser, populated: Populated) -> None:
    trials = populated.names["trial_id"]
    with visiting(browser, populated.url, populated.headers("admin")) as visitor:
        page = visitor.open(f"/trials/{trials[1]}")
        expect(page.get_by_role("heading", name="Trial 2 FAILED (crashed)")).to_be_visible()
        expect(page.locator("#trial-state")).to_contain_text("Rank 1 of 2: crashed.")
        expect(page.get_by_text("The problem occurred first on the node node-1.")).to_be_visible()
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_text("It tries the layout again.")).to_be_visible()
        expect(page.get_by_role("heading", name=re.compile("^Trial 6 PENDING"))).to_be_visible()
        page.get_by_role("link", name="The trial that it repeats").click()
        expect(page.get_by_role("heading", name="Trial 2 FAILED (crashed)")).to_be_visible()


def test_a_completed_trial_is_measured_again_and_a_waiting_one_cancelled(
    browser: Browser, populated: Populated
) -> None:
    with visiting(browser, populated.url, populated.headers("admin")) as visitor:
        page = visitor.open(f"/trials/{populated.names['trial_id'][0]}")
        page.get_by_role("button", name="Measure again").click()
        expect(page.get_by_text("the leaderboard pools the runs")).to_be_visible()
        page.get_by_role("button", name="Cancel the trial").click()
        page.get_by_role("button", name="Yes").click()
        expect(page.get_by_role("heading", name=re.compile("CANCELLED"))).to_be_visible()
        expect(page.get_by_text("The trial is cancelled.")).to_be_visible()


def test_only_those_who_may_change_a_trial_can(populated: Populated) -> None:
    trial = populated.names["trial_id"][1]
    for role, status in (("viewer", 403), ("submitter", 403), ("admin", 303)):
        headers = populated.headers(role)
        page = httpx.get(f"{populated.url}/trials/{trial}", headers=headers, timeout=30)
        assert ("Try again" in page.text) == (role == "admin")
        answer = httpx.post(f"{populated.url}/trials/{trial}/requeue", headers=headers, timeout=30)
        assert answer.status_code == status


def test_words_of_the_url_are_never_shown(populated: Populated) -> None:
    page = httpx.get(
        f"{populated.url}/trials/{populated.names['trial_id'][0]}?done=Pwned",
        headers=populated.headers("viewer"),
        timeout=30,
    )
    assert page.status_code == 200
    assert "Pwned" not in page.text


def test_markup_in_nodes_and_logs_is_text(browser: Browser, populated: Populated) -> None:
    campaign = post(populated, "/campaigns", {**CAMPAIGN, "name": "hostile"})
    worker = post(
        populated,
        "/workers",
        {
            **INTRODUCTION,
            "name": MARKUP,
            "host": MARKUP,
            "cluster": "local-cpu",
            "num_nodes": 1,
            "devices_per_node": 4,
            "nodes": [{"name": "n1", "num_devices": 4}],
        },
        role="worker",
    )["worker_id"]
    outcome = dataclasses.replace(
        failed(), node=MARKUP, message=MARKUP, log_tail=f"\x1b[31m{MARKUP}\x1b[0m\x07"
    )
    trial = leased_trial(populated, worker, campaign["id"])
    body = {"worker_id": worker, "attempt": 1, "outcome": dataclasses.asdict(outcome)}
    post(populated, f"/trials/{trial}/outcome", body, role="worker")
    with visiting(browser, populated.url, populated.headers("viewer")) as visitor:
        page = visitor.open(f"/trials/{trial}")
        expect(page.get_by_role("region", name="Log")).to_have_text(f"{MARKUP}\\u0007")
        expect(page.get_by_role("region", name="Attempts")).to_contain_text(MARKUP)
        expect(page.locator("img")).to_have_count(0)


def leased_trial(populated: Populated, worker: str, campaign: int) -> int:
    """The first trial of the campaign that the worker gets."""
    with httpx.Client(
        base_url=f"{populated.url}/v1", headers=populated.headers("admin"), timeout=30
    ) as http:
        for trial in http.get("/campaigns/first/trials").json()["trials"]:
            if trial["state"] == "PENDING":
                http.post(f"/trials/{trial['id']}/cancel")
    populated.store.add_trial(campaign, Layout(pp=2, num_microbatches=8))
    lease = post(
        populated, f"/workers/{worker}/leases", {"max_trials": 1, "wait_s": 0}, role="worker"
    )["leases"][0]
    return int(lease["trial_id"])


def test_a_running_trial_updates_and_fits_a_phone(browser: Browser, populated: Populated) -> None:
    campaign = post(populated, "/campaigns", {**CAMPAIGN, "name": "live"})
    worker = populated.names["worker_id"][0]
    trial = leased_trial(populated, worker, campaign["id"])
    layout = Layout(pp=2, num_microbatches=8)
    phone = {"width": 380, "height": 800}
    with visiting(browser, populated.url, populated.headers("viewer"), viewport=phone) as visitor:
        page = visitor.open(f"/trials/{trial}")
        expect(page.get_by_role("heading", name=re.compile("RUNNING"))).to_be_visible()
        expect(page.locator("#trial-state")).to_contain_text("0 iterations are done, of about 12")
        body = {
            "worker_id": worker,
            "attempt": 1,
            "outcome": dataclasses.asdict(completed(layout)),
        }
        post(populated, f"/trials/{trial}/outcome", body, role="worker")
        # As an event does; workers of the browser do not send this test's Authorization header.
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_role("heading", name=re.compile("COMPLETED"))).to_be_visible()
        expect(page.get_by_role("heading", name="Where the step goes")).to_be_visible()
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= phone["width"]
        refuse_faults(page)
