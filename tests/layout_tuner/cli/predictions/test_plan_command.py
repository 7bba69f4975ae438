"""The command `plan`: for the campaign's trainer, with its baseline, refusals and comparisons."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.cli.main import main
from layout_tuner.predictions import plan_and_estimate
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.registry import ADAPTERS
from tests.kit.api import ends

SPACE = {
    "global_batch_size": 64,
    "num_nodes": 2,
    "tp": [2, 4, 8],
    "pp": [1, 2],
    "vpp": [1, 2],
    "micro_batch_size": 1,
    "recompute": "full",
    "zero_stage": 1,
    "sequence_parallel": False,
    "cp": 1,
    "precision": "bf16",
}
DOCUMENT: dict[str, Any] = {
    "name": "ours",
    "model": "gpt-1.3b",
    "cluster": {"preset": "a100-sxm", "num_nodes": 2},
    "space": SPACE,
    "budget": {"trials": 10},
}


@pytest.fixture(autouse=True)
def no_constants_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "data"))
    for name in ("LAYOUT_TUNER_URL", "LAYOUT_TUNER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


class Commands:
    """Commands over the file of one campaign."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.file = folder / "ours.yaml"
        self.file.write_text(yaml.safe_dump(DOCUMENT | changes))

    def run(self, *words: object) -> Result:
        return CliRunner().invoke(main, [str(word) for word in words])

    def plan(self, *flags: object) -> Any:
        """The document of the plan."""
        return json.loads(ends(self.run("plan", self.file, "--json", *flags), 0).stdout)

    def text(self, *flags: object) -> str:
        return " ".join(ends(self.run("plan", self.file, *flags), 0).stdout.split())


@pytest.mark.parametrize("trainer", ["megatron-lm", "nanotron", "embedded"])
def test_a_plan_predicts_for_the_trainer_of_the_campaign_as_the_estimate_of_it_does(
    tmp_path: Path, trainer: str
) -> None:
    commands = Commands(tmp_path, probe={"trainer": trainer})
    planned = commands.plan("--top", 3)
    assert planned["trainer"] == trainer
    for each in planned["layouts"]:
        estimate = plan_and_estimate.estimate(
            "gpt-1.3b", each["layout"], cluster="a100-sxm", software=trainer, data_dir=tmp_path
        )
        predicted = each["predicted"]
        assert predicted["step_time_s"] == pytest.approx(estimate.step_time_s)
        assert predicted["tokens_per_s"] == pytest.approx(estimate.tokens_per_s)
        assert predicted["peak_memory_bytes"] == pytest.approx(estimate.peak_memory_bytes, abs=1)
    assert planned == commands.plan("--top", 3, "--software", trainer)
    who = "the embedded trainer" if trainer == "embedded" else trainer
    assert commands.text().startswith(f"plan of ours for {who}: gpt-1.3b on a100-sxm")


def test_trainers_differ_and_software_goes_before_the_campaigns_trainer(tmp_path: Path) -> None:
    megatron = Commands(tmp_path, probe={"trainer": "megatron-lm"})
    own = megatron.plan("--software", "layout-tuner")
    assert own["trainer"] == "embedded"
    times = [plan["layouts"][0]["predicted"]["step_time_s"] for plan in (own, megatron.plan())]
    assert times[0] != pytest.approx(times[1], rel=0.01)
    assert own == Commands(tmp_path).plan()


def test_a_predicted_export_is_of_the_plan_for_the_campaigns_trainer(tmp_path: Path) -> None:
    commands = Commands(tmp_path, probe={"trainer": "megatron-lm"})
    best = commands.plan("--top", 1)["layouts"][0]

    def notes(*flags: object) -> list[str]:
        words = ("export", "--plan", commands.file, "--json", "--format")
        return list(json.loads(ends(commands.run(*words, *flags), 0).stdout)["notes"])

    of_megatron = notes("megatron-lm")
    assert of_megatron[0].endswith(best["layout_key"])
    step = f"predicted for megatron-lm: a step of {best['predicted']['step_time_s']:.4g} s"
    assert of_megatron[1].startswith(step)
    assert "this file is for" not in of_megatron[1]
    of_ours = notes("embedded")
    assert of_ours[1].startswith(step)
    assert of_ours[1].endswith("; this file is for layout-tuner, whose step and memory may differ")
    stated = notes("embedded", "--software", "nanotron")
    assert stated[1].startswith("predicted for nanotron: ")


def test_layouts_that_the_trainer_refuses_are_marked_with_its_own_sentence(
    tmp_path: Path,
) -> None:
    commands = Commands(tmp_path, probe={"trainer": "megatron-deepspeed"})
    planned = commands.plan("--top", 100)
    adapter, marked = ADAPTERS["megatron-deepspeed"], 0
    text = commands.text("--top", 100)
    for each in planned["layouts"]:
        layout = Layout.from_mapping(each["layout"])
        assert bool(each["refused"]) == (layout.vpp > 1), "it has no interleaved schedule"
        if each["refused"]:
            marked += 1
            job = TrainerJob(model=model_preset("gpt-1.3b"), layout=layout)
            assert each["refused"] == list(adapter.all_lacking(job).values())
            assert each["refused"][0] in text
    assert 0 < marked < len(planned["layouts"])
    assert text.count("refused)") == marked
    printed = commands.run("plan", commands.file, "--top", 100, "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert sum(bool(row["refused"]) for row in rows) == marked
    assert all(not each["refused"] for each in Commands(tmp_path).plan()["layouts"])


def test_an_unknown_trainer_is_warned_of_with_all_that_are_known(tmp_path: Path) -> None:
    text = Commands(tmp_path, probe={"trainer": "megatorn-lm"}).text()
    assert f"warning: the trainer is none of {', '.join(ADAPTERS)}: " in text
    assert "lists 'megatorn-lm'; correct probe.trainer if that is not meant" in text
    assert "is none of" not in Commands(tmp_path, probe={"trainer": "megatron-lm"}).text()
    assert "is none of" not in Commands(tmp_path).text()


@pytest.mark.parametrize("name", ["plan", "estimate", "export"])
def test_the_option_software_lists_every_trainer(tmp_path: Path, name: str) -> None:
    commands = Commands(tmp_path)
    said = " ".join(commands.run(name, "--help").stdout.split())
    _, _, option = said.partition("--software TEXT")
    for trainer in ADAPTERS:
        assert trainer in option.partition("[default:")[0], trainer


def test_unknown_software_is_warned_of_with_all_that_is_known(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    known = ", ".join(ADAPTERS)
    assert (
        f"'megatorn' is no known trainer, and no given measurement is of it: its memory is a guess; known are {known}"
        in commands.text("--software", "megatorn")
    )
    words = ("--model", "gpt-1.3b", "--cluster", "a100-sxm", "--tp", 8, "--num-microbatches", 4)
    done = commands.run("estimate", *words, "--software", "megatorn")
    assert known in " ".join(done.stderr.split())
    for software in ("axonn", "Megatron-LM runs", "layout-tuner"):
        assert (
            "no known trainer"
            not in commands.run("estimate", *words, "--software", software).stderr
        )


def test_the_baseline_has_a_row_and_a_sentence(tmp_path: Path) -> None:
    baseline = {"tp": 8, "pp": 1, "vpp": 1}
    commands = Commands(tmp_path, baseline=baseline)
    planned = commands.plan("--top", 1)
    row = planned["baseline"]["planned"]
    assert row["rank"] > 1
    printed = commands.run("plan", commands.file, "--top", 1, "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert [each["is_baseline"] for each in rows] == ["False", "True"]
    assert rows[1]["rank"] == str(row["rank"])
    assert f"the baseline is rank {row['rank']} of {planned['num_legal']}: rank 1 gives " in (
        commands.text("--top", 1)
    )
    assert Commands(tmp_path).plan()["baseline"] is None


def test_two_layouts_are_compared_by_their_keys(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    first, *_, last = (each["layout_key"] for each in commands.plan("--top", 5)["layouts"])
    found = commands.plan("--compare", last, first)["comparison"]
    assert (found["first"]["layout_key"], found["second"]["layout_key"]) == (last, first)
    text = commands.text("--compare", last, first)
    assert f"A is {last}, B is {first}" in text
    for part in (*found["step"], *found["memory"]):
        assert part["part"] in text
    refused = commands.run("plan", commands.file, "--compare", first, "tp8")
    ends(refused, 2, "'tp8' is not the key of a layout, such as n1-tp1-")


def test_two_layouts_are_compared_by_the_ranks_that_the_plan_prints(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    planned = commands.plan("--top", 1)
    last, first = planned["num_legal"], planned["layouts"][0]["layout_key"]
    found = commands.plan("--compare", last, 1)["comparison"]
    assert found["second"]["layout_key"] == first
    assert commands.plan("--compare", found["first"]["layout_key"], 1)["comparison"] == found
    for rank in (0, last + 1, "1" * 5000, "²"):
        refused = commands.run("plan", commands.file, "--compare", rank, 1)
        ends(refused, 2, f"is not a rank of the plan: it has 1 to {last}" if rank != "²" else "key")


def test_a_chance_is_never_said_to_be_certain(tmp_path: Path) -> None:
    text = Commands(tmp_path).text("--compare", 1, 7)
    assert "better with a chance of under 1 %" in text
    assert "better with a chance of over 99 %" in Commands(tmp_path).text("--compare", 7, 1)
    assert "probability 1.00" not in text
