"""The report and its sentences: all that a group wants to know, and nothing that runs or loads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from layout_tuner.api.html.result_sentences import CampaignFinding, gain_over_median, ratio_interval
from layout_tuner.api.html.trial_facts import TrialFacts
from layout_tuner.api.plots import static_plot
from layout_tuner.api.report import document
from layout_tuner.api.report.document import POLICY, report
from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.protocol.measurement import Environment
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import AllocationBody, WorkerCreate
from layout_tuner.results_db.campaigns.imported_tables import NewImport
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout, RankedSummary
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables import TableCell, read_table
from tests.api.dashboard.plotted_campaign import plotted_store
from tests.kit.api import CAMPAIGN, CLUSTER, Api, answered, space_of
from tests.kit.page import Page
from tests.kit.store import (
    START,
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    run_trial,
)
from tests.results_db.campaigns.test_analyses import make_analysis, make_step

pytestmark = pytest.mark.sqlite_is_enough

LAYOUTS = [Layout(tp=tp, pp=pp, num_microbatches=8) for tp in (1, 2) for pp in (1, 2)]

TABLE = Path(__file__).parents[3] / "benchmarks" / "data" / "tiny_local_cpu.csv"

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section"),
    *("h1", "h2", "h3", "p", "b", "i", "ul", "li", "div", "span", "pre", "code"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("figure", "figcaption", "svg", "g", "line", "text", "circle", "rect", "path", "polyline"),
}
"""Elements that show, and neither load nor run anything."""


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with closing(TimelyStore(database_url)) as store:
        yield store


def make(store: Store, **changes: Any) -> int:
    spec = CampaignSpec.from_mapping({**CAMPAIGN, **changes})
    made = store.campaigns.create(spec.to_mapping(), num_legal_layouts=len(spec.legal_set()))
    return made.id


def run(store: Store, campaign: int, outcome: Outcome, layout: Layout) -> int:
    worker = make_worker(store, devices_per_node=4)
    return run_trial(store, campaign, layout, outcome, worker=worker.id)


def run_all(
    store: Store, campaign: int, *speeds: float, peaks_gib: Sequence[int] = (5, 5, 5, 5)
) -> None:
    """Measures each of the layouts."""
    for layout, speed, gib in zip(LAYOUTS, speeds, peaks_gib, strict=True):
        outcome = completed(layout, tokens_per_s=speed, peak_memory_bytes=gib << 30)
        run(store, campaign, outcome, layout)


@pytest.mark.parametrize(("trainer", "is_known"), [("megatron-lm", True), ("deepspeed", False)])
def test_memory_of_other_trainers_is_drawn_where_known(
    store: Store, trainer: str, is_known: bool
) -> None:
    model = {"preset": "tiny-llama", "num_mtp_layers": 1}
    space = space_of(global_batch_size=8, tp=1, pp=1, dp=4)
    campaign = make(store, model=model, probe={"trainer": trainer}, space=space)
    trial = store.trials.add(campaign, Layout(dp=4, num_microbatches=2))
    plot = TrialFacts.of(store, trial.id).memory()
    assert (plot is not None) == is_known
    assert plot is None or "multi-token prediction (MTP)" in plot.svg


def page_of(store: Store, campaign: int) -> Page:
    return Page(report(store, store.campaigns.get(campaign), START))


def num_told(page: Page, words: str) -> int:
    """Points of the plots whose text has these words."""
    return sum(words in title for title in page.texts["title"])


def make_tied(store: Store) -> int:
    """A campaign whose first two layouts cannot be told apart, with an analysis of the winner."""
    campaign = make(store, cluster={**CLUSTER, "source": "a: b # c"})
    run_all(store, campaign, 2000.0, 1998.0, 1000.0, 1500.0)
    (best, tied, *_others) = store.leaderboard.ranked_layouts(campaign, "tokens_per_s")
    assert tied.tied_with_first
    steps = (
        make_step(direction="down", stepped_value="1", state="out_of_memory", effect=None),
        make_step(source="measured", effect=-0.25, is_apart=False),
    )
    store.reports.keep_analysis(campaign, make_analysis(best.trial.id, steps=steps))
    return campaign


def test_a_report_names_the_winner_with_its_interval_ties_and_analysis(store: Store) -> None:
    campaign = make_tied(store)
    (best, *_others) = store.leaderboard.ranked_layouts(campaign, "tokens_per_s")
    page = page_of(store, campaign)
    for words in (
        f"2,000 tokens/s, {best.value_low:,.0f} to {best.value_high:,.0f} (95 %)",
        "The best of 4 measured layouts",
        "nodes 1, tp 1, pp 1, dp 1, mbs 1, mb 8, ZeRO 0, fp32",
        "1 other cannot be told apart",
        "As good as the winner",
        "5 GiB of 8 GiB, 38% free",
        "compute 50.0%",
        # The analysis.
        *("70.0%", "20.0%", "-25.0% (tied)", "out of memory", "over 9 layouts"),
        "layout-tuner probe --model tiny --num-microbatches 8",
    ):
        assert words in page.text
    assert "4 GiB, 38% free" not in page.text


def test_a_report_has_one_figure_of_a_winner_that_was_measured_twice(store: Store) -> None:
    campaign = make(store)
    for layout, speed in ((LAYOUTS[0], 7656.0), (LAYOUTS[1], 5000.0), (LAYOUTS[0], 7694.0)):
        run(store, campaign, completed(layout, tokens_per_s=speed), layout)
    page = page_of(store, campaign)
    assert "runs at 7,675 tokens/s" in page.text
    (history,) = [words for words in page.texts["figcaption"] if "The best so far" in words]
    assert "trial 1 with 7,675 tokens/s, the median of its 2 runs; 0 trials have ended" in history
    shown = [words for kind in ("td", "figcaption", "p", "b") for words in page.texts[kind]]
    assert not [words for words in shown if "7,694" in words or "7,656" in words]
    assert num_told(page, "winner: trial 1: 7,675 tokens/s") == 4


def test_every_plot_of_a_report_marks_the_winner(store: Store) -> None:
    page = page_of(store, make_tied(store))
    assert page.kinds("circle").count("winner") == 1  # its interval
    # The history, parallel coordinates, the front, the timeline, and slices of tp and of pp.
    assert num_told(page, "winner: trial 1") == 4 + 2
    assert page.texts["text"].count("★ winner") == 1  # two knobs
    assert "1. trial 1 ★ winner" in page.texts["text"]  # the parts of its step
    assert page.kinds("rect").count("worse") == 1


def test_the_campaign_file_of_a_report_can_be_used_again(store: Store) -> None:
    campaign = make_tied(store)
    page = page_of(store, campaign)
    (file,) = [text for text in page.texts["pre"] if text.startswith("name:")]
    spec = store.campaigns.get(campaign).spec
    assert read_yaml(file.encode()) == spec
    assert CampaignSpec.from_mapping(yaml.safe_load(file)).to_mapping() == spec


def test_a_report_has_cost_environment_and_workers_and_a_winner_that_failed_before(
    store: Store,
) -> None:
    campaign = make(store)
    lost = run(store, campaign, failed(), LAYOUTS[0])
    for layout, speed in zip(LAYOUTS[1:], (1500.0, 1000.0, 900.0), strict=True):
        run(store, campaign, completed(layout, tokens_per_s=speed), layout)
    again = store.trials.requeue(lost)
    lease = lease_one(store, make_worker(store, devices_per_node=4).id)
    assert lease.trial_id == again.id
    post_outcome(store, again.id, lease.attempt, completed(LAYOUTS[0], tokens_per_s=2000.0))
    page = page_of(store, campaign)
    assert num_told(page, "winner: trial 5") == 4 + 2
    assert store.campaigns.get(campaign).node_seconds > 0
    for words in (
        "All others are slower with 95 % confidence.",
        "1.60 times the median of the 4 layouts that were measured to the end.",
        *(
            "node-hours held by probes that have ended",
            "5 of 5",
            "2.13.0",
            "gloo",
            "abc",
            "python 3.11",
        ),
        "1 node with 4 x CPU core",
    ):
        assert words in page.text
    assert "As good as the winner" not in page.text


def test_a_report_groups_failures_by_reason_with_nodes_and_the_end_of_the_latest_log(
    store: Store,
) -> None:
    campaign = make(store)
    log = "\n".join(f"line {number}" for number in range(100))
    outcomes = [
        failed("crashed", node="node-7"),
        failed("crashed", node="node-7", log_tail=log),
        failed("out_of_memory", node="node-9"),
        completed(LAYOUTS[3]),
    ]
    for layout, outcome in zip(LAYOUTS, outcomes, strict=True):
        run(store, campaign, outcome, layout)
    page = page_of(store, campaign)
    for words in (
        *("node-7 (2)", "node-9 (1)", "crashed: trial 2 on node-7"),
        *("rank 1 of 2: out_of_memory", "trials completed, 3 without a result"),
        *("line 99", "line 86"),
    ):
        assert words in page.text
    assert "1 completed, 3 without a result" not in page.text
    assert "line 85" not in page.text
    assert num_told(page, "FAILED (crashed)") == 2 + 2  # the history and the timeline


def test_the_front_of_a_report_is_over_the_objectives_of_the_campaign(store: Store) -> None:
    campaign = make(store, objective=["tokens_per_s", "memory_headroom"])
    run_all(store, campaign, 2000.0, 1500.0, 1000.0, 900.0, peaks_gib=(6, 4, 2, 5))
    page = page_of(store, campaign)
    assert "3 of 4 layouts are on the Pareto front of memory headroom and tokens/s" in page.text
    circles = [attributes for tag, attributes in page.elements if tag == "circle"]
    on_front = [each for each in circles if each.get("fill") == "var(--part4)"]
    assert len(on_front) == 3 + 1  # and the legend's
    assert page.texts["td"].count("front") == 3


def test_the_baseline_is_marked_in_every_plot_and_on_the_leaderboard_wherever_it_stands(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = TurnableClock()
    with closing(TimelyStore(database_url, clock=clock)) as store:
        campaign = plotted_store(store, clock, "", trials=30).campaign_id
        page = page_of(store, campaign)
        # The history, parallel coordinates, the front, the timeline, two plots of estimates, and
        # seven slices.
        assert num_told(page, "baseline: trial 2") == 4 + 2 + 7
        assert page.texts["text"].count("◆ baseline") == 1
        assert any("trial 2 ◆ baseline" in text for text in page.texts["text"])
        assert any("baseline" in text for text in page.texts["td"])
        assert page.kinds("tr").count("baseline") == 1

        slow = make(store, name="slow", baseline=LAYOUTS[3].to_mapping())
        run_all(store, slow, 2000.0, 1500.0, 1000.0, 10.0)
        monkeypatch.setattr(document, "SHOWN", 1)
        html = report(store, store.campaigns.get(slow), START)
    assert '<tr class="baseline"><td class="number">4</td>' in html
    assert Page(html).kinds("tr").count("baseline") == 1
    assert "2 more are ranked." in html  # one and the baseline are shown


HOSTILE = "<img src=x onerror=alert()>'\"&</p>"


def hostile_campaign(store: Store) -> int:
    """Every text that somebody else can choose is an attack."""
    cluster = {**CLUSTER, "device": HOSTILE, "source": HOSTILE}
    model = {"preset": "tiny", "name": HOSTILE}
    campaign = make(store, model=model, cluster=cluster, warnings=[HOSTILE])
    worker = store.workers.register(
        WorkerCreate(
            **dict.fromkeys(("name", "host", "device"), HOSTILE),
            cluster="local-cpu",
            num_nodes=1,
            devices_per_node=4,
            versions={HOSTILE: HOSTILE},
            allocation=AllocationBody(job_id=HOSTILE, launcher=HOSTILE),
        )
    )
    names = (field.name for field in dataclasses.fields(Environment))
    environment = Environment(**dict.fromkeys(names, HOSTILE))
    shape = CampaignSpec.from_mapping(store.campaigns.get(campaign).spec).model
    log = f"\x1b[31m{HOSTILE}\x1b[0m\x07\u202e"
    outcomes = [
        dataclasses.replace(completed(LAYOUTS[0], model=shape), environment=environment),
        failed("crashed", node=HOSTILE, message=HOSTILE, log_tail=log),
    ]
    for layout, outcome in zip(LAYOUTS, outcomes, strict=False):
        run_trial(store, campaign, layout, outcome, worker=worker.id)
    store.campaigns.update(campaign, notes=f"{HOSTILE}\n{HOSTILE}")
    return campaign


@pytest.fixture
def hostile_report(store: Store) -> str:
    """Of a campaign whose texts are attacks."""
    return report(store, store.campaigns.get(hostile_campaign(store)), START)


def test_hostile_text_in_a_report_is_escaped(hostile_report: str) -> None:
    text = Page(hostile_report).text
    assert text.count(HOSTILE) >= 15
    assert "\\u0007\\u202e" in text
    assert not any(character in text for character in "\x07\x1b\u202e")


def test_a_report_loads_and_runs_nothing(hostile_report: str) -> None:
    page = Page(hostile_report)
    assert page.tags <= ALLOWED
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        assert not attributes.keys() & {"href", "src", "xlink:href", "style", "srcset", "action"}
    (policy,) = [
        attributes["content"]
        for tag, attributes in page.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == POLICY
    assert "default-src 'none'" in policy
    style = hostile_report[hostile_report.index("<style>") : hostile_report.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_a_campaign_without_a_result_says_why(store: Store) -> None:
    campaign = make(store)
    page = page_of(store, campaign)
    assert "The campaign is RUNNING: what follows may change." in page.text
    assert "No layout has been measured to the end." in page.text
    assert "No trial has ended yet." in page.text
    assert "There is no analysis" in page.text

    for layout in LAYOUTS:
        run(store, campaign, failed("out_of_memory"), layout)
    store.campaigns.end(campaign, "COMPLETED", "exhausted", "no trial completed")
    page = page_of(store, campaign)
    assert "No layout has been measured to the end. no trial completed" in page.text
    assert "What follows may change" not in page.text
    assert num_told(page, "INFEASIBLE (out_of_memory)") == 4 + 4  # the history and the timeline


def test_a_report_has_the_levels_of_the_network(store: Store) -> None:
    node = CLUSTER["devices_per_node"]
    levels = [{"name": "node", "devices": node}, {"name": "rack", "devices": 8 * node}]
    campaign = make(store, cluster={**CLUSTER, "levels": levels})
    run_all(store, campaign, 2000.0, 1500.0, 1000.0, 500.0)
    text = page_of(store, campaign).text
    assert f"node {node}, rack {8 * node}" in text
    assert "Largest level of the network that each kind of group needs: none." in text


def imported(store: Store, cell: TableCell) -> int:
    described = {"model": cell.model.to_mapping(), "cluster": cell.cluster.to_mapping()}
    document = {**CAMPAIGN, "name": "theirs", **described, "strategy": "exhaustive"}
    spec = CampaignSpec.from_mapping(document)
    (made,) = store.imports.add([NewImport(spec=spec.to_mapping(), cell=cell)])
    return made.id


def test_an_imported_campaign_says_where_it_comes_from(store: Store) -> None:
    cell = read_table(TABLE).cells[0]
    page = page_of(store, imported(store, cell))
    assert "Imported, not measured here:" in page.text
    assert "Nothing was spent here" in page.text
    assert f"{len(cell.rows)} rows of a measurement table" in page.text
    assert "layout-tuner campaign import theirs.csv" in page.text


def test_memory_of_an_imported_trial_has_no_estimate(store: Store) -> None:
    campaign = imported(store, read_table(TABLE).cells[0])
    plot = TrialFacts.of(store, store.trials.find(campaign)[0].id).memory()
    assert plot is None or "estimated" not in plot.svg


@pytest.mark.parametrize(
    ("num_rows", "max_told"), [(120, 100), pytest.param(1200, 1000, marks=pytest.mark.slow)]
)
def test_the_report_of_a_long_campaign_stays_small(
    store: Store, monkeypatch: pytest.MonkeyPatch, num_rows: int, max_told: int
) -> None:
    monkeypatch.setattr(static_plot, "MAX_TOLD", max_told)
    cell = read_table(TABLE).cells[0]
    row = cell.rows[0]
    rows = [
        dataclasses.replace(
            row,
            number=number,
            tokens_per_s=row.tokens_per_s / (1 + number / 1e4),
            step_time_s=row.step_time_s * (1 + number / 1e4),
        )
        for number in range(1, num_rows + 1)
    ]
    campaign = imported(store, dataclasses.replace(cell, rows=tuple(rows)))
    html = report(store, store.campaigns.get(campaign), START)
    assert len(html) < 150_000
    assert any(kind.startswith("many") for kind in Page(html).kinds("path"))


def test_the_route_answers_a_document_that_browsers_only_show(lasting: TestClient) -> None:
    Api(lasting).submit()
    answer = answered(lasting.get("/v1/campaigns/first/report"), 200)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Disposition"] == 'inline; filename="first.html"'
    assert Page(answer.text).texts["h1"] == ["first"]


@pytest.fixture
def ranked(store: Store) -> RankedLayout:
    trial = store.trials.add(make_campaign(store), Layout())
    return RankedLayout(
        trial=trial,
        rank=1,
        value=300.0,
        value_low=300.0 / 1.1,
        value_high=300.0 * 1.1,
        step_time_s=1.0,
        step_time_low_s=0.9,
        step_time_high_s=1.1,
        trial_ids=(trial.id,),
        shortened=False,
        tied_with_first=True,
    )


def test_the_interval_of_a_ratio_combines_both_intervals(ranked: RankedLayout) -> None:
    half = dataclasses.replace(ranked, value=150.0, value_low=150.0 / 1.2, value_high=150.0 * 1.2)
    found = ratio_interval(ranked, half)
    reach = math.hypot(math.log(1.1), math.log(1.2))
    assert found == pytest.approx((2.0 / math.exp(reach), 2.0 * math.exp(reach)))
    # A value without error leaves the other's interval as it is.
    exact = dataclasses.replace(ranked, value_low=300.0, value_high=300.0)
    assert ratio_interval(ranked, exact) == pytest.approx((1 / 1.1, 1.1))
    # The lower end of a ratio has the upper end of its divisor.
    shrunk = dataclasses.replace(ranked, value_low=300.0 / 1.2, value_high=300.0)
    assert ratio_interval(exact, shrunk) == pytest.approx((1.0, 1.2))


def test_the_gain_names_the_layouts_that_it_leaves_out(ranked: RankedLayout, store: Store) -> None:
    campaign = store.campaigns.find()[0]

    def gain(ranked_layouts: int, shortened: int) -> str:
        summary = RankedSummary(
            num_ranked=ranked_layouts, num_shortened=shortened, median_complete=200.0
        )
        return gain_over_median(CampaignFinding(campaign=campaign, best=[ranked], summary=summary))

    assert gain(3, 0) == (
        "That is 1.50 times the median of the 3 layouts that were measured to the end. "
    )
    assert "7 more layouts were stopped early, since they were slower" in gain(10, 7)
    assert "times" not in gain(4, 2)  # two layouts have no median to speak of
    assert gain(2, 0) == ""
