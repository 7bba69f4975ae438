"""Measurement tables over HTTP and on the command line: in as campaigns, out as tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from layout_tuner.api.campaigns import imports
from layout_tuner.predictions.belief.plan_parts.comparison_text import ratio_words
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables import read_table
from tests.kit.api import CAMPAIGN, Api, Command, answered, ends
from tests.kit.store import failed
from tests.results_db.campaigns.test_imported_tables import unnumbered, varied_rows
from tests.search_spaces.tables.tables import layouts, make_row, make_text


def post(api: Api, text: str, status: int = 201, **query: Any) -> Any:
    path, headers = "/v1/campaigns/import", {"Content-Type": "text/csv"}
    answer = api.http.post(path, content=text, headers=headers, params=query)
    return answered(answer, status).json()


def two_cells() -> str:
    larger = [
        {**layout, "num_microbatches": 2 * layout["num_microbatches"]} for layout in layouts()
    ]
    return make_text(
        *(make_row(**layout) for layout in layouts()),
        *(make_row(**layout, global_batch_size=16, step_time_s=0.9) for layout in larger),
    )


def test_a_table_becomes_a_campaign_that_has_ended(api: Api) -> None:
    answer = post(api, make_text(*varied_rows()), name="ended")
    (campaign,) = answer["campaigns"]
    found = [campaign[field] for field in ("name", "state", "reason")]
    assert found == ["ended", "COMPLETED", "imported"]
    assert campaign["progress"]["best_trial"] == 2
    assert "sequence_parallel is not stated: 0 stands in (1 row)" in answer["notes"]
    assert answer["notes"] == api.get("/campaigns/ended")["warnings"]
    page = api.get("/campaigns/ended/leaderboard")
    assert [trial["number"] for trial in page["trials"]][:2] == [2, 1]
    assert page["trials"][0]["measurement"]["mfu"] is None
    trials = api.get("/campaigns/ended/trials")["trials"]
    assert [trial["state"] for trial in trials][4:6] == ["INFEASIBLE", "FAILED"]


def test_a_table_of_more_rows_than_the_limit_is_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "MAX_IMPORTED_ROWS", 3)
    problem = post(api, make_text(*varied_rows()), 422)
    assert "1 cells of 8 rows are more than 200 cells or 3 rows" in problem["detail"]


def test_an_imported_campaign_says_where_it_comes_from(api: Api, command: Command) -> None:
    source = "simulated a100-1.3b, seed 3"
    post(api, make_text(*(make_row(**each, source=source) for each in layouts())), name="named")
    assert api.get("/campaigns/named/leaderboard")["source"] == source
    assert "imported, not measured here" in command("leaderboard", "named").output
    rows = api.table("/campaigns/named/leaderboard", format="csv")
    assert {row["source"] for row in rows} == {source}
    problem = api.get("/campaigns/named/analysis", status=404)
    assert "'named' is imported, and has no analysis" in problem["detail"]


def test_two_imported_layouts_are_compared_for_the_software_of_their_source(api: Api) -> None:
    source = "Megatron-LM runs"
    rows = [make_row(**each, source=source) for each in layouts()]
    post(api, make_text(*rows), name="compared")
    campaign = api.store.campaigns.by_name("compared")
    both = [api.store.trials.by_number(campaign.id, number).layout for number in (1, 2)]
    text = api.http.get("/compare?trials=compared/1+2").text
    ours, theirs = (
        ratio_words(api.store.plans.compare(campaign, *both, software=software))
        for software in (None, source)
    )
    assert ours != theirs
    assert theirs in text
    assert ours not in text


@pytest.mark.parametrize(
    "source", ["simulated a100-1.3b, seed 3", "Simulated by hand", "SIMULATED"]
)
def test_an_import_that_says_it_is_simulated_is_marked_and_calibrates_nothing(
    api: Api, source: str
) -> None:
    name = source.replace(" ", "-").replace(",", "")
    post(api, make_text(*(make_row(**each, source=source) for each in layouts())), name=name)
    assert api.get(f"/campaigns/{name}")["warnings"][0].startswith("its source says that the table")
    said = f"the imported table of campaign '{name}' is simulated: it calibrates no campaign"
    document = {**CAMPAIGN, "name": f"from-{name}", "start_from": [name]}
    answered(api.http.post("/v1/campaigns", json=document), 422, said)
    page = answered(api.http.get(f"/campaigns/{name}"), 200).text
    assert "its source says that the table is simulated" in page


def test_cells_become_campaigns_named_after_what_they_are_and_are_selected_by_keys(
    api: Api,
) -> None:
    def names(answer: Any) -> list[str]:
        return [campaign["name"] for campaign in answer["campaigns"]]

    cells = ["small-gpt-8xtestbox-s512-b8", "small-gpt-8xtestbox-s512-b16"]
    assert names(post(api, two_cells())) == cells
    assert names(post(api, two_cells(), name="theirs")) == ["theirs-1", "theirs-2"]
    answer = post(api, two_cells(), name="large", cell=["global_batch_size=16"])
    assert names(answer) == ["large"]
    trials = api.get("/campaigns/large/trials")["trials"]
    assert {trial["global_batch_size"] for trial in trials} == {16}

    api.submit(name="taken-2")
    assert "'taken-2' exists already" in post(api, two_cells(), 409, name="taken")["detail"]
    assert names(api.get("/campaigns", name_contains="taken")) == ["taken-2"], "nothing is kept"


def test_a_legal_winner_is_exported_and_an_illegal_one_says_why(api: Api) -> None:
    llama = {"family": "llama", "num_microbatches": 8, "micro_batch_size": 1}
    legal = make_row(**layouts()[0], recompute="full", precision="bf16", family="llama")
    across = make_row(**llama, tp=8, pp=1, dp=1, vpp=3, step_time_s=0.3)
    post(api, make_text(legal, across), name="exported")
    exported = api.get("/campaigns/exported/exports", format="trainer", trial=1)
    assert exported["trial"] == 1
    assert exported["notes"][0] == "the layout was not measured here: it is imported, from made up"
    assert "rotary_base=10000 is assumed" in exported["notes"][1]
    problem = api.get("/campaigns/exported/exports", status=409, format="trainer")
    assert "trial 2 of the imported campaign 'exported' is not legal here: " in problem["detail"]
    assert "num_layers=8" in problem["detail"]


def test_the_table_of_a_measured_campaign_has_the_failures_of_its_layouts(api: Api) -> None:
    campaign = api.submit()
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=512.0)
    broken = api.store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    api.store.trials.add(campaign["id"], Layout(dp=2, num_microbatches=4))
    api.report(worker, api.lease(worker), failed("host_resource"))
    api.complete(worker, "first", Layout(pp=2, num_microbatches=8), oversubscribed=True)
    rows = api.table("/campaigns/first/table")
    assert [row["status"] for row in rows] == ["completed", "out_of_memory"]
    assert (rows[1]["tp"], rows[1]["tokens_per_s"]) == ("2", "")
    assert api.get(f"/trials/{broken.id}")["state"] == "INFEASIBLE"


def test_the_commands_import_a_table_print_it_again_and_say_which_row_is_wrong(
    command: Command, tmp_path: Path
) -> None:
    (file := tmp_path / "theirs.csv").write_text(two_cells())
    cell = ("--cell", "global_batch_size=8")
    done = command("campaign", "import", str(file), "--name", "printed", *cell)
    ends(done, 0, "campaign printed imported: ", "note: family is not stated")
    assert f"imported: {len(layouts())} layouts" in command("campaign", "show", "printed").output
    printed = command("campaign", "table", "printed").output
    assert unnumbered(read_table(printed)) == unnumbered(read_table(two_cells()))[:1]
    board = command("leaderboard", "printed").output
    assert f"of {len(layouts())} by tokens_per_s_per_device" in board
    as_json = command("campaign", "import", str(file), "--name", "n", "--json")
    assert [each["name"] for each in json.loads(as_json.output)["campaigns"]] == ["n-1", "n-2"]

    file.write_text(make_text(make_row(), make_row(tp=3)))
    ends(command("campaign", "import", str(file)), 2, "row 2 (line 3): tp*pp*dp=3*2*2=12")


TECHNIQUES = [
    make_row(technique=name, step_time_s=step, **layout)
    for place, layout in enumerate(layouts()[:4])
    for name, step in (("eager", 0.6 + place / 100), ("compile", 0.5 + place / 100))
]
"""Rows in pairs of one layout, which differ in a column that the tuner does not know."""


@pytest.fixture(scope="module")
def parted(api: Api) -> list[str]:
    """The notes on the import of the rows above as the campaign `parted`."""
    return list(post(api, make_text(*TECHNIQUES), name="parted")["notes"])


def test_the_notes_name_an_unknown_column_that_parts_layouts(parted: list[str]) -> None:
    assert "differ in 'technique' ('eager', 'compile')" in "\n".join(parted)


@pytest.mark.usefixtures("parted")
def test_layouts_that_an_unknown_column_parts_are_ranked_apart(api: Api) -> None:
    page = api.get("/campaigns/parted/leaderboard")
    assert page["total"] == len(TECHNIQUES)
    assert page["trials"][0]["layout_key"].endswith("[technique=compile]")


@pytest.mark.usefixtures("parted")
def test_leaderboards_show_an_unknown_column_that_parts_layouts(api: Api, command: Command) -> None:
    shown = ends(command("leaderboard", "parted"), 0).stdout
    assert "technique=compile" in shown
    assert "technique=eager" in shown
    assert "technique=eager" in api.http.get("/campaigns/parted").text


@pytest.mark.usefixtures("parted")
def test_a_leaderboard_with_variants_is_read_back(command: Command) -> None:
    again = read_table(ends(command("leaderboard", "parted", "--csv"), 0).stdout)
    assert again.aside_columns == ("variant",)
    assert len(again.cells[0].merged) == len(TECHNIQUES)


@pytest.mark.usefixtures("parted")
def test_a_table_with_an_unknown_column_is_printed_as_imported(api: Api) -> None:
    printed = api.http.get("/v1/campaigns/parted/table").text
    assert unnumbered(read_table(printed)) == unnumbered(read_table(make_text(*TECHNIQUES)))


def test_a_taken_name_says_by_which_option_another_is_given(api: Api) -> None:
    post(api, make_text(make_row()), name="twice")
    refused = post(api, make_text(make_row()), 409, name="twice")["detail"]
    assert "choose another name: `name` in the document, or --name of `campaign import`" in refused


EXCHANGES = [make_row(a2a=each, step_time_s=s) for each, s in (("old", 2.0), ("new", 0.5))]
"""Rows of one layout, which differ in a column that is a job knob."""
EXCHANGE = {"kind": "word", "values": ["old", "new"], "default": "old", "touches": ["tp"]}


@pytest.fixture(scope="module")
def with_knob(api: Api) -> Api:
    """The rows above are imported as the campaign `jobs`, with their column as a job knob."""
    knobs = json.dumps({"exchange": EXCHANGE})
    post(api, make_text(*EXCHANGES), knob="a2a=exchange", knobs=knobs, name="jobs")
    return api


def test_a_column_of_a_table_is_declared_a_job_knob(
    with_knob: Api, command: Command, tmp_path: Path
) -> None:
    table, knobs = tmp_path / "jobs.csv", tmp_path / "knobs.yaml"
    table.write_text(make_text(*EXCHANGES))
    knobs.write_text("exchange: {kind: word, values: [old, new], default: old, touches: [tp]}\n")
    asked = ("--knob", "a2a=exchange", "--knobs", str(knobs))
    ends(command("campaign", "import", str(table), "--name", "same-jobs", *asked), 0)
    for name in ("jobs", "same-jobs"):
        space = with_knob.get(f"/campaigns/{name}")["spec"]["space"]
        assert space["job"] == {"exchange": {"search": ["old", "new"], **EXCHANGE}}, name


def test_rows_that_differ_in_a_job_knob_are_two_trials(with_knob: Api) -> None:
    keys = [each["layout_key"] for each in with_knob.get("/campaigns/jobs/trials")["trials"]]
    assert sorted(key.partition("~")[2] for key in keys) == ["", "exchange.new"]
    assert with_knob.get("/campaigns/jobs")["progress"]["best_trial"] == 2


def test_tables_of_an_import_state_its_job_knob(with_knob: Api) -> None:
    (cell,) = read_table(with_knob.http.get("/v1/campaigns/jobs/table").text).cells
    assert [row.layout.job.to_mapping() for row in cell.rows] == [{}, {"exchange": "new"}]
    board = with_knob.table("/campaigns/jobs/leaderboard", format="csv")
    assert [row["job.exchange"] for row in board] == ["new", ""]
    written = with_knob.http.get("/v1/campaigns/jobs/leaderboard?format=parquet").content
    assert parquet.read_table(io.BytesIO(written))["job.exchange"].to_pylist() == ["new", None]


def test_a_job_knob_that_a_row_leaves_open_is_no_choice(api: Api) -> None:
    old, new = EXCHANGES
    post(api, make_text(old, {**new, "a2a": ""}), knob="a2a", name="unknown")
    page = api.http.get("/campaigns/unknown").text
    assert 'value="old"' in page
    assert ">None<" not in page
    assert 'value="None"' not in page


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"knob": "b2b"}, "there is no column 'b2b', which is declared a job knob"),
        (
            {"knob": "a2a", "knobs": '{"a2a": {"kind": "word"}}'},
            "a2a.values: the field is missing",
        ),
    ],
    ids=["no column", "no values"],
)
def test_a_wrong_declaration_of_a_column_is_refused(
    api: Api, asked: dict[str, str], words: str
) -> None:
    assert words in post(api, make_text(*EXCHANGES), 422, **asked)["detail"]
