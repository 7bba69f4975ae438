from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from layout_tuner.cli.predictions.estimate import estimate
from layout_tuner.cli.predictions.plan import plan
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.predictions.belief.plan_text import plan_lines
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.calibration_file import write_constants
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.tables import MeasurementTable, read_table, write_table
from layout_tuner.terminal.plurals import figure
from layout_tuner.units import GIB
from tests.kit.campaigns import space_of
from tests.kit.layouts import filled_layouts
from tests.search_spaces.layouts.test_vocabulary import make_constants
from tests.search_spaces.tables.tables import make_measured_cell

MODEL = model_preset("gpt-1.3b")
CLUSTER = CLUSTER_PRESETS["frontier"]
SOURCE = "another trainer"


@pytest.fixture(autouse=True)
def no_constants_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory in which measured constants are looked for."""
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def run(*flags: object) -> Result:
    return CliRunner().invoke(estimate, [str(flag) for flag in flags])


def report(*flags: object) -> dict[str, Any]:
    result = run("--json", *flags)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def table(tmp_path: Path, name: str = "table.csv", *, slower: float = 1.5) -> Path:
    """A cell in which all steps take half as long again as the estimate says."""
    layouts = filled_layouts(
        16,
        global_batch=64,
        fixed={"num_nodes": 2, "recompute": "full", "precision": "fp16"},
        tp=(1, 2, 4),
        pp=(1, 2, 4),
        micro_batch_size=(1, 2),
    )
    steps = [slower * step_time_s(layout, MODEL, CLUSTER).item() for layout in layouts]
    peaks = [
        1.2 * max(stage.total_bytes for stage in stage_memory(layout, MODEL)) for layout in layouts
    ]
    cell = make_measured_cell(layouts, MODEL, CLUSTER, steps, peaks, source=SOURCE)
    path = tmp_path / name
    path.write_text(write_table(MeasurementTable(cells=(cell,))))
    return path


LAYOUT = (
    "--model=gpt-1.3b",
    "--cluster=frontier",
    "--tp=2",
    "--pp=4",
    "--dp=2",
    "--precision=bf16",
    "--num-microbatches=8",
)


def test_a_layout_has_its_memory_by_stage_and_parts_that_add_up_to_its_step() -> None:
    found = report(*LAYOUT)
    assert [stage["stage"] for stage in found["stages"]] == [0, 1, 2, 3]
    assert found["peak_memory_bytes"] == max(stage["peak_bytes"] for stage in found["stages"])
    seconds = sum(part["seconds"] for part in found["time_parts"])
    assert seconds == pytest.approx(found["step_time_s"])
    assert found["step_time_low_s"] < found["step_time_s"] < found["step_time_high_s"]
    assert 0.9 < found["fits"] <= 1.0
    assert found["layout"]["num_nodes"] == 2
    assert "not calibrated: the constants" in found["warnings"][0]
    too_large = ("--model=gpt-22b", "--cluster=frontier", "--dp=8", "--num-microbatches=1")
    assert report(*too_large)["fits"] < 0.01


def test_every_degree_takes_devices_and_so_nodes() -> None:
    assert report(*LAYOUT, "--cp=2", "--pp=2")["layout"]["num_nodes"] == 2
    found = report(*LAYOUT, "--cp=2", "--tp-columns=2")
    assert (found["layout"]["num_nodes"], found["num_devices"]) == (8, 64)


def test_the_batch_may_be_stated_instead_of_its_micro_batches_and_no_precision() -> None:
    found = report(*LAYOUT)
    flags = [flag for flag in LAYOUT if "microbatches" not in flag]
    assert report(*flags, "--global-batch-size=16") == found
    of_the_cluster = [flag for flag in LAYOUT if "precision" not in flag]
    assert report(*of_the_cluster) == found, "the precision is the cluster's where none is given"
    assert (found["num_nodes"], found["num_devices"], found["global_batch_size"]) == (2, 16, 16)
    assert found["precision"] == "bf16"


def test_a_format_that_the_device_lacks_is_refused_with_its_formats() -> None:
    flags = ("--model", "llama-8b", "--num-microbatches", "1", "--software", "Megatron-Bridge")
    refused = run(*flags, "--cluster", "h100-sxm", "--precision", "nvfp4")
    assert refused.exit_code == 2
    assert "states a peak for (fp32, bf16, fp16, fp8, fp8_block)" in refused.stderr
    assert run(*flags, "--cluster", "b200", "--precision", "nvfp4").exit_code == 0


def test_throughput_and_utilization_follow_from_the_step_time() -> None:
    found = report(*LAYOUT)
    tokens_per_s = 16 * MODEL.seq_length / found["step_time_s"]
    assert found["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert found["tokens_per_s_per_device"] == pytest.approx(tokens_per_s / 16)
    tflops = tokens_per_s / 16 * MODEL.model_flops_per_token / 1e12
    assert found["model_tflops_per_device"] == pytest.approx(tflops)
    assert found["peak_tflops_per_device"] == 191.5
    assert found["mfu"] == pytest.approx(tflops / 191.5)
    assert found["hfu"] == pytest.approx(found["mfu"]), "nothing is recomputed"


def test_the_levels_that_each_axis_needs_are_one_line() -> None:
    trays = ("--model=llama-1b", "--cluster=gb200", "--tp=4", "--dp=2", "--num-microbatches=4")
    said = "levels         each axis needs tray: tp; domain: dp"
    assert run(*trays).stdout.splitlines()[9] == said
    without = ("--model=llama-1b", "--cluster=h200", "--tp=4", "--dp=2", "--num-microbatches=4")
    assert "levels" not in run(*without).stdout
    assert "levels" not in report(*without)


def test_people_read_the_answer_first() -> None:
    found = report(*LAYOUT)
    lines = run(*LAYOUT).stdout.splitlines()
    answer = {line[:15].strip(): line[15:] for line in lines[3:9]}
    first, second = ("tokens/s", "step time", "model TFLOP/s"), ("peak memory", "fits")
    assert tuple(answer) == (*first, *second, "global batch")
    assert f"MFU {found['mfu']:.1%} of 191.5" in answer["model TFLOP/s"]
    tokens_per_s = 16 * MODEL.seq_length / found["step_time_s"]
    assert answer["tokens/s"].startswith(f"{tokens_per_s:,.0f}, a device ")
    assert answer["fits"] == f"with probability {found['fits']:.2f} into 64 GiB"


def test_a_peak_is_stated_as_a_median_with_its_interval_and_what_it_depends_on() -> None:
    # With three copies of the logits of a long sequence the peak is far from that with two.
    flags = ("--model=llama-8b", "--cluster=h100-sxm", "--zero-stage=3", "--dp=8")
    flags = (*flags, "--num-microbatches=1", "--recompute=full", "--precision=bf16")
    for software in ("a new trainer", "megatron-lm"):
        found = report(*flags, f"--software={software}")
        low, median, high = (
            found[f"peak_memory_{end}_bytes"] / GIB for end in ("low", "median", "high")
        )
        assert low < median < high
        text = run(*flags, f"--software={software}").stdout
        words = (
            f"{figure(median, 3)} GiB a device (80 %: {figure(low, 3)} to {figure(high, 3)} GiB)"
        )
        assert words in text
        stage = found["stages"][0]
        assert stage["median_bytes"] == pytest.approx(found["peak_memory_median_bytes"])
        assert stage["low_bytes"] < stage["median_bytes"] < stage["high_bytes"]
        depends = found["fits_depend_on"]
        assert (depends is None) == (software == "megatron-lm")
        assert ("depends most on" in text) == (depends is not None)
        if depends is not None:
            assert depends["name"] in " ".join(text.split())
            assert high / low > 1.5


def test_recomputed_work_counts_in_the_rate_of_the_hardware_alone() -> None:
    found = report(*LAYOUT, "--recompute=full")
    executed = MODEL.hardware_flops_per_token("full") / MODEL.model_flops_per_token
    assert found["hfu"] == pytest.approx(executed * found["mfu"])
    rate = (found["hardware_tflops_per_device"], found["model_tflops_per_device"])
    assert rate[0] == pytest.approx(executed * rate[1])


def test_stages_say_what_multi_token_prediction_adds(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**model_preset("llama-8b").to_mapping(), "num_mtp_layers": 1}))
    flags = [*LAYOUT, f"--model={path}", "--software=Megatron-Bridge"]
    stages = report(*flags)["stages"]
    assert [stage["mtp_bytes"] > 0 for stage in stages] == [False, False, False, True]
    text = run(*flags).stdout
    assert "mtp is what multi-token prediction adds to the parts before it" in text
    assert "mtp" not in run(*LAYOUT).stdout
    assert "mtp_bytes" not in report(*LAYOUT)["stages"][0]


def test_people_read_the_stages_and_the_largest_parts_of_the_step_first() -> None:
    result = run(*LAYOUT)
    assert "warning: not calibrated: the constants" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "gpt-1.3b on 2 nodes of frontier, 16 devices, bf16"
    stages = lines.index("memory by stage in GiB")
    assert [line.split()[0] for line in lines[stages + 2 : stages + 6]] == ["0", "1", "2", "3"]
    shares = [float(line.split("s")[1].split("%")[0]) for line in lines if "%  " in line]
    assert shares[:-1] == sorted(shares[:-1], reverse=True)


def test_the_small_parts_of_a_step_are_one_line_unless_all_are_asked_for() -> None:
    flags = (*LAYOUT, "--zero-stage=1")
    found, lines = report(*flags), run(*flags).stdout.splitlines()
    small = [part["seconds"] for part in found["time_parts"]]
    small = [seconds for seconds in small if seconds < 0.01 * found["step_time_s"]]
    assert len(small) > 5
    (folded,) = [line for line in lines if "other terms" in line]
    assert f"({len(small)} below 1%" in folded
    assert float(folded.split()[0]) == pytest.approx(sum(small), rel=1e-3)
    full = run(*flags, "--all-terms").stdout
    assert "other terms" not in full
    assert full.count("%  ") == len(found["time_parts"])


@pytest.mark.parametrize("model", ["gpt-1.3b", "gpt-1t"])
@pytest.mark.parametrize("more", [(), ("--all-terms",)], ids=str)
def test_every_line_fits_80_columns(tmp_path: Path, model: str, more: tuple[str, ...]) -> None:
    flags = (f"--model={model}", "--cluster=frontier", "--tp=8", "--pp=4", "--dp=256")
    flags = (*flags, "--zero-stage=1", "--sequence-parallel", "--global-batch-size=1048576")
    for calibrated in ((), (f"--calibrate-from={table(tmp_path)}",)):
        result = run(*flags, *more, *calibrated)
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_cluster_without_a_stated_peak_has_no_mfu() -> None:
    flags = ("--model=tiny", "--num-microbatches=4")
    found = report(*flags)
    assert (found["mfu"], found["precision"]) == (None, "fp32")
    assert found["model_tflops_per_device"] > 0
    assert "MFU unknown (no peak stated for fp32)" in run(*flags).stdout


CALIBRATED = (
    *("--model=gpt-1.3b", "--cluster=frontier", "--precision=fp16", "--recompute=full"),
    *("--tp=2", "--dp=8", "--num-microbatches=8", f"--software={SOURCE}"),
)
"""A layout within what the table has measured."""


def test_a_table_calibrates_time_and_memory(tmp_path: Path) -> None:
    cold, told = report(*CALIBRATED), report(*CALIBRATED, f"--calibrate-from={table(tmp_path)}")
    assert told["step_time_s"] == pytest.approx(1.5 * cold["step_time_s"], rel=0.05)
    spreads = [
        math.log(each["step_time_high_s"] / each["step_time_low_s"]) for each in (cold, told)
    ]
    assert spreads[1] < spreads[0]
    assert told["peak_memory_deviation_bytes"] < cold["peak_memory_deviation_bytes"]
    assert told["warnings"] == []
    assert told["calibrated_on"]["with_peak_memory"] == 18


def test_an_estimate_beyond_its_table_is_warned_of(tmp_path: Path) -> None:
    calibration = f"--calibrate-from={table(tmp_path)}"
    elsewhere = report(
        "--model=gpt-125m", "--cluster=a100-sxm", calibration, "--num-microbatches=1"
    )
    assert elsewhere["warnings"] == [
        "not calibrated on cluster a100-sxm, but on frontier",
        "not calibrated on this software, but on other software",
        "not calibrated on model gpt-125m, but on gpt-1.3b",
    ]
    beyond = report(*CALIBRATED, "--pp=4", calibration)["warnings"]
    assert len(beyond) == 1
    assert "beyond what it was calibrated for" in beyond[0]
    assert "num_devices" in beyond[0]


def test_constants_that_were_measured_here_are_used(no_constants_of_this_machine: Path) -> None:
    slow = {"fp32": 1e9, "bf16": 1e9, "fp16": 1e9}
    measured = make_constants(cluster="frontier", constants={"peak_flops_per_s": slow})
    before = report(*LAYOUT)
    write_constants(no_constants_of_this_machine, measured)
    after = report(*LAYOUT)
    assert after["step_time_s"] > 100 * before["step_time_s"]
    assert "measured by layout-tuner calibrate" in after["constants"]


def test_a_table_gets_predicted_columns_that_do_not_depend_on_its_own_measurements(
    tmp_path: Path,
) -> None:
    written = [tmp_path / "first.csv", tmp_path / "second.csv"]
    for out, slower in zip(written, (1.5, 3.0), strict=True):
        result = run(f"--table={table(tmp_path, slower=slower)}", f"--out={out}")
        assert result.exit_code == 0, result.output
    first, second = (read_table(path).rows for path in written)
    assert len(first) == 18
    assert [row.aside for row in first] == [row.aside for row in second]
    kernels = kernels_of(SOURCE, CLUSTER)
    expected = step_time_s(first[0].layout, MODEL, CLUSTER, kernels=kernels).item()
    assert float(first[0].aside["predicted_step_time_s"]) == pytest.approx(expected, rel=1e-3)
    assert 0 < float(first[0].aside["predicted_fits"]) <= 1
    assert int(first[0].aside["predicted_peak_memory_bytes"]) > 0


def test_a_table_with_predictions_may_be_predicted_again_after_calibration(tmp_path: Path) -> None:
    cold, told = tmp_path / "cold.csv", tmp_path / "told.csv"
    source = table(tmp_path)
    first = run(f"--table={source}", f"--out={cold}")
    assert first.exit_code == 0
    assert "warning: not calibrated: the constants" in first.stderr
    result = run(f"--table={cold}", f"--calibrate-from={source}", f"--out={told}")
    assert result.exit_code == 0, result.output
    read = read_table(told)
    assert read.aside_columns.count("predicted_step_time_s") == 1
    errors = [
        float(row.aside["predicted_step_time_s"]) / row.step_time_s - 1
        for row in read.rows
        if row.step_time_s
    ]
    assert np.abs(errors).max() < 0.06
    assert read.rows[0].step_time_s == read_table(source).rows[0].step_time_s


def test_the_stated_software_takes_the_place_of_the_one_in_the_tables_source(
    tmp_path: Path,
) -> None:
    out, source = tmp_path / "out.csv", table(tmp_path)

    def predicted(*flags: str) -> list[str]:
        result = run(f"--table={source}", f"--out={out}", *flags)
        assert result.exit_code == 0, result.output
        return [row.aside["predicted_peak_memory_bytes"] for row in read_table(out).rows]

    of_the_source = predicted()
    assert predicted(f"--software={SOURCE}") == of_the_source
    nanotron = predicted("--software=nanotron")
    assert nanotron != of_the_source
    assert predicted("--software=layout-tuner") not in (of_the_source, nanotron)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "say either --model, for one layout, or --table"),
        (("--model=tiny", "--table=x.csv"), "say either --model"),
        (("--model=tiny", "--out=x.csv"), "--out x.csv goes with --table"),
        (("--model=tiny",), "give num_microbatches or global_batch_size"),
        (("--model=tny",), "unknown model"),
        (("--model=tiny", "--cluster=frontierr.yaml"), "frontierr.yaml: cannot be read"),
        (("--model=tiny", "--vpp=2", "--num-microbatches=1"), "vpp=2"),
        (("--model=tiny", "--tp=0", "--num-microbatches=1"), "tp=0"),
        (("--table=/nowhere/x.csv",), "/nowhere/x.csv: cannot be read"),
        (
            ("--table=x.csv", "--tp=2"),
            "--tp goes with --model; a table says it of each of its rows",
        ),
        (("--table=x.csv", "--cluster=frontier"), "--cluster goes with --model"),
        (("--table=x.csv", "--tokens=1B"), "--tokens goes with --model"),
        (("--model=tiny", "--calibrate-from=/nowhere/x.csv"), "/nowhere/x.csv: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags: tuple[str, ...], said: str) -> None:
    result = run(*flags)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_attention_and_dropout_are_shown_and_are_refused_of_our_own_trainer(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("{preset: gpt-1.3b, attention: unfused, hidden_dropout: 0.1}")
    flags = (f"--model={file}", "--cluster=frontier", "--num-microbatches=8", "--dp=8")
    title = "gpt-1.3b-custom (attention=unfused, hidden_dropout=0.1)"
    assert title in run(*flags, "--software=megatron-lm").stdout.replace("\n ", "")
    refused = run(*flags)
    assert refused.exit_code == 2
    assert f"the model is {title}, and the embedded trainer has fused attention" in refused.stderr


def test_rules_of_our_own_trainer_do_not_bind_others() -> None:
    flags = ("--model=gpt-22b", "--cluster=frontier", "--precision=bf16", "--pp=5")
    flags = (*flags, "--num-microbatches=8")
    assert run(*flags).exit_code == 2
    found = report(*flags, "--software=Megatron-LM")
    assert len(found["stages"]) == 5
    # 48 layers: 10, 10, 10, 9, 9.
    weights = [stage["weights_bytes"] for stage in found["stages"]]
    assert weights[3] == pytest.approx(0.9 * weights[1], rel=1e-6)


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


def run_plan(*flags: object) -> Result:
    return CliRunner().invoke(plan, [str(flag) for flag in flags])


def printed(*flags: object) -> str:
    result = run_plan(*flags)
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


def test_a_plan_shows_what_its_model_states_of_attention(campaign: Path) -> None:
    model = {"preset": "gpt-1.3b", "name": "told", "attention": "unfused"}
    probe = {"trainer": "megatron-lm"}
    campaign.write_text(yaml.safe_dump(DOCUMENT | {"model": model, "probe": probe}))
    assert "plan of planned for megatron-lm: told (attention=unfused) on frontier" in printed(
        campaign
    )


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
    flags = (campaign, "--json", "--software", SOURCE)
    alone = json.loads(printed(*flags, "--top", 200))
    measured = table(tmp_path, slower=2.0)
    informed = json.loads(printed(*flags, "--top", 20, "--calibrate-from", measured))
    assert informed["knowledge"]["basis"] == "measurements"
    assert informed["knowledge"]["num_step_times"] == 18
    times = {each["layout_key"]: each["predicted"]["step_time_s"] for each in alone["layouts"]}
    for each in informed["layouts"]:
        ratio = each["predicted"]["step_time_s"] / times[each["layout_key"]]
        assert ratio == pytest.approx(2.0, rel=0.15)


def test_measured_constants_of_the_cluster_are_used(
    campaign: Path, no_constants_of_this_machine: Path
) -> None:
    before = json.loads(printed(campaign, "--json"))
    slow = {"peak_flops_per_s": {"bf16": 25e12}}
    measured = make_constants(cluster="frontier", constants=slow)
    write_constants(no_constants_of_this_machine, measured)
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
    result = run_plan(campaign, *flags)
    assert result.exit_code == 2
    assert said in result.stderr


def test_all_wrong_fields_of_the_campaign_are_said(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT | {"model": "gpt-9", "budget": {"trials": 0}}))
    result = run_plan(path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "Error: model: unknown model 'gpt-9'" in result.stderr
    assert "Error: budget.trials: 0 is not" in result.stderr


def test_an_estimate_of_one_layout_predicts_its_training_job_too() -> None:
    flags = ["--model=gpt-1.3b", "--cluster=frontier", "--tp=2", "--dp=4", "--num-microbatches=16"]
    job = report(*flags, "--tokens=10B", "--nodes=4")["job"]
    assert job["tokens"] == 10**10
    assert job["layout_key"].startswith("n4-tp2-pp1-dp16-vpp1-mbs1-mb4-")
    assert job["step_source"] == "predicted"
    text = run(*flags, "--tokens=10B").stdout
    assert "training job: 10B tokens on the layout's nodes" in text
    assert report(*flags)["job"] is None
