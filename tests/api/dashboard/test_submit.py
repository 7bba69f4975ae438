"""Campaigns are submitted by the form, in a real browser; its fields become the document."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page, expect

from layout_tuner.api.campaigns import submission
from layout_tuner.api.dashboard.campaign_actions import _number
from layout_tuner.api.dashboard.campaign_form import (
    FORM_FIELDS,
    REST,
    document_of,
    form_of,
    yaml_of,
)
from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.errors import DocumentMalformedError, SearchSpaceError
from tests.api.dashboard.browser import Visitor, look_at, visiting
from tests.kit.api import CAMPAIGN, answered
from tests.kit.persons import Signing, served
from tests.kit.populated import Populated
from tests.results_db.campaigns.test_imported_tables import varied_rows
from tests.search_spaces.tables.tables import make_row, make_text


@pytest.fixture
def visitor(browser: Browser, shared: Populated) -> Iterator[Visitor]:
    with visiting(browser, shared.url, shared.headers("submitter")) as visitor:
        yield visitor


def campaign(service: Populated, name: str) -> httpx.Response:
    return service.ask("viewer", f"GET /v1/campaigns/{name}")


def fill(page: Page, **fields: str) -> None:
    """Fills in fields by the end of their names: trials is budget.trials."""
    for name, value in fields.items():
        own = page.locator("#campaign-form")
        own.locator(f"[name={name}], [name$='.{name}']").first.fill(value)


def submit(page: Page) -> None:
    page.get_by_role("button", name="Submit campaign").click()


def test_errors_are_shown_while_typing_and_fixed_step_by_step(
    visitor: Visitor, shared: Populated
) -> None:
    page = visitor.open("/submit")
    page.get_by_label("Model", exact=True).select_option("tiny")
    check = page.locator("#check")
    expect(check).to_contain_text("3 things are wrong")
    expect(check).to_contain_text("cluster: the field is missing")
    expect(page.locator("#e-name")).to_contain_text("the field is missing")
    assert page.get_by_label("Name").get_attribute("aria-invalid") == "true"

    page.get_by_label("Cluster", exact=True).select_option("local-cpu")
    fill(page, name="steps", global_batch_size="8", tp="1, 2, 3", dp="1", trials="0")
    fill(page, micro_batch_size="1")
    page.get_by_role("group", name="ZeRO stage").get_by_label("0").check()
    page.get_by_role("group", name="sequence parallel").get_by_label("false").check()
    expect(check).to_contain_text("One thing is wrong")
    problem = page.locator("#e-budget-trials")
    expect(problem).to_contain_text("0 is not a whole number of at least 1")
    expect(page.locator("#e-name")).to_be_empty()
    # Layouts are counted although the budget is wrong.
    expect(check).to_contain_text("of 3 combinations are legal")
    rule = check.get_by_role("row").filter(has_text="heads_over_tp")
    expect(rule).to_contain_text("num_heads=4 is not divisible by tp=3")

    fill(page, trials="5", tp="1")
    expect(check).to_contain_text("Nothing is wrong")
    expect(check).to_contain_text("1 of 1 combinations are legal. 1 of them are likely to fit")
    submit(page)
    page.wait_for_url("**/campaigns/steps")
    made = campaign(shared, "steps").json()
    assert made["num_legal_layouts"] == 1
    assert made["created_by"] == "a-submitter"


def test_a_campaign_like_another_one_has_its_fields_and_a_free_name(
    visitor: Visitor, shared: Populated
) -> None:
    page = visitor.open("/submit")
    page.get_by_label("Campaign", exact=True).fill("ended")
    page.get_by_role("button", name="Take its fields").click()
    expect(page.get_by_label("Name")).to_have_value("ended-2")
    expect(page.get_by_label("tensor parallel, tp")).to_have_value("1, 2")
    page.get_by_role("button", name="Show as YAML").click()
    text = page.get_by_label("Campaign, as YAML or JSON")
    assert "name: ended-2" in text.input_value()
    text.fill(text.input_value().replace("trials: 5", "trials: 6"))
    page.get_by_role("button", name="Show as a form").click()
    expect(page.get_by_label("Trials")).to_have_value("6")
    submit(page)
    page.wait_for_url("**/campaigns/ended-2")
    original, made = campaign(shared, "ended").json(), campaign(shared, "ended-2").json()
    assert made["spec"] == {
        **original["spec"],
        "name": "ended-2",
        "budget": {**original["spec"]["budget"], "trials": 6},
    }


@pytest.mark.parametrize("rows", [varied_rows, lambda: [make_row()]])
def test_a_campaign_like_an_imported_one_is_submitted(
    visitor: Visitor, shared: Populated, rows: Callable[[], list[str]]
) -> None:
    name = f"theirs-{len(rows())}"
    csv = {"content": make_text(*rows()), "headers": {"Content-Type": "text/csv"}}
    answered(shared.ask("submitter", f"POST /v1/campaigns/import?name={name}", **csv), 201)
    page = visitor.open(f"/submit?campaign={name}")
    expect(page.locator("#check")).to_contain_text("Nothing is wrong")
    submit(page)
    page.wait_for_url(f"**/campaigns/{name}-2")
    assert campaign(shared, f"{name}-2").json()["strategy"] == "exhaustive"


def test_a_plan_is_shown_before_submission_and_keeps_the_fields(
    visitor: Visitor, shared: Populated, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visitor.open("/submit?model=gpt-22b&cluster=frontier")
    fill(page, name="planned", global_batch_size="64", num_nodes="2, 4", tp="2, 4, 8", pp="1, 2, 4")
    fill(page, trials="7")
    page.get_by_role("button", name="Plan", exact=True).click()
    plan = page.locator("#plan")
    expect(plan).to_contain_text("Every figure of a layout is predicted, from data sheets alone")
    expect(plan).to_contain_text("Plan of planned for the embedded trainer: gpt-22b on frontier")
    expect(plan).to_contain_text("The budget pays for 7 probes")
    expect(plan).to_contain_text("the budget buys a chance of")
    document = {
        "name": "planned",
        "model": "gpt-22b",
        "cluster": "frontier",
        "space": {"global_batch_size": 64, "num_nodes": [2, 4], "tp": [2, 4, 8], "pp": [1, 2, 4]},
        "budget": {"trials": 7},
    }
    planned = shared.ask("submitter", "POST /v1/plans?top=5", json=document).json()
    rows = plan.get_by_role("row").all()[1:]
    keys = [row.get_by_role("cell").nth(1).inner_text() for row in rows]
    assert keys == [each["layout_key"] for each in planned["layouts"]]
    chances = [each["best_chance"] for each in planned["layouts"]]
    assert max(chances) > 0.005, "a chance that the page shows as another number than 0.00"
    column = plan.get_by_role("columnheader").all_inner_texts().index("P(best)")
    shown = [row.get_by_role("cell").nth(column).inner_text() for row in rows]
    assert shown == ["-" if each is None else f"{each:.2f}" for each in chances]
    needed = planned["probes_needed"]
    assert needed > 1
    expect(plan).to_contain_text(
        f"Probing the {needed} layouts with the largest P(best) has a 90 % chance of one within 5 %"
    )
    expect(page.get_by_label("Name")).to_have_value("planned")
    look_at(page)
    page.set_viewport_size({"width": 380, "height": 800})
    cell = plan.locator("td[data-label='P(best)']").first
    expect(cell).to_be_visible()
    shown = cell.evaluate("e => getComputedStyle(e, '::before').content + e.innerText")
    assert shown == f'"P(best): "{chances[0]:.2f}'
    assert campaign(shared, "planned").status_code == 404

    fill(page, trials="none")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("#check")).to_contain_text("One thing is wrong")
    expect(page.locator("#plan")).to_have_count(0)

    monkeypatch.setattr(submission, "MAX_AT_ONCE", 3)
    fill(page, trials="7")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("#check")).to_contain_text("more than 3, the most that this page plans")


def test_a_large_space_is_estimated_from_a_sample(shared: Populated) -> None:
    document = """
      {name: large, model: gpt-22b, cluster: frontier, budget: {trials: 5}, space: {
        global_batch_size: {min: 1, max: 65536}, num_nodes: {from: 1, to: 64}, tp: [1, 2, 4, 8],
        pp: [1, 2, 4, 8], micro_batch_size: {from: 1, to: 20}, num_microbatches: {from: 1, to: 20},
        recompute: [none, full]}}"""
    form = {"view": "yaml", "yaml": document}
    checked = shared.ask("submitter", "POST /submit/check", data=form)
    answered(checked, 200, "Nothing is wrong", "evenly spaced layouts were estimated", "±")


def test_a_double_click_makes_one_campaign(visitor: Visitor, shared: Populated) -> None:
    page = visitor.open("/submit?campaign=ended")
    fill(page, name="once")
    page.get_by_role("button", name="Submit campaign").dblclick()
    page.wait_for_url("**/campaigns/once")
    # The same request again, as a browser sends it that lost the answer.
    form = {"do": "submit", "view": "yaml", "yaml": json.dumps({**CAMPAIGN, "name": "x"})}
    for _ in range(2):
        again = shared.ask("submitter", "POST /submit", data={**form, "key": "k"})
        assert answered(again, 303).headers["location"] == "/campaigns/x"
    # Another page with the same content is another request: the name is taken.
    answer = shared.ask("submitter", "POST /submit", data={**form, "key": "l"})
    assert "a campaign named &#39;x&#39; exists already" in answer.text


def test_markup_in_a_document_stays_text(visitor: Visitor) -> None:
    page = visitor.open("/submit?view=yaml")
    markup = "<img src=x onerror=alert(1)>"
    text = page.get_by_label("Campaign, as YAML or JSON")
    text.fill(f"name: '{markup}'\nmodel: tiny\ncluster: '{markup}'\n'{markup}': 1\n")
    expect(page.locator("#check")).to_contain_text(markup)
    page.get_by_role("button", name="Check").click()
    expect(page.locator("#check")).to_contain_text(markup)
    assert text.input_value().startswith(f"name: '{markup}'")
    assert page.locator("#content img").count() == 0
    # What cannot be read stays in its view, as it was written.
    text.fill("a: b: </textarea><b>")
    page.get_by_role("button", name="Show as a form").click()
    expect(text).to_have_value("a: b: </textarea><b>")
    expect(page.locator("#e-yaml")).to_contain_text("malformed YAML")


@pytest.mark.slow
def test_the_form_works_without_script(browser: Browser, shared: Populated) -> None:
    own = shared.headers("submitter")
    with visiting(browser, shared.url, own, java_script_enabled=False) as visitor:
        page = visitor.open("/submit?model=tiny&cluster=local-cpu")
        page.locator("[name=name]").fill("no-script")
        page.get_by_role("button", name="Check").click()
        expect(page.locator("#e-space-preset")).to_contain_text("the field is missing")
        page.locator("[name='space.global_batch_size']").fill("8")
        page.locator("[name='space.dp']").fill("1")
        submit(page)
        page.wait_for_url("**/campaigns/no-script")


@pytest.mark.slow
def test_the_form_is_filled_in_with_the_keyboard_alone(visitor: Visitor) -> None:
    page = visitor.open("/submit?campaign=ended")
    page.get_by_label("Name").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("by-keyboard")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Model", exact=True)).to_be_focused()
    # Enter checks: a submission by accident would cost node-hours.
    page.get_by_label("Name").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#check")).to_contain_text("Nothing is wrong")
    page.get_by_role("button", name="Submit campaign").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/campaigns/by-keyboard")


def test_the_form_is_accessible_at_every_width_and_broken_rules_are_not_cut(
    browser: Browser, shared: Populated
) -> None:
    with visiting(browser, shared.url, shared.headers("admin")) as visitor:
        for path in ("/submit", "/submit?campaign=ended&view=yaml", "/submit?model=nothing"):
            look_at(visitor.open(path))
        visitor.page.set_viewport_size({"width": 1400, "height": 900})
        page = visitor.open("/submit?model=gpt-175b&cluster=frontier&space=paper-table-v")
        rules = page.get_by_role("region", name="Broken rules")
        expect(rules.get_by_role("row")).not_to_have_count(1)
        assert rules.evaluate("(e) => e.scrollWidth - e.clientWidth") == 0


def test_a_person_who_is_signed_in_submits_a_file(browser: Browser, tmp_path: Path) -> None:
    """The form token goes with the form, with the file, and with the checks while typing."""
    file = tmp_path / "mine.json"
    # Tabs are JSON and not YAML.
    file.write_text(json.dumps({**CAMPAIGN, "name": "mine", "seed": -1, "x": 1}, indent="\t"))
    with served(tmp_path / "service") as signing, visiting(browser, signing.url) as visitor:
        page = visitor.open(f"/sign-in#code={signing.code()}")
        page.wait_for_url(f"{signing.url}/")
        visitor.open("/submit")
        page.get_by_label("File, YAML or JSON").set_input_files(file)
        page.get_by_role("button", name="Open the file").click()
        expect(page.locator("#check")).to_contain_text("seed: -1 is not a whole number")
        expect(page.locator("#check")).to_contain_text("unknown campaign field 'x'")
        text = page.get_by_label("Campaign, as YAML or JSON")
        assert text.input_value() == file.read_text()
        text.fill(json.dumps({**CAMPAIGN, "name": "mine", "seed": 1}))
        expect(page.locator("#check")).to_contain_text("Nothing is wrong")
        submit(page)
        page.wait_for_url("**/campaigns/mine")
        assert signing.store.campaigns.by_name("mine").spec["seed"] == 1
        check_that_nothing_typed_is_lost(visitor, signing)


def check_that_nothing_typed_is_lost(visitor: Visitor, signing: Signing) -> None:
    """With the service away, on the way back, after the session has ended, and in the YAML view."""
    page = visitor.open("/submit?model=tiny&cluster=local-cpu")
    check = page.locator("#check")
    fill(page, name="kept", global_batch_size="8", trials="5")
    page.get_by_role("group", name="recomputation").get_by_label("full").check()
    page.get_by_label("Objective, which ranks").select_option("tokens_per_s")
    page.get_by_label("Objective 2").select_option("memory_headroom")
    expect(check).to_contain_text("Nothing is wrong")
    page.context.set_offline(True)
    page.get_by_label("Cheap probes").select_option("full")
    expect(check).to_contain_text("the service does not answer. What you typed is kept")
    submit(page)
    page.wait_for_url("chrome-error://**")
    page.context.set_offline(False)
    page.go_back()
    expect(page.locator("#messages")).to_contain_text("What you typed here before is back")
    expect(page.get_by_label("Name")).to_have_value("kept")

    other = page.context.new_page()
    other.goto(signing.url)
    other.get_by_role("button", name="Sign out").click()
    expect(other.get_by_text("The pages of this service need a sign-in.")).to_be_visible()
    fill(page, trials="6")
    expect(check).to_contain_text("Your sign-in has ended. What you typed is kept in this tab")
    check.get_by_role("link", name="sign in again").click()
    expect(page.locator("main")).to_contain_text("Your sign-in has ended: it was not used")
    expect(page.locator("main")).to_contain_text("/submit?model=tiny&cluster=local-cpu")
    page.get_by_label("One-time code or token").fill(signing.code())
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#messages")).to_contain_text("What you typed here before is back")
    page.get_by_role("button", name="Show as YAML").click()
    text = page.get_by_label("Campaign, as YAML or JSON")
    text.fill(text.input_value() + "\nseed: 7")
    visitor.open("/submit")  # the address of what was sent; the YAML is in its own view
    expect(text).to_have_value(re.compile("name: kept.*seed: 7", re.DOTALL))
    submit(page)
    page.wait_for_url("**/campaigns/kept")
    made = signing.store.campaigns.by_name("kept")
    assert made.objectives == ("tokens_per_s", "memory_headroom")
    assert (made.spec["seed"], made.spec["budget"]["trials"]) == (7, 6)
    assert made.spec["probe"]["fidelity"] == "full"
    assert made.spec["space"]["recompute"] == "full"
    visitor.open("/submit")
    expect(page.get_by_label("Name")).to_have_value("")
    visitor.faults.clear()  # requests that were refused, or that no service answered


DOCUMENT: dict[str, Any] = {
    "name": "mine",
    "model": "tiny",
    "cluster": {"preset": "local-cpu", "num_nodes": 2},
    "objective": ["tokens_per_s", "memory_headroom"],
    "baseline": {"tp": 2, "pp": 1},
    "strategy": "random",
    "budget": {"trials": 5, "wall_time": "10m"},
    "space": {
        "global_batch_size": {"min": 4, "max": 8},
        "tp": [1, 2],
        "pp": {"from": 1, "to": 4, "times": 2},
        "recompute": ["none", "full"],
        "sequence_parallel": [False, True],
        "precision": "bf16",
    },
    "probe": {"iterations": 5},
    "seed": 3,
}


def test_a_document_becomes_a_form_and_the_same_document_again() -> None:
    form = form_of(DOCUMENT)
    assert form["model"] == "tiny"
    assert form["space.tp"] == "1, 2"
    assert form["space.pp"] == "{from: 1, to: 4, times: 2}"
    assert form["objective"] == "tokens_per_s, memory_headroom"
    assert yaml.safe_load(form[REST]) == {
        "cluster": {"preset": "local-cpu", "num_nodes": 2},
        "probe": {"iterations": 5},
        "seed": 3,
    }
    assert document_of(form) == DOCUMENT
    assert document_of({"baseline": "tp: 2, dp: 4"}) == {"baseline": {"tp": 2, "dp": 4}}


def test_a_form_has_the_bounds_that_a_budget_states_alone() -> None:
    form = form_of({"budget": {"trials": None, "node_hours": None, "wall_time_s": 600.0}})
    assert form["budget.wall_time"] == "600.0"
    assert document_of(form) == {"budget": {"wall_time": 600.0}}


def test_a_form_keeps_what_it_has_no_field_for() -> None:
    document = {"budget": {"trials": 5, "euros": 3}, "space": {"tp": 1, "cpu_offload": 2}}
    form = form_of(document)
    assert yaml.safe_load(form[REST]) == {"budget": {"euros": 3}, "space": {"cpu_offload": 2}}
    assert document_of(form) == document


def test_fields_that_are_no_yaml_are_named_together_and_one_in_two_places_is_refused() -> None:
    with pytest.raises(SearchSpaceError) as caught:
        document_of({"space.tp": "[1, 2", "budget.trials": "1], [2", "rest": "a: b: c"})
    assert {part.field for part in caught.value.parts} == {"space.tp", "budget.trials", "rest"}

    with pytest.raises(SearchSpaceError, match="'model' is here and in a field of its own"):
        document_of({"model": "tiny", "rest": "model: {preset: tiny}"})
    with pytest.raises(SearchSpaceError, match="'tp' is here and in a field of its own"):
        document_of({"space.tp": "1", "rest": "space: {tp: 2}"})


_SCALARS = st.one_of(
    st.integers(-5, 1 << 40),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(min_codepoint=32, max_codepoint=1000), max_size=12),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), inner),
    ),
    max_leaves=6,
)
_NAMES = st.one_of(
    st.sampled_from(sorted({field.split(".")[0] for field in FORM_FIELDS} - {REST})),
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
)


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(_NAMES, _VALUES, max_size=6))
def test_no_document_is_changed_on_its_way_through_the_form(document: dict[str, Any]) -> None:
    try:
        expected = read_yaml(yaml_of(document).encode())
    except DocumentMalformedError:
        return  # no field accepts such a text or number, in YAML neither
    given_back = document_of({name: text.strip() for name, text in form_of(document).items()})
    assert _plain(given_back) == _plain(expected)


def _plain(document: Any) -> Any:
    """A document without what stands for nothing: empty sections and texts, lists of one value."""
    if isinstance(document, dict):
        inner = {name: _plain(value) for name, value in document.items()}
        return {name: value for name, value in inner.items() if value not in ({}, "", None)}
    if isinstance(document, list):
        return _plain(document[0]) if len(document) == 1 else [_plain(each) for each in document]
    return document


def test_a_number_of_a_form_has_plain_digits() -> None:
    assert [_number(text) for text in ("10", "1.5", "1e3", "")] == [10, 1.5, 1000.0, None]
    for text in ("1_0", " 5", "nan", "\u0665"):
        assert _number(text) == text
