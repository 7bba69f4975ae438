"""Takes the pictures of the dashboard that the docs show, of a real campaign: `make pictures`.

It needs Debian's Chromium, as the tests of the pages do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from demo import COMMAND, HERE, ask, run, start_service, stop_service
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES: Final = HERE.parent / "docs" / "pictures"
BASELINE: Final = "baseline: {tp: 2, zero_stage: 0}\n"
WIDTH: Final = 1200


def main() -> int:
    """Runs the campaign of `tiny.yaml` with a baseline, and takes every picture."""
    with tempfile.TemporaryDirectory(prefix="layout-tuner-pictures-") as folder:
        environment = {**os.environ, "LAYOUT_TUNER_DATA_DIR": folder}
        service = start_service(environment)
        try:
            spec = Path(folder) / "tiny.yaml"
            spec.write_text((HERE / "tiny.yaml").read_text() + BASELINE)
            run(environment, "campaign", "submit", str(spec))
            run(environment, "campaign", "watch", "tiny")
            best = ask(environment, "leaderboard", "tiny", "--json")["trials"][0]["id"]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
                take_all(browser, environment, best)
                browser.close()
        finally:
            stop_service(service)
    return 0


def take_all(browser: Browser, environment: dict[str, str], best_trial: int) -> None:
    """Signs in once, and takes the pictures in light colours, one of them in dark ones."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900})
    page = context.new_page()
    page.goto(sign_in_address(environment))
    page.wait_for_url("**/")
    take(page, "campaign", "/campaigns/tiny", height=900)
    take(page, "plots", "/campaigns/tiny/plots", height=1000)
    take(page, "trial", f"/trials/{best_trial}", height=900)
    page.emulate_media(color_scheme="dark")
    take(page, "submit", "/submit?campaign=tiny", height=1000)


def take(page: Page, name: str, path: str, *, height: int) -> None:
    """Photographs the upper part of a page, once nothing on it loads any more."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    address = page.url.split("/", 3)
    page.goto(f"{address[0]}//{address[2]}{path}")
    page.wait_for_timeout(3000)  # an event stream stays open, so the network is never idle
    page.screenshot(path=PICTURES / f"{name}.png")
    print(f"{PICTURES / name}.png")


def sign_in_address(environment: dict[str, str]) -> str:
    """What `layout-tuner login` prints."""
    done = subprocess.run([COMMAND, "login"], env=environment, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().strip()


if __name__ == "__main__":
    sys.exit(main())
