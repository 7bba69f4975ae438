"""`layout_tuner.plan` and `layout_tuner.estimate`: without a service, as the commands print."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import layout_tuner
from layout_tuner import LayoutEstimate, Plan, SearchSpaceError, TrainingJob
from layout_tuner.cli.main import main
from layout_tuner.search_spaces.clusters.calibration_file import write_constants
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.markdown import ROOT
from tests.search_spaces.layouts.test_vocabulary import make_constants

CAMPAIGN: dict[str, Any] = {
    "name": "planned",
    "model": "gpt-1.3b",
    "cluster": {"preset": "frontier", "num_nodes": 2},
    "space": {"global_batch_size": 64, "num_nodes": 2, "precision": "bf16"},
    "budget": {"trials": 12},
}
KNOBS = {"tp": 2, "dp": 8, "global_batch_size": 64}
JOB = TrainingJob(tokens=10**10, num_nodes=4)


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "campaign.yaml").write_text(yaml.safe_dump(CAMPAIGN))
    return path


def printed(*words: object) -> Any:
    done = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_a_plan_is_the_one_that_the_command_prints(file: Path) -> None:
    plan = layout_tuner.plan(file, software="megatron-lm", cluster="a100-sxm", top=3, job=JOB)
    assert isinstance(plan, Plan)
    flags = ("--software", "megatron-lm", "--cluster", "a100-sxm", "--top", 3)
    assert plain(asdict(plan)) == printed("plan", file, *flags, "--tokens", "10B", "--nodes", 4)
    assert layout_tuner.plan(str(file)) == layout_tuner.plan(CAMPAIGN)
    assert layout_tuner.plan(file, software="layout-tuner") == layout_tuner.plan(file)
    assert layout_tuner.plan(file, software="megatron-lm") != layout_tuner.plan(file)


def test_an_estimate_is_the_one_that_the_command_prints(tmp_path: Path) -> None:
    one = layout_tuner.estimate("gpt-1.3b", KNOBS, cluster="frontier", job=JOB)
    assert isinstance(one, LayoutEstimate)
    flags = ("--cluster", "frontier", "--tp", 2, "--dp", 8, "--global-batch-size", 64)
    job = ("--tokens", "10B", "--nodes", 4)
    assert plain(one.to_mapping()) == printed("estimate", "--model", "gpt-1.3b", *flags, *job)
    assert (one.num_nodes, one.num_devices) == (2, 16)
    assert one.job_estimate is not None
    (model := tmp_path / "model.yaml").write_text("preset: gpt-1.3b\nnum_layers: 12\n")
    shallow = layout_tuner.estimate(model, one.layout, cluster="frontier")
    assert shallow.layout == one.layout
    assert shallow.step_time_s < one.step_time_s
    assert shallow == layout_tuner.estimate(
        {"preset": "gpt-1.3b", "num_layers": 12}, one.layout, cluster={"preset": "frontier"}
    )


def test_constants_that_were_measured_here_are_used(file: Path, data_dir: Path) -> None:
    before = layout_tuner.estimate("gpt-1.3b", KNOBS, cluster="frontier")
    slow = {"peak_flops_per_s": {"bf16": 1e9}}
    write_constants(data_dir, make_constants(cluster="frontier", constants=slow))
    after = layout_tuner.estimate("gpt-1.3b", KNOBS, cluster="frontier")
    assert after.step_time_s > 100 * before.step_time_s
    assert layout_tuner.plan(file).knowledge.basis == "calibration"
    elsewhere = layout_tuner.plan(file, data_dir=data_dir / "none")
    assert elsewhere.knowledge.basis == "data sheets"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tp": 2}, "give num_microbatches or global_batch_size"),
        ({"tp": "2", "num_microbatches": 1}, "tp='2' is not a whole number"),
        ({"tpp": 2, "num_microbatches": 1}, "unknown knob 'tpp' (did you mean 'tp'?)"),
        ({"tp": 7, "num_microbatches": 1}, "num_heads=16 is not divisible by tp=7"),
        ([2], "the layout is [2], not a mapping"),
        (Layout(tp=7, num_nodes=1), "num_heads=16 is not divisible by tp=7"),
    ],
)
def test_a_wrong_layout_is_one_error(layout: Any, says: str) -> None:
    with pytest.raises(SearchSpaceError, match=re.escape(says)):
        layout_tuner.estimate("gpt-1.3b", layout, cluster="frontier")


def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for call in (
        lambda: layout_tuner.plan(tmp_path / "none"),
        lambda: layout_tuner.plan(CAMPAIGN, cluster=tmp_path / "none"),
        lambda: layout_tuner.plan(CAMPAIGN, calibrate_from=[str(tmp_path / "none")]),
        lambda: layout_tuner.plan(CAMPAIGN, calibrate_from=tmp_path / "none"),
        lambda: layout_tuner.estimate(tmp_path / "none", KNOBS),
    ):
        with pytest.raises(
            SearchSpaceError, match=f"{tmp_path}/none: cannot be read: No such file"
        ):
            call()


def test_the_examples_of_the_guide_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/guides/plan.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    for program in programs:
        exec(program, {})
    plan, one, of_job = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ n\d+-tp\S+", of_job)
    assert re.fullmatch(r"n\d+-tp\S+ [\d.]+ [\d.]+", plan)
    assert re.fullmatch(r"[\d.]+ 0\.\d+ [\d.]+", one)
