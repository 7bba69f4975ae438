from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from search_spaces.belief.plan import make_plan
from search_spaces.belief.plan_text import plan_lines
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.estimates.time import step_time_s
from search_spaces.spec.presets.calibration_file import MeasuredConstants, write_constants
from search_spaces.statistics.job_duration import TrainingJob
from search_spaces.tables import MeasurementTable, write_table
from tests.kit.campaigns import space_of
from tests.search_spaces.tables.tables import make_measured_cell
from tuner.estimate.commands import estimate
from tuner.estimate.plan_command import plan

DOCUMENT: dict[str, Any] = {
    "name": "planned",
    "model": "gpt-1.3b",
    "cluster": {"preset": "frontier", "num_nodes": 4},
    "space": space_of(
        global_batch_size=64,
        num_nodes=[1, 2],
        tp=[1, 2, 4, 8],
        pp=[1, 2, 4],
        micro_batch_size=[1, 2],
        recompute=["none", "full"],
        precision="bf16",
    ),
    "budget": {"trials": 12},
}


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    return path


def run(*flags: object) -> Result:
    return CliRunner().invoke(plan, [str(flag) for flag in flags])


def printed(*flags: object) -> str:
    result = run(*flags)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_is_the_plan_of_the_campaign(campaign: Path) -> None:
    expected = make_plan(
        CampaignSpec.from_mapping(DOCUMENT),
        top=3,
        probe_start_s=5.0,
        job=TrainingJob(tokens=3 * 10**11, num_nodes=16, mtbf_hours=1000.0),
    )
    flags = ("--top", 3, "--probe-start-s", 5, "--tokens", "300B", "--nodes", 16)
    document = json.loads(printed(campaign, *flags, "--mtbf-hours", 1000, "--json"))
    assert document == json.loads(json.dumps(asdict(expected)))
    assert printed(campaign, "--format", "json") == printed(campaign, "--json")


def test_in_a_terminal_of_100_columns_no_line_is_longer_and_nothing_is_cut() -> None:
    spec = CampaignSpec.from_mapping(DOCUMENT)
    planned = make_plan(spec, job=TrainingJob(tokens=10**12, num_nodes=4))
    lines = list(plan_lines(planned, 100))
    assert [line for line in lines if len(line) > 100] == []
    text = " ".join(" ".join(lines).split())
    for each in planned.layouts:
        assert f" {each.predicted.fits:.2f} " in text
        assert f" {each.predicted.model_tflops_per_device:.4g} " in text


def test_the_text_says_that_it_is_predicted_and_what_was_assumed(campaign: Path) -> None:
    text = printed(campaign, "--tokens", "1.4T", "--nodes", 4)
    for words in (
        "Every figure of a layout is predicted; nothing was run.",
        "predicted: the best 10 of",
        "illegal by world_size, as: tp*pp*dp=",
        "the budget pays for 12 probes",
        "predicted from data sheets alone",
        "training job: 1.4T tokens on 4 nodes",
        "assumed: a node fails every 6,000 h, a checkpoint takes 60 s, a restart 600 s",
    ):
        assert words in text, text
    for each in make_plan(CampaignSpec.from_mapping(DOCUMENT)).layouts:
        (line,) = (one for one in text.splitlines() if each.layout_key.replace("-", " ") in one)
        assert line.split()[0] == str(each.rank), "in a file no layout is wrapped"
        assert f"{each.limited_by} " in line
    unwrapped = " ".join(text.split())
    assert "measured" not in unwrapped.replace("collectives as measured in arXiv", "")


def test_csv_has_a_row_a_layout_and_says_what_is_predicted(campaign: Path) -> None:
    flags = ("--top", 40, "--tokens", "1B", "--nodes", 2)
    # The jobs of layouts that do not divide over 5 nodes have a reason instead of figures.
    text = printed(campaign, "--format", "csv", *flags)
    rows = list(csv.DictReader(io.StringIO(text)))
    document = json.loads(printed(campaign, "--json", *flags))
    assert len(rows) == 40
    for row, each in zip(rows, document["layouts"], strict=True):
        assert row["layout_key"] == each["layout_key"]
        assert row["tp"] == str(each["layout"]["tp"])
        assert float(row["predicted_step_time_s"]) == each["predicted"]["step_time_s"]
        assert row["predicted_limited_by"] == each["limited_by"]
        assert row["job_problem"] == each["job"]["problem"]
        duration = each["job"]["duration"]
        assert row["predicted_job_days"] == ("" if duration is None else str(duration["days"]))


def test_measurements_of_a_table_calibrate_it(campaign: Path, tmp_path: Path) -> None:
    spec = CampaignSpec.from_mapping(DOCUMENT)
    legal = spec.legal_set()
    measured = [legal.layout(position) for position in range(0, len(legal), 6)]
    cells = []
    for devices in (8, 16):
        layouts = [layout for layout in measured if layout.num_devices == devices]
        steps = [2.0 * step_time_s(each, spec.model, spec.cluster).item() for each in layouts]
        source = "another trainer"
        cells.append(make_measured_cell(layouts, spec.model, spec.cluster, steps, source=source))
    path = tmp_path / "measured.csv"
    path.write_text(write_table(MeasurementTable(cells=tuple(cells))))

    flags = (campaign, "--json", "--software", "another trainer")
    alone = json.loads(printed(*flags, "--top", 200))
    informed = json.loads(printed(*flags, "--top", 20, "--calibrate-from", path))
    assert informed["knowledge"]["basis"] == "measurements"
    assert informed["knowledge"]["num_step_times"] == len(measured)
    times = {each["layout_key"]: each["predicted"]["step_time_s"] for each in alone["layouts"]}
    for each in informed["layouts"]:
        ratio = each["predicted"]["step_time_s"] / times[each["layout_key"]]
        assert ratio == pytest.approx(2.0, rel=0.15)
    some = f"{path}:num_devices=8"
    fewer = json.loads(printed(*flags, "--top", 1, "--calibrate-from", some))
    assert 0 < fewer["knowledge"]["num_step_times"] < len(measured)


def test_measured_constants_of_the_cluster_are_used(
    campaign: Path, no_constants_of_this_machine: Path
) -> None:
    before = json.loads(printed(campaign, "--json"))
    constants = {"peak_flops_per_s": {"bf16": 25e12}}
    write_constants(
        no_constants_of_this_machine,
        MeasuredConstants(
            cluster="frontier", host="node1", measured_at="2026-01-01", constants=constants
        ),
    )
    after = json.loads(printed(campaign, "--json"))
    assert before["knowledge"]["basis"] == "data sheets"
    assert after["knowledge"]["basis"] == "calibration"
    best = (each["layouts"][0]["predicted"]["tokens_per_s"] for each in (before, after))
    assert next(best) > 2 * next(best)


def test_another_cluster_takes_the_place_of_the_campaigns(campaign: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("preset: frontier\nname: half\nnum_nodes: 2\ndevices_per_node: 4\n")
    document = json.loads(printed(campaign, "--cluster", path, "--json", "--top", 100))
    assert document["cluster"] == "half"
    assert {each["layout"]["tp"] for each in document["layouts"]} == {1, 2, 4}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tokens", "many"), "is not a number of tokens, such as 1.4T, 300B or 2e9"),
        (("--nodes", 4), "nodes describe a training job; say its tokens too, such as 300B"),
        (("--tokens", "1B", "--nodes", 0), "nodes: 0 is not a whole number of at least 1"),
        (("--json", "--format", "csv"), "--json and --format csv exclude each other"),
        (("--calibrate-from", "nothing.csv"), "nothing.csv"),
        (("--cluster", "fronteir"), "unknown cluster 'fronteir'"),
        (("--top", 0), "0 is not in the range"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    campaign: Path, flags: tuple[object, ...], said: str
) -> None:
    result = run(campaign, *flags)
    assert result.exit_code == 2
    assert said in result.stderr


def test_all_wrong_fields_of_the_campaign_are_said(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT | {"model": "gpt-9", "budget": {"trials": 0}}))
    result = run(path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "error: model: unknown model 'gpt-9'" in result.stderr
    assert "error: budget.trials: 0 is not" in result.stderr


def test_an_estimate_of_one_layout_predicts_its_training_job_too() -> None:
    flags = ["--model=gpt-1.3b", "--cluster=frontier", "--tp=2", "--dp=4", "--num-microbatches=16"]
    result = CliRunner().invoke(estimate, [*flags, "--tokens", "10B", "--nodes", "4", "--json"])
    document = json.loads(result.stdout)
    job = document["job"]
    assert job["tokens"] == 10**10
    assert job["layout_key"].startswith("n4-tp2-pp1-dp16-vpp1-mbs1-mb4-")
    assert job["step_source"] == "predicted"
    text = CliRunner().invoke(estimate, [*flags, "--tokens", "10B"]).stdout
    assert "training job: 10B tokens on the layout's nodes" in text
    assert json.loads(CliRunner().invoke(estimate, [*flags, "--json"]).stdout)["job"] is None
