"""Plans of jobs that run: from a file to a plan with the job in it, and with its log."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.belief.known_measurements import knowledge_of
from layout_tuner.predictions.belief.plan import Plan, PlannedLayout
from layout_tuner.predictions.job_plan import JobAsked, JobPlan, job_campaign, plan_job
from layout_tuner.predictions.plan_and_estimate import plan
from layout_tuner.search_spaces.tables import read_table
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError

SHAPE = {
    "is_llama_config": True,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
JOB: dict[str, Any] = {
    "general": {"project": "a", "run": "b", "seed": 1},
    "parallelism": {"dp": 4, "tp": 2, "pp": 2, "pp_engine": "1f1b", "tp_mode": "ALL_REDUCE"},
    "tokens": {
        "sequence_length": 2048,
        "micro_batch_size": 2,
        "batch_accumulation_per_replica": 8,
        "train_steps": 1000,
    },
    "model": {"dtype": "bfloat16", "make_vocab_size_divisible_by": 1, "model_config": SHAPE},
    "optimizer": {"zero_stage": 1},
}
"""A job of nanotron on 16 devices, of 64 sequences a step."""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 256
seq_len = 8192
[parallelism]
tensor_parallel_degree = 4
data_parallel_shard_degree = -1
"""
"""A job of torchtitan, which does not say on how many devices it runs."""
H100 = JobAsked(cluster="h100-sxm")


def write(folder: Path, **sections: Any) -> Path:
    path = folder / "my job.yaml"
    path.write_text(yaml.safe_dump({**JOB, **sections}))
    return path


def write_log(folder: Path, seconds: float) -> Path:
    lines = [
        f"[INFO|DP=0]: iteration: {step} / 1000 | consumed_tokens: 3.2K | "
        f"elapsed_time_per_iteration_ms: {seconds * 1e3:.4g} | tokens_per_sec: 9.9K | lm_loss: 8.25 | lr: 0.1"
        for step in range(1, 31)
    ]
    path = folder / "train.log"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> JobPlan:
    """The plan of the job above, with all layouts."""
    return plan_job(write(tmp_path_factory.mktemp("job")), H100, top=1000)


@pytest.fixture(scope="module")
def baseline(planned: JobPlan) -> PlannedLayout:
    assert planned.plan.baseline is not None
    return planned.plan.baseline.planned


def test_the_layout_of_a_job_is_the_baseline_of_its_plan(baseline: PlannedLayout) -> None:
    layout = baseline.layout
    assert (layout.tp, layout.pp, layout.dp, layout.num_nodes) == (2, 2, 4, 2)
    assert (layout.micro_batch_size, layout.num_microbatches, layout.zero_stage) == (2, 8, 1)
    assert not layout.sequence_parallel


def test_a_job_is_ranked_among_the_layouts(planned: JobPlan, baseline: PlannedLayout) -> None:
    ranked = [each.objective_value * each.predicted.fits for each in planned.plan.layouts]
    own = baseline.objective_value * baseline.predicted.fits
    assert baseline.rank == 1 + sum(value > own for value in ranked)


def test_layouts_of_a_job_keep_its_batch_and_nodes(planned: JobPlan) -> None:
    layouts = [each.layout for each in planned.plan.layouts]
    assert {(each.global_batch_size, each.num_nodes) for each in layouts} == {(64, 2)}


def test_a_plan_of_a_job_is_for_its_trainer(planned: JobPlan) -> None:
    assert planned.plan.trainer == "nanotron"


def test_a_campaign_of_a_job_has_the_name_of_its_file(planned: JobPlan) -> None:
    spec = planned.campaign.spec
    assert spec.name == spec.model.name == "my-job"


def test_what_the_trainer_lacks_is_not_in_the_space(tmp_path: Path) -> None:
    layouts = plan_job(write(tmp_path), H100, top=1000).plan.layouts
    assert {each.layout.zero_stage for each in layouts} == {0, 1}
    assert {each.layout.recompute for each in layouts} == {"none"}


def test_context_parallelism_that_the_trainer_refuses_is_not_in_the_space(tmp_path: Path) -> None:
    (path := tmp_path / "titan.toml").write_text(TITAN)
    asked = JobAsked(cluster="h100-sxm", num_nodes=4, stated={"recompute": "full"})
    found = plan_job(path, asked, top=30)
    assert {each.layout.cp for each in found.plan.layouts} == {1}
    assert not found.plan.layouts[0].refused


def test_sharding_that_the_variables_of_the_script_forbid_is_not_in_the_space(
    tmp_path: Path,
) -> None:
    script = Path("examples/train-7b.sh").read_text()
    (path := tmp_path / "job.sh").write_text(script)
    assert job_campaign(path, H100).document["space"]["zero_stage"] == [0, 1]
    path.write_text(script.replace("export CUDA_DEVICE_MAX_CONNECTIONS=1", ""))
    assert "zero_stage" not in job_campaign(path, H100).document["space"]


def test_the_campaign_can_be_planned_by_itself_with_the_same_answer(tmp_path: Path) -> None:
    found = plan_job(write(tmp_path), H100)
    again = plan(json.loads(json.dumps(found.campaign.document)))
    assert again.layouts == found.plan.layouts
    assert again.baseline == found.plan.baseline


def test_the_machine_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(JobFileInvalidError, match=r"name it with --cluster"):
        job_campaign(write(tmp_path), JobAsked())


def test_stated_fields_go_before_the_files_and_are_listed(tmp_path: Path) -> None:
    asked = JobAsked(cluster="h100-sxm", stated={"zero_stage": 0}, seq_length=1024)
    job = job_campaign(write(tmp_path), asked).job
    assert (job.layout.zero_stage, job.model.seq_length) == (0, 1024)
    stated = {each.field: each.value for each in job.found.assumed if "user" in each.why}
    assert stated == {"zero_stage": 0, "model.seq_length": 1024}


def test_a_field_that_is_not_understood_must_be_stated(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(
        f"{TITAN}[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'\n"
    )
    with pytest.raises(SearchSpaceError, match=r"recompute .*--set FIELD=VALUE"):
        job_campaign(path, JobAsked(cluster="h100-sxm", num_nodes=4))
    asked = JobAsked(cluster="h100-sxm", num_nodes=4, stated={"recompute": "full"})
    assert job_campaign(path, asked).job.layout.recompute == "full"


def test_a_model_of_the_user_counts_and_differences_are_said(tmp_path: Path) -> None:
    asked = JobAsked(cluster="h100-sxm", model="llama-1b")
    found = job_campaign(write(tmp_path), asked)
    assert (found.spec.model.name, found.spec.model.seq_length) == ("llama-1b", 2048)
    [remark] = found.remarks
    assert "the model 'llama-1b' counts" in remark
    assert "model.vocab_size=32000" in remark
    assert "model.num_layers" not in remark  # both say 16


def test_ranks_of_a_node_are_those_of_the_machine(tmp_path: Path) -> None:
    asked = JobAsked(cluster="h100-sxm", stated={"devices_per_node": 4, "num_nodes": 4})
    with pytest.raises(JobFileInvalidError, match="runs 4 ranks on each node, and a node of h100"):
        job_campaign(write(tmp_path), asked)
    fewer = {"preset": "h100-sxm", "devices_per_node": 4}
    asked = JobAsked(cluster=fewer, stated={"devices_per_node": 4, "num_nodes": 4})
    assert job_campaign(write(tmp_path), asked).spec.baseline.num_nodes == 4


@dataclass(frozen=True, kw_only=True)
class BeforeAndAfter:
    """Plans of one job without its log, and with a log of steps half as long again."""

    cold: Plan
    logged: JobPlan

    @property
    def predicted_s(self) -> float:
        """Step time of the job as predicted without its log."""
        return step_s_of_baseline(self.cold)


def step_s_of_baseline(plan: Plan) -> float:
    assert plan.baseline is not None
    return plan.baseline.planned.predicted.step_time_s


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> BeforeAndAfter:
    path = write(folder := tmp_path_factory.mktemp("logged"))
    cold = plan_job(path, H100).plan
    log = write_log(folder, 1.5 * step_s_of_baseline(cold))
    return BeforeAndAfter(cold=cold, logged=plan_job(path, H100, log=log))


def test_a_plan_says_how_far_its_log_is_off(slower: BeforeAndAfter) -> None:
    log = slower.logged.log
    assert log is not None
    assert log.predicted_s == slower.predicted_s
    assert log.factor == pytest.approx(1.5, rel=2e-3)
    assert log.best_before == slower.cold.layouts[0]


def test_a_log_corrects_the_prediction_of_its_job(slower: BeforeAndAfter) -> None:
    now_s = step_s_of_baseline(slower.logged.plan)
    assert abs(math.log(now_s / (1.5 * slower.predicted_s))) < 0.25 * math.log(1.5)


def test_a_log_corrects_the_predictions_of_other_layouts(slower: BeforeAndAfter) -> None:
    before, now = (plan.layouts[0].predicted for plan in (slower.cold, slower.logged.plan))
    assert now.step_time_s > 1.05 * before.step_time_s


def test_a_log_counts_as_one_measured_step_time(slower: BeforeAndAfter) -> None:
    plans = (slower.cold, slower.logged.plan)
    assert [plan.knowledge.num_step_times for plan in plans] == [0, 1]


def test_the_measured_step_is_a_table_that_calibrates_as_the_log_does(tmp_path: Path) -> None:
    path, log = write(tmp_path), write_log(tmp_path, 0.5)
    found = job_campaign(path, H100, log=log)
    table = tmp_path / "log.csv"
    table.write_text(found.table)
    assert found.sample is not None
    [sample] = knowledge_of(read_table(table).cells)
    assert (sample.layout, sample.step_time_s) == (found.sample.layout, 0.5)
    assert (sample.software, sample.model.num_parameters) == (
        "nanotron",
        found.spec.model.num_parameters,
    )
    by_table = plan(found.document, calibrate_from=table)
    by_log = plan_job(path, H100, log=log).plan
    assert [each.layout_key for each in by_table.layouts] == [
        each.layout_key for each in by_log.layouts
    ]
    assert by_table.layouts[0].predicted.step_time_s == pytest.approx(
        by_log.layouts[0].predicted.step_time_s, rel=1e-6
    )


def test_a_log_is_of_the_jobs_own_trainer(tmp_path: Path) -> None:
    path, log = write(tmp_path), write_log(tmp_path, 0.5)
    with pytest.raises(JobFileInvalidError, match="--log is a log of nanotron"):
        plan_job(path, H100, log=log, software="megatron-lm")


def test_nodes_are_asked_for_where_the_file_does_not_say_them(tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(f"{TITAN}[activation_checkpoint]\nmode = 'full'\n")
    with pytest.raises(SearchSpaceError, match="--nodes"):
        job_campaign(path, H100)
    job = job_campaign(path, JobAsked(cluster="h100-sxm", num_nodes=4)).job
    assert (job.layout.tp, job.layout.dp, job.layout.num_nodes) == (4, 8, 4)
    assert job.layout.num_microbatches == 32


PART = (
    "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights "
    "--recompute-activations --tensor-model-parallel-size 2\n"
)


def test_a_job_on_a_part_of_a_node_is_planned_on_that_part(tmp_path: Path) -> None:
    path = tmp_path / "part.sh"
    path.write_text(PART)
    found = plan_job(path, H100, top=1000)
    assert {each.layout.num_devices for each in found.plan.layouts} == {4}
    assert found.campaign.spec.cluster.name == "h100-sxm-4"
    [remark] = found.campaign.remarks
    assert "uses 4 of the 8 devices of a node of h100-sxm" in remark


def test_the_space_has_the_layout_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "part.sh"
    path.write_text(PART)  # one device would hold it: the default space has tp=1 alone
    baseline = plan_job(path, H100).plan.baseline
    assert baseline is not None
    assert (baseline.planned.layout.tp, baseline.planned.layout.recompute) == (2, "selective")
    assert not baseline.is_outside


def test_a_given_model_is_the_only_one_that_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "part.sh"
    # GPT-2's tokenizer has a size that the file does not say.
    path.write_text(PART.replace("NullTokenizer --vocab-size 32000", "GPT2BPETokenizer"))
    found = job_campaign(path, JobAsked(cluster="h100-sxm", model="llama-1b"))
    assert "model.vocab_size=50432" in found.remarks[0]
    listed = {name for name in found.job.found.values if name.startswith("model.")}
    assert listed == {"model.seq_length"}
