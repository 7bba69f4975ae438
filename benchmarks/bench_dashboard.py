"""Pages of the dashboard in Debian's Chromium, from `layout-tuner serve` with SQLite on loopback.

Run as `make bench-dashboard`, or `python -m benchmarks.bench_dashboard --record`, on a machine with
nothing else on it. `--only` chooses parts, and `--record` writes a section of
`benchmarks/RESULTS.md` for each of them. Times are read from the browser's own clock.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.large_leaderboard import fill_campaign
from benchmarks.service.live_service import ROOT, LiveService, wait_until
from benchmarks.service.made_outcome import completed_outcome
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.search_spaces.layouts.layout import Layout

CHROMIUM: Final = "/usr/bin/chromium"
"""Debian's."""
CAMPAIGN: Final = "/campaigns/campaign-1"
TRIALS: Final = 1000
LAYOUTS: Final = 100_000
OPENED: Final = 10
"""Times that a page is opened, and each click made."""
OUTCOMES: Final = 30
IDLE_S: Final = 600
SETTLE_S: Final = 5
LINES_ASKED: Final = 4000

_ROWS = """(wanted) => document.querySelectorAll("#leaderboard tr[data-row]").length >= wanted"""
_FIRST_SCREEN: Final = f"""() => {{
  const lead = document.querySelector("#finding .lead");
  return lead && lead.textContent.trim() && ({_ROWS})(20);
}}"""
_PAINTED: Final = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"""
"""Milliseconds since the navigation began, once what is there now was painted."""
_CLICKED: Final = f"""async (element) => {{
  const before = document.getElementById("leaderboard");
  const start = performance.now();
  element.click();
  await new Promise((done) => {{
    const look = () =>
      document.getElementById("leaderboard") === before ? requestAnimationFrame(look) : done();
    look();
  }});
  return (await ({_PAINTED})()) - start;
}}"""
"""Milliseconds from a click until another leaderboard was painted."""
_OPENED: Final = f"""async (summary) => {{
  const start = performance.now();
  summary.click();
  const values = () => summary.parentElement.querySelector("fieldset input");
  while (!values()) await new Promise(requestAnimationFrame);
  return (await ({_PAINTED})()) - start;
}}"""
"""Milliseconds from a click on a filter until its values were painted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardPart:
    """A part of the benchmark."""

    measure: Callable[[argparse.Namespace], list[Figure]]
    notes: str = ""
    """What a reader of its figures must know."""


class Visit:
    """A browser that is signed in to a service."""

    def __init__(self, browser: Browser, service: LiveService) -> None:
        self.context: BrowserContext = browser.new_context(viewport={"width": 1400, "height": 900})
        self.context.set_default_timeout(60_000)
        self.url = service.url
        code = service.post("/sign-in-codes")["code"]
        self.page: Page = self.context.new_page()
        self.page.goto(f"{self.url}/sign-in#code={code}")
        self.page.wait_for_url(f"{self.url}/")

    def open(self, path: str) -> None:
        """Opens a page, and waits until its leaderboard is there."""
        self.page.goto(f"{self.url}{path}", wait_until="commit")
        self.page.wait_for_function(_ROWS, arg=1, polling="raf")

    def cookies_only(self) -> BrowserContext:
        """A context with the same session and an empty cache."""
        browser = self.context.browser
        assert browser is not None
        fresh = browser.new_context(
            viewport={"width": 1400, "height": 900}, storage_state=self.context.storage_state()
        )
        fresh.set_default_timeout(60_000)
        return fresh


@contextmanager
def visiting() -> Iterator[tuple[Browser, LiveService]]:
    """A browser and a service on an empty database."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            with LiveService(Path(folder)) as service:
                yield browser, service
        finally:
            browser.close()


def measure_pages(_: argparse.Namespace) -> list[Figure]:
    """The page of a campaign of 1,000 trials, and the leaderboard of 100,000 layouts."""
    with visiting() as (browser, service):
        fill_campaign(service.store, TRIALS)
        visit = Visit(browser, service)
        first_screen = [_first_screen(visit) for _ in range(OPENED)]
    with visiting() as (browser, service):
        fill_campaign(service.store, LAYOUTS)
        visit = Visit(browser, service)
        clicks = {
            "sort": _clicks(visit, _sorting),
            "values of a filter": _clicks(visit, _filter, _OPENED),
            "filter": _clicks(visit, _filtering),
            "next page": _clicks(visit, _turning),
        }
    what = f"campaign of {TRIALS:,} trials: the winner's sentence and 20 rows painted, cold cache"
    return [
        _seconds(what, first_screen, 0.5),
        *(
            _seconds(f"leaderboard of {LAYOUTS:,} layouts: {name}", times, 0.3)
            for name, times in clicks.items()
        ),
    ]


def _first_screen(visit: Visit) -> float:
    """Seconds from the start of the navigation, with an empty cache."""
    context = visit.cookies_only()
    try:
        page = context.new_page()
        page.goto(f"{visit.url}{CAMPAIGN}", wait_until="commit")
        page.wait_for_function(_FIRST_SCREEN, polling="raf")
        return float(page.evaluate(_PAINTED)) / 1000
    finally:
        context.close()


def _clicks(
    visit: Visit, element: Callable[[Page, int], Locator], clicked: str = _CLICKED
) -> list[float]:
    """Seconds of clicks, each on a page that was opened anew; the first one is not counted."""
    times = []
    for number in range(OPENED + 1):
        visit.open(CAMPAIGN)
        target = element(visit.page, number)
        times.append(float(target.evaluate(clicked)) / 1000)
    return times[1:]


def _sorting(page: Page, number: int) -> Locator:
    headings = page.locator("#leaderboard thead a[data-swap]")
    return headings.nth(1 + number % (headings.count() - 1))


def _filter(page: Page, number: int) -> Locator:
    filters = page.locator("#filters details:has(a[data-fill]) summary")
    return filters.nth(number % filters.count())


def _filtering(page: Page, number: int) -> Locator:
    summary = _filter(page, number)
    summary.evaluate(_OPENED)
    boxes = page.locator("#filters details[open] input[type=checkbox]")
    return boxes.nth(number % boxes.count())


def _turning(page: Page, _number: int) -> Locator:
    return page.locator("nav.pages a").last


def measure_outcomes(_: argparse.Namespace) -> list[Figure]:
    """From the request with an outcome until the browser shows its row."""
    with visiting() as (browser, service):
        campaign = service.submit(budget={"trials": 1000}, space=_many_layouts())
        worker = service.post("/workers", _worker())["worker_id"]
        layouts = [Layout(micro_batch_size=1 + place) for place in range(OUTCOMES + 2)]
        for layout in layouts:
            service.store.trials.add(campaign["id"], layout)
        visit = Visit(browser, service)
        _post_outcome(service, worker)
        _post_outcome(service, worker)
        visit.open(f"/campaigns/{campaign['name']}")
        wait_until("the stream is open", lambda: "live" in visit.page.inner_text("#connection"))
        times = [_until_shown(service, worker, visit.page, shown + 3) for shown in range(OUTCOMES)]
    return [_seconds("outcome posted to row in the browser", times, 1.0, by_p95=True)]


def _until_shown(service: LiveService, worker: str, page: Page, rows: int) -> float:
    outcome = _lease_with_outcome(service, worker)
    start = time.perf_counter()
    service.post(*outcome)
    page.wait_for_function(_ROWS, arg=rows, polling="raf")
    page.evaluate(_PAINTED)
    took_s = time.perf_counter() - start
    time.sleep(random.uniform(0.5, 1.0))  # not in step with the service's polls
    return took_s


def _post_outcome(service: LiveService, worker: str) -> None:
    service.post(*_lease_with_outcome(service, worker))


def _lease_with_outcome(service: LiveService, worker: str) -> tuple[str, dict[str, Any]]:
    (lease,) = service.post(f"/workers/{worker}/leases", {"max_trials": 1, "wait_s": 5})["leases"]
    outcome = completed_outcome(lease["request"], random.Random(lease["trial_id"]))
    body = {"worker_id": worker, "attempt": lease["attempt"], "outcome": outcome}
    return f"/trials/{lease['trial_id']}/outcome", body


def _many_layouts() -> dict[str, Any]:
    sizes = {"from": 1, "to": OUTCOMES + 2}
    return {
        "global_batch_size": {"min": 1, "max": 64},
        "num_microbatches": 1,
        "micro_batch_size": sizes,
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "zero_stage": 0,
    }


def _worker() -> dict[str, Any]:
    return {
        "name": "w",
        "host": "h",
        "cluster": "local-cpu",
        "num_nodes": 1,
        "devices_per_node": 1,
        "device": "CPU core",
    }


def measure_bytes(_: argparse.Namespace) -> list[Figure]:
    """Compressed bytes of all scripts and styles that the pages name, the plot library apart."""
    with visiting() as (_browser, service):
        service.submit(name="c")
        paths = ("/", "/submit", "/campaigns/c", "/allocations", "/tokens", "/audit")
        accepted = {**service.http.headers, "Accept-Encoding": "br", "Accept": "text/html"}
        found: dict[str, int] = {}
        for path in paths:
            page = httpx.get(f"{service.url}{path}", headers=accepted).raise_for_status()
            for asset in re.findall(r'"(/assets/[^"]+\.(?:js|css))"', page.text):
                if not asset.endswith("plotly.js"):
                    found[asset] = _bytes_on_the_wire(f"{service.url}{asset}", accepted)
    total = sum(found.values())
    names = ", ".join(
        f"{asset.rpartition('/')[2]} {size / 1000:.1f}" for asset, size in sorted(found.items())
    )
    return [
        Figure(
            name="scripts and styles on the wire (brotli), the plot library apart",
            asked="at most 100 kB",
            measured=f"{total / 1000:.1f} kB ({names})",
            reached=total <= 100_000,
        )
    ]


def _bytes_on_the_wire(url: str, headers: dict[str, str]) -> int:
    with httpx.stream("GET", url, headers=headers) as answer:
        return sum(len(part) for part in answer.iter_raw())


def measure_idle_page(arguments: argparse.Namespace) -> list[Figure]:
    """Requests that the service answered while a page of a running campaign was open."""
    with visiting() as (browser, service):
        service.submit(name="c")
        visit = Visit(browser, service)
        visit.page.goto(f"{visit.url}/campaigns/c")
        wait_until("the stream is open", lambda: "live" in visit.page.inner_text("#connection"))
        time.sleep(SETTLE_S)
        before = _requests(service)
        visit.page.wait_for_timeout(arguments.idle_s * 1000)
        after = _requests(service)
    more = {name: after[name] - before.get(name, 0) for name in after}
    more["read_metrics"] -= 1  # our own
    reconnects = sum(more.pop(name, 0) for name in ("stream_events", "stream_campaign_events"))
    number = round(sum(more.values()))
    return [
        Figure(
            name=f"requests of an idle page in {arguments.idle_s} s",
            asked="0",
            measured=f"{number}, and {reconnects:.0f} reconnects of its stream",
            reached=number == 0,
        )
    ]


def _requests(service: LiveService) -> dict[str, float]:
    """Answered requests by operation."""
    text = httpx.get(f"{service.url}/metrics", headers=service.http.headers).text
    found: dict[str, float] = {}
    for operation, number in re.findall(
        r'layout_tuner_http_requests_total\{operation="([^"]+)",[^}]*\} (\S+)', text
    ):
        found[operation] = found.get(operation, 0) + float(number)
    return found


def measure_lines(_: argparse.Namespace) -> list[Figure]:
    """Lines of the dashboard's modules, templates, scripts and styles."""
    kinds = {"py": "Python", "html": "templates", "js": "scripts", "css": "styles"}
    lines = {
        words: sum(
            len(file.read_text().splitlines())
            for file in (ROOT / "api" / "dashboard").rglob(f"*.{kind}")
        )
        for kind, words in kinds.items()
    }
    total = sum(lines.values())
    return [
        Figure(
            name="product lines in `api/dashboard`",
            asked=f"about {LINES_ASKED:,}",
            measured=f"{total:,} ({', '.join(f'{words} {n:,}' for words, n in lines.items())})",
            reached=None,
        )
    ]


PARTS: Final[dict[str, DashboardPart]] = {
    "pages": DashboardPart(
        measure=measure_pages,
        notes=f"Pages: until the second frame after the change, by the browser's clock, {OPENED} times "
        "each, in a context without a cache; clicks are made on a page that was opened anew.",
    ),
    "outcomes": DashboardPart(
        measure=measure_outcomes,
        notes=f"Outcomes: until the row was painted, {OUTCOMES} times, 0.5 to 1 s apart.",
    ),
    "bytes": DashboardPart(
        measure=measure_bytes, notes="Bytes: all files that six pages name, each counted once."
    ),
    "idle-page": DashboardPart(
        measure=measure_idle_page,
        notes="The idle page is of a running campaign that nobody works on.",
    ),
    "lines": DashboardPart(measure=measure_lines),
}


def _seconds(name: str, times: Sequence[float], asked_s: float, *, by_p95: bool = False) -> Figure:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    middle = median(ordered)
    judged = p95 if by_p95 else middle
    return Figure(
        name=name,
        asked=f"{'p95' if by_p95 else 'median'} at most {asked_s:g} s",
        measured=f"median {middle:.3f} s, p95 {p95:.3f} s of {len(ordered)}",
        reached=judged <= asked_s,
    )


def main() -> None:
    """Prints, and records, what was asked for."""
    arguments = _arguments()
    machine = describe_machine("fastapi", "jinja2", "playwright")
    print(machine, end="\n\n", flush=True)
    figures: list[Figure] = []
    for name in arguments.only or PARTS:
        found = PARTS[name].measure(arguments)
        for figure in found:
            print(" | ".join(figure.cells()), flush=True)
        figures += found
    if arguments.record:
        if arguments.only or arguments.idle_s != IDLE_S:
            sys.exit("bench-dashboard: --record is for all parts and an idle time of 600 s")
        rows = [figure.cells() for figure in figures]
        notes = " ".join(part.notes for part in PARTS.values()).strip()
        numbers = table(("figure", "asked", "measured", "reached"), rows)
        record("The dashboard", f"`make bench-dashboard`; {machine}.\n\n{numbers}\n\n{notes}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-dashboard", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(PARTS), help="repeatable")
    parser.add_argument(
        "--idle-s", type=count, default=IDLE_S, help=f"seconds of the idle page [{IDLE_S}]"
    )
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
