"""The form of a campaign is filled in from the files of a job, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.api.campaigns.test_found_jobs import CONFIG, DEEPSPEED, SCRIPT
from tests.api.dashboard.browser import Visitor, look_at, visiting
from tests.kit.api import answered
from tests.kit.populated import Populated
from tests.layout_tuner.predictions.test_job_plan import PART

TEXT = SCRIPT.replace("--bf16", "--bf16 --our-own-flag $(date) --num-workers 4")


@pytest.fixture
def visitor(browser: Browser, shared: Populated) -> Iterator[Visitor]:
    with visiting(browser, shared.url, shared.headers("submitter")) as visitor:
        yield visitor


def upload(page: Page, path: Path, text: str, **stated: str) -> None:
    path.write_text(text)
    page.get_by_label("Launch script or configuration").set_input_files(path)
    for label, value in stated.items():
        page.locator(f"#j-{label}").fill(value)
    page.get_by_role("button", name="Read the job").click()


def value_of(page: Page, name: str) -> str:
    return page.locator(f"[name='{name}']").first.input_value()


def test_a_script_fills_in_the_form_and_says_what_it_did_not_understand(
    visitor: Visitor, tmp_path: Path
) -> None:
    page = visitor.open("/submit")
    page.get_by_label("Cluster of the job").select_option("h100-sxm")
    upload(page, tmp_path / "my-job.sh", TEXT)

    found = page.locator("#found-job")
    expect(found).to_contain_text("The job of my-job.sh")
    expect(found.get_by_role("region", name="Not understood")).to_contain_text("--our-own-flag")
    expect(found.get_by_role("region", name="Assumed")).to_contain_text("Megatron-LM")
    read = found.get_by_role("region", name="Read")
    row = read.get_by_role("row").filter(has_text="--tensor-model-parallel-size 4")
    expect(row).to_contain_text("3")  # the line of the variable
    assert value_of(page, "name") == "my-job"
    assert value_of(page, "space.global_batch_size") == "64"
    assert "tp: 4" in value_of(page, "baseline")
    assert "num_layers: 32" in value_of(page, "rest")
    beside = page.locator(".field", has=page.locator("[name='space.global_batch_size']"))
    expect(beside).to_contain_text("read: --global-batch-size 64 (line 9)")
    expect(page.locator("#check")).to_contain_text("Nothing is wrong")
    look_at(page)


def test_a_job_on_part_of_a_node_gets_that_part(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.open("/submit")
    page.get_by_label("Cluster of the job").select_option("h100-sxm")
    upload(page, tmp_path / "part.sh", PART)

    expect(page.locator("#found-job")).to_contain_text("uses 4 of the 8 devices of a node")
    assert "name: h100-sxm-4" in value_of(page, "rest")
    assert "devices_per_node: 4" in value_of(page, "rest")
    assert value_of(page, "space.tp") == "1, 2"  # one device would hold the job
    expect(page.locator("#check")).to_contain_text("Nothing is wrong")
    expect(page.locator("#check")).not_to_contain_text("baseline")


def test_what_is_missing_is_stated_beside_files_that_stay(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.open("/submit")
    upload(page, tmp_path / "ds_config.json", json.dumps(DEEPSPEED))
    problem = page.locator("#found-job .problem")
    expect(problem).to_contain_text("model")

    (config := tmp_path / "config.json").write_text(json.dumps(CONFIG))
    page.get_by_label("config.json, where").set_input_files(config)
    page.locator("#j-seq_length").fill("2048")
    page.get_by_role("button", name="Read the job").click()
    expect(problem).to_contain_text("nodes")

    page.get_by_label("Cluster of the job").select_option("h100-sxm")
    page.locator("#j-num_nodes").fill("2")
    page.get_by_role("button", name="Read the job").click()
    expect(problem).to_have_count(0)
    assert "dp: 16" in value_of(page, "baseline")
    assert value_of(page, "space.global_batch_size") == "128"


def test_a_file_without_a_job_is_one_sentence(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.open("/submit")
    upload(page, tmp_path / "notes.sh", "echo </textarea><b>nothing\n")
    expect(page.locator("#found-job .problem")).to_contain_text("notes.sh")


def test_a_file_that_is_no_text_is_refused(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.open("/submit")
    (path := tmp_path / "latin.sh").write_bytes(SCRIPT.encode() + b"# caf\xe9\n")
    page.get_by_label("Launch script or configuration").set_input_files(path)
    page.get_by_role("button", name="Read the job").click()
    expect(page.locator("#found-job .problem")).to_contain_text("not text in UTF-8")


@pytest.mark.slow
def test_the_files_of_a_job_are_read_without_script(
    browser: Browser, shared: Populated, tmp_path: Path
) -> None:
    own = shared.headers("submitter")
    with visiting(browser, shared.url, own, java_script_enabled=False) as visitor:
        page = visitor.open("/submit")
        page.get_by_label("Cluster of the job").select_option("h100-sxm")
        upload(page, tmp_path / "no-script-job.sh", SCRIPT)
        page.get_by_role("button", name="Check").click()
        expect(page.locator("#check")).to_contain_text("Nothing is wrong")
        page.get_by_role("button", name="Submit campaign").click()
        page.wait_for_url("**/campaigns/no-script-job")
    stored = answered(shared.ask("viewer", "GET /v1/campaigns/no-script-job"), 200).json()
    assert stored["trainer"] == "megatron-lm"
