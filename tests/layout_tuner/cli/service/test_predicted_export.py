"""Exports of predicted layouts, and what commands answer without a service."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.api.formatting import figure
from layout_tuner.cli.main import main
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, LOCAL_CPU
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import MODEL_PRESETS
from layout_tuner.search_spaces.tables import MeasurementTable, write_table
from tests.kit.api import ends
from tests.search_spaces.tables.tables import make_measured_cell

Run = Callable[..., Result]
CAMPAIGN = {
    "name": "big",
    "model": "llama-8b",
    "cluster": {"preset": "h100-sxm", "num_nodes": 4},
    "space": {"global_batch_size": 512},
    "budget": {"trials": 10},
}
LAYOUT = Layout(tp=8, num_microbatches=8, recompute="full", precision="bf16")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command where there is no service."""
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "none"))
    for name in ("LAYOUT_TUNER_URL", "LAYOUT_TUNER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


def test_the_winner_of_a_plan_is_exported_as_predicted_and_not_measured(
    run: Run, tmp_path: Path
) -> None:
    (file := tmp_path / "big.yaml").write_text(yaml.safe_dump(CAMPAIGN))
    as_json = ("plan", file, "--json", "--software")
    planned = json.loads(run(*as_json, "megatron-lm").stdout)
    out = tmp_path / "out"
    done = run("export", "--plan", file, "--rank", 2, "--format", "megatron-lm", "--out", out)
    ends(done, 0, "rank 2 of the plan", "for megatron-lm, predicted, not measured")
    script = (out / "megatron-lm.sh").read_text().splitlines()
    key = planned["layouts"][1]["layout_key"]
    assert script[1] == f"# predicted, not measured: rank 2 of the plan of big: {key}"
    best = json.loads(run("export", "--plan", file, "--format", "embedded", "--json").stdout)
    assert best["trial"] is None
    planned = json.loads(run(*as_json, "layout-tuner").stdout)
    layouts = (json.loads(best["files"][0]["content"]), planned["layouts"][0])
    exported, first = (Layout.from_mapping(each["layout"]) for each in layouts)
    assert exported == first
    assert best["notes"][0].startswith("predicted, not measured: rank 1 of the plan of big: ")


def test_the_best_job_of_a_plan_is_exported_with_its_settings(run: Run, tmp_path: Path) -> None:
    space = {"global_batch_size": 256, "job": {"moe_dispatcher": ["alltoall", "hybridep"]}}
    campaign = {**MIXTRAL, "space": space, "probe": {"trainer": "megatron-lm"}}
    (file := tmp_path / "mix.yaml").write_text(yaml.safe_dump(campaign))
    planned = json.loads(run("plan", file, "--json", "--top", 1).stdout)
    assert planned["layouts"][0]["layout"]["job"] == {"moe_dispatcher": "hybridep"}
    words = ("export", "--plan", file, "--format", "megatron-lm", "--json")
    script = json.loads(run(*words).stdout)["files"][0]["content"]
    assert "--moe-flex-dispatcher-backend hybridep" in script
    other = json.loads(run("plan", file, "--json", "--software", "layout-tuner").stdout)
    assert (other["num_jobs"], other["knobs"]) == (None, [])


def test_a_stated_job_is_exported_with_its_settings_or_they_are_named_as_lacking(run: Run) -> None:
    settings = JobSettings({"async_tp": True, "compile": True})
    layout = replace(LAYOUT, sequence_parallel=True, recompute="none", job=settings)
    words = ("export", "--model", "llama-8b", "--cluster", "h100-sxm", "--layout", layout.key)
    script = run(*words, "--format", "torchtitan-0.3", "--json").stdout
    assert "config.compile.enable = True" in script
    assert "config.compile.enable_async_tensor_parallel = True" in script
    ends(
        run(*words, "--format", "megatron-lm"),
        2,
        "megatron-lm lacks knobs of this layout; async_tp: ",
    )


def test_the_settings_of_a_plan_are_named_where_another_trainer_lacks_them(
    run: Run, tmp_path: Path
) -> None:
    space = {"global_batch_size": 512, "job": {"compile": [True]}}
    (file := tmp_path / "big.yaml").write_text(yaml.safe_dump({**CAMPAIGN, "space": space}))
    refused = run("export", "--plan", file, "--format", "megatron-lm", "--json")
    ends(refused, 2, "compile: megatron-lm has no knob compile; without it")


MIXTRAL = {
    "name": "mix",
    "model": "mixtral-8x7b",
    "cluster": {"preset": "h100-sxm", "num_nodes": 4},
    "space": {"global_batch_size": 256},
    "budget": {"trials": 10},
}


@dataclass(frozen=True, kw_only=True)
class PlanOfAMixture:
    """Runs `plan` and `export --plan` of one campaign with the same options."""

    file: Path
    printed: Callable[..., Any]
    """The document that a command prints without a service."""

    def best(self, *options: str) -> str:
        """The key of the best layout of the plan that is printed."""
        planned = self.printed("plan", str(self.file), "--top", "1", "--json", *options)
        return str(planned["layouts"][0]["layout_key"])

    def notes(self, *options: str) -> list[str]:
        """The notes on the layout that is exported."""
        words = ("export", "--plan", str(self.file), "--format", "megatron-lm", "--json")
        return list(self.printed(*words, *options)["notes"])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PlanOfAMixture:
    folder = tmp_path_factory.mktemp("mixture")
    (file := folder / "mix.yaml").write_text(yaml.safe_dump(MIXTRAL))
    nowhere = dict.fromkeys(("LAYOUT_TUNER_URL", "LAYOUT_TUNER_TOKEN_FILE"))
    runner = CliRunner(env={"LAYOUT_TUNER_DATA_DIR": str(folder / "none"), **nowhere})

    @cache
    def printed(*words: str) -> Any:
        return json.loads(runner.invoke(main, words).stdout)

    return PlanOfAMixture(file=file, printed=printed)


HEAD = "predicted, not measured: rank 1 of the plan of mix: "


def test_an_export_is_of_the_plan_for_its_format(mixture: PlanOfAMixture) -> None:
    notes = mixture.notes()
    assert notes[0] == HEAD + mixture.best("--software", "megatron-lm")
    assert notes[1].startswith("predicted for megatron-lm: a step of ")


def test_an_export_is_of_the_plan_for_the_stated_software(mixture: PlanOfAMixture) -> None:
    notes, ours = mixture.notes("--software", "layout-tuner"), mixture.best()
    assert ours != mixture.best("--software", "megatron-lm")
    assert notes[0] == HEAD + ours
    assert notes[1].startswith("predicted for layout-tuner: a step of ")


def test_an_export_is_of_the_plan_for_the_stated_cluster(
    mixture: PlanOfAMixture, tmp_path: Path
) -> None:
    (cluster := tmp_path / "two.yaml").write_text("{preset: a100-sxm, num_nodes: 4}\n")
    elsewhere = mixture.best("--software", "megatron-lm", "--cluster", str(cluster))
    assert mixture.notes("--cluster", str(cluster))[0] == HEAD + elsewhere


def test_an_export_says_how_sure_its_peak_is(mixture: PlanOfAMixture) -> None:
    peak = r", a peak of [\d.]+ GiB \(80 %: [\d.]+ GiB to [\d.]+ GiB\) that fits"
    assert re.search(peak, mixture.notes()[1])


def test_an_export_for_unknown_software_says_on_what_it_depends(mixture: PlanOfAMixture) -> None:
    assert "depends most on" not in mixture.notes()[1]
    assert "depends most on" in mixture.notes("--software", "a new trainer")[1]


def test_an_export_rests_on_the_measurements_of_its_plan(run: Run, tmp_path: Path) -> None:
    (file := tmp_path / "mix.yaml").write_text(yaml.safe_dump(MIXTRAL))
    layout = Layout(num_nodes=4, tp=4, pp=2, dp=4, num_microbatches=64, precision="bf16")
    model, cluster = MODEL_PRESETS["mixtral-8x7b"], CLUSTER_PRESETS["h100-sxm"]
    cell = make_measured_cell([layout], model, cluster, [40.0], source="Megatron-LM runs")
    (measured := tmp_path / "t.csv").write_text(write_table(MeasurementTable(cells=(cell,))))
    options = ("--software", "Megatron-LM runs", "--calibrate-from", measured)
    planned = json.loads(run("plan", file, "--top", 1, "--json", *options).stdout)["layouts"][0]
    words = ("export", "--plan", file, "--format", "megatron-lm", "--json")
    notes = json.loads(run(*words, *options).stdout)["notes"]
    assert notes[0].endswith(planned["layout_key"])
    step = figure(planned["predicted"]["step_time_s"])
    assert notes[1].startswith(f"predicted for Megatron-LM runs: a step of {step} s")
    assert json.loads(run(*words).stdout)["notes"][1] != notes[1]


def test_a_layout_is_exported_as_stated_though_one_like_it_is_predicted_to_be_faster(
    run: Run,
) -> None:
    without_ep = replace(LAYOUT, num_nodes=4, tp=1, pp=4, dp=8, zero_stage=1).key
    words = ("--model", "qwen3-30b-a3b", "--cluster", "h100-sxm", "--format", "megatron-lm")
    bundle = json.loads(run("export", *words, "--layout", without_ep, "--json").stdout)
    assert bundle["notes"][0].endswith(f"on h100-sxm: {without_ep}")


def test_any_layout_is_exported_in_fp8_to_those_who_have_it(run: Run) -> None:
    words = ("--model", "llama-8b", "--cluster", "h100-sxm", "--format", "deepspeed")
    bundle = json.loads(run("export", *words, "--layout", LAYOUT.key, "--json").stdout)
    assert bundle["notes"][0] == f"predicted, not measured: llama-8b on h100-sxm: {LAYOUT.key}"
    assert any(note.startswith("predicted for deepspeed: a step of") for note in bundle["notes"])
    key = replace(LAYOUT, precision="fp8").key
    words = ("export", "--model", "llama-8b", "--cluster", "h100-sxm", "--layout", key)
    done = run(*words, "--format", "megatron-lm", "--json")
    assert "--fp8-format hybrid" in done.stdout, done.output
    refused = run(*words, "--format", "embedded", "--json")
    ends(refused, 2, "precision=fp8 is not supported by the embedded trainer")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layout", "tp2"), "'tp2' is not the key of a layout, such as n1-tp1-"),
        (("--layout", LAYOUT.key.replace("z0", "z7")), "zero_stage=7 is not one of 0, 1"),
        (("--layout", LAYOUT.key.replace("tp8", "tp5")), "num_heads=32 is not divisible by tp=5"),
        ((), "--layout needs --model and --cluster too"),
        (("--layout", LAYOUT.key, "--rank", "1"), "--rank is for --plan"),
        (("first", "--layout", LAYOUT.key), "only one of them"),
        (
            ("first", "--software", "nanotron"),
            "--software and --calibrate-from are for the last two",
        ),
        (("--layout", LAYOUT.key, "--trial", "1"), "--trial and --nodes are for a CAMPAIGN"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(
    run: Run, words: tuple[str, ...], says: str
) -> None:
    named = ("--model", "llama-8b", "--cluster", "h100-sxm", "--format", "embedded")
    refused = run("export", *named, *words)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_kinds_of_layers_are_shown_in_few_lines(run: Run) -> None:
    for name, lines in (("nemotron-3-super-120b-a12b", 11), ("qwen3-next-80b-a3b", 3)):
        shown = run("model", "show", name).stdout
        assert yaml.safe_load(shown) == MODEL_PRESETS[name].to_mapping()
        after = shown.partition("layer_kinds:")[2]
        kinds = re.split(r"\n(?=[a-z])", after)[0]
        assert kinds.count("\n") + 1 <= lines
    assert "- {gated_delta_net+experts: 3}\n- full+experts" in kinds


def test_formats_models_and_clusters_are_listed_without_a_service(run: Run) -> None:
    ends(run("export", "--list"), 0, "megatron-lm")
    models = run("model", "list")
    assert all(name in models.stdout for name in MODEL_PRESETS)
    assert "no service was found; these are the presets" in models.stderr
    clusters = json.loads(run("cluster", "list", "--json").stdout)
    assert {each["name"] for each in clusters["clusters"]} == {LOCAL_CPU, *CLUSTER_PRESETS}
    shape = yaml.safe_load(run("model", "show", "llama-8b").stdout)
    assert shape == MODEL_PRESETS["llama-8b"].to_mapping()
    machine = yaml.safe_load(run("cluster", "show", "frontier").stdout)
    assert machine["num_nodes"] == 9856
    ends(run("model", "show", "ours"), 1, "no service runs on the data directory")


def test_a_named_service_that_does_not_answer_is_not_replaced_by_presets(
    run: Run, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("lt_token\n")
    refused = ends(run("model", "list", "--url", "http://127.0.0.1:9", "--token-file", token), 1)
    assert refused.stdout == ""
