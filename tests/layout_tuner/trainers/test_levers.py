"""Levers of memory in exports: flags, refusals, and what a trainer lacks."""

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.accelerate import ACCELERATE
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.command import COMMAND
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.read_job import read_job
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from layout_tuner.trainers.nanotron import NANOTRON
from layout_tuner.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_MAIN
from tests.exports.exported_files import exported_texts

DENSE = model_preset("llama-7b")


def job(**levers: Any) -> TrainerJob:
    plain = Layout(dp=8, zero_stage=1, precision="bf16")
    return TrainerJob(model=DENSE, layout=replace(plain, **levers))


@pytest.mark.parametrize(
    ("levers", "flags"),
    [
        (
            {"recompute": "core_attention+mlp"},
            "--recompute-granularity selective --recompute-modules core_attn mlp",
        ),
        (
            {"recompute": "full", "recompute_layers": 3},
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        ),
        ({"offload": "activations"}, "--cpu-offloading-num-layers 30"),
        ({"offload": "optimizer"}, "--optimizer-cpu-offload --use-precision-aware-optimizer"),
        (
            {"optimizer_states": "bf16"},
            "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        ),
    ],
)
def test_megatron_has_flags(levers: dict[str, Any], flags: str) -> None:
    plain, words = (MEGATRON_LM.arguments(each) for each in (job(), job(**levers)))
    added = [word for word in words if word not in plain or word == "bf16"]
    assert flags in " ".join(words)
    assert set(added) - {"--bf16"} <= set(flags.split())
    assert flags in " ".join(MEGATRON_LM.placement_arguments(job(**levers)))
    assert MEGATRON_LM.refusals(job(**levers)) == []


def test_bridge_has_values() -> None:
    of_modules = MEGATRON_BRIDGE.arguments(job(recompute="mlp+layernorm"))
    assert "model.recompute_modules=['mlp', 'layernorm']" in of_modules
    assert "model.recompute_granularity=selective" in of_modules
    of_layers = MEGATRON_BRIDGE.values(job(recompute="full", recompute_layers="2"))["model"]
    assert (of_layers["recompute_method"], of_layers["recompute_num_layers"]) == ("block", 2)
    offloaded = MEGATRON_BRIDGE.placement_arguments(job(offload="optimizer"))
    assert "optimizer.optimizer_offload_fraction=1.0" in offloaded
    activations = MEGATRON_BRIDGE.values(job(offload="activations"))["model"]
    assert (activations["cpu_offloading"], activations["cpu_offloading_num_layers"]) == (True, 30)


def test_others_have_what_they_have() -> None:
    zero = DEEPSPEED.values(job(offload="optimizer"))["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu"}
    config = ACCELERATE.values(job(offload="optimizer"))["deepspeed_config"]
    assert config["offload_optimizer_device"] == "cpu"
    states = TORCHTITAN_MAIN.values(job(optimizer_states="bf16"))
    assert states["optimizer"] == {"implementation": "fused_opt_states_bf16"}
    split = ACCELERATE.values(job(recompute="full", recompute_layers=2, tp=2, dp=4))
    assert split["megatron_lm_config"]["megatron_lm_recompute_num_layers"] == 2


LEVERS = {
    "modules": {"recompute": "mlp"},
    "layers": {"recompute": "full", "recompute_layers": "2"},
    "layers_by_rank": {"recompute": "full", "recompute_layers": "2/0", "pp": 2, "dp": 4},
    "activations": {"offload": "activations"},
    "optimizer": {"offload": "optimizer"},
    "bf16_states": {"optimizer_states": "bf16"},
}


@pytest.mark.parametrize(
    ("adapter", "has"),
    [
        (EMBEDDED, {"modules", "layers", "layers_by_rank", "bf16_states"}),
        (MEGATRON_LM, {"modules", "layers", "activations", "optimizer", "bf16_states"}),
        (MEGATRON_BRIDGE, {"modules", "layers", "activations", "optimizer"}),
        (DEEPSPEED, {"optimizer"}),
        (ACCELERATE, {"optimizer"}),
        (MEGATRON_DEEPSPEED, set()),
        (TORCHTITAN_0_2, set()),
        (TORCHTITAN_MAIN, {"bf16_states"}),
        (NANOTRON, set()),
        (COMMAND, set(LEVERS)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_trainer_says_what_it_lacks(adapter: Any, has: set[str]) -> None:
    plain = adapter.all_lacking(job(recompute="full")).keys()
    lacks = {lever for lever, of in LEVERS.items() if adapter.all_lacking(job(**of)).keys() - plain}
    unsaid = {"modules"} if "recompute" in plain else set()
    assert lacks == set(LEVERS) - has - unsaid


@pytest.mark.parametrize("levers", [{"offload": "optimizer"}, {"optimizer_states": "bf16"}])
def test_megatron_needs_its_distributed_optimizer(levers: dict[str, Any]) -> None:
    for refused in ({"zero_stage": 0}, {"precision": "fp32"}):
        (said,) = MEGATRON_LM.refusals(job(**levers, **refused))
        assert said.endswith("export a trial with zero_stage=1")
    assert MEGATRON_BRIDGE.refusals(job(**levers)) == []


def test_megatron_recomputes_modules_everywhere() -> None:
    (said,) = MEGATRON_LM.refusals(job(recompute="mlp", recompute_layers=2))
    assert said.startswith("recompute=mlp with recompute_layers=2: Megatron recomputes modules")


def test_bridge_places_written_stages() -> None:
    written = MEGATRON_BRIDGE.placement_values(job(pp=2, dp=4, pipeline_layout="Et*15|t*17L"))
    assert written["model"]["pipeline_model_parallel_layout"] == "Et*15|t*17L"


@pytest.mark.parametrize(
    ("trainer", "name"), [("deepspeed", "ds_config.json"), ("accelerate", "accelerate.yaml")]
)
def test_an_exported_offload_is_read_back(trainer: str, name: str) -> None:
    asked = job(offload="optimizer")
    found = read_job(JobFile(name=name, text=exported_texts(trainer, asked)[name]))
    assert found.values["offload"] == "optimizer"
    assert not found.not_understood
