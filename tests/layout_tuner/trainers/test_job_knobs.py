"""Catalogues of job knobs: what they declare, and how exports write the settings of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.jobs.job_choices import JobChoices
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob
from layout_tuner.trainers.deepspeed import DEEPSPEED
from layout_tuner.trainers.exports.export import FORMATS, export
from layout_tuner.trainers.exports.export_source import (
    ExportImpossibleError,
    ExportSource,
    KnobsLackingError,
)
from layout_tuner.trainers.megatron_bridge import MEGATRON_BRIDGE
from layout_tuner.trainers.megatron_deepspeed import MEGATRON_DEEPSPEED
from layout_tuner.trainers.megatron_lm import MEGATRON_LM
from layout_tuner.trainers.registry import ADAPTERS
from layout_tuner.trainers.torchtitan import TORCHTITAN_0_2, TORCHTITAN_0_3
from layout_tuner.trainers.trainer_knob import VALUE, RanCheck, TrainerKnob, Writing, with_keys

MOE, DENSE = model_preset("mixtral-8x7b"), model_preset("llama-8b")
LAYOUT = Layout(tp=2, dp=4, sequence_parallel=True, zero_stage=1, precision="bf16")
WITH_EXPERTS = replace(LAYOUT, ep=4)


def job(settings: dict[str, JobValue], layout: Layout = LAYOUT, **more: Any) -> TrainerJob:
    model = MOE if layout.ep > 1 else DENSE
    return TrainerJob(model=model, layout=replace(layout, job=JobSettings(settings)), **more)


def exported(name: str, of: TrainerJob, **options: Any) -> str:
    made = export(name, ExportSource(campaign="c", trial=1, job=of), **options)
    return "\n".join(file.content for file in made.files)


def written_knobs() -> list[tuple[TrainerAdapter, TrainerKnob, JobValue]]:
    return [
        (adapter, knob, value)
        for adapter in ADAPTERS.values()
        for knob in adapter.knobs
        for value in knob.knob.values
        if knob.writings and not knob.knob.is_default(value)
    ]


@pytest.mark.parametrize(
    ("adapter", "knob", "value"),
    written_knobs(),
    ids=lambda each: getattr(each, "name", None) or getattr(each, "source", None) or str(each),
)
def test_every_value_of_every_knob_is_written(
    adapter: TrainerAdapter, knob: TrainerKnob, value: JobValue
) -> None:
    for layout in (LAYOUT, WITH_EXPERTS):
        plain, chosen = job({}, layout), job({knob.knob.name: value}, layout)
        assert adapter.all_lacking(chosen) == adapter.all_lacking(plain)
        before, after = (
            (adapter.values(each), adapter.arguments(each), adapter.environment(each))
            for each in (plain, chosen)
        )
        removes_a_flag = knob.writings[0].without and layout.ep == 1
        assert before != after or removes_a_flag


def test_a_knob_without_a_published_effect_states_none_and_every_other_names_its_source() -> None:
    for adapter in ADAPTERS.values():
        for each in adapter.knobs:
            assert each.source, each.knob.name
            assert each.knob.help, each.knob.name
            for value in each.knob.values:
                effect = each.knob.effect(value)
                assert effect is None or effect.source, (each.knob.name, value)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=lambda each: each.name)
def test_conditions_of_a_catalogue_name_what_there_is(adapter: TrainerAdapter) -> None:
    knobs = adapter.job_knobs
    for name, knob in knobs.items():
        choices = JobChoices.of({name: list(knob.values)}, knobs, adapter.name)
        assert choices.values(name) == knob.values
        stored = JobChoices.of(choices.to_mapping(), {}, adapter.name)
        assert stored.knobs == choices.knobs


def test_every_flag_of_a_megatron_knob_is_one_of_its_own() -> None:
    listed = Path(__file__).with_name("megatron_lm_flags.txt").read_text().split()
    for each in MEGATRON_LM.knobs:
        for writing in each.writings:
            words = (*writing.arguments, *writing.without)
            assert {word for word in words if word.startswith("--")} <= {*listed}, each.knob.name


def test_a_setting_replaces_the_flag_that_the_export_writes() -> None:
    arguments = MEGATRON_LM.arguments(job({"moe_dispatcher": "hybridep"}, WITH_EXPERTS))
    assert arguments.count("--moe-token-dispatcher-type") == 1
    assert arguments[arguments.index("--moe-token-dispatcher-type") + 1] == "flex"
    assert arguments[arguments.index("--moe-flex-dispatcher-backend") + 1] == "hybridep"
    assert "--overlap-grad-reduce" in arguments
    assert "--overlap-grad-reduce" not in MEGATRON_LM.arguments(job({"grad_overlap": False}))


@pytest.mark.parametrize(
    ("adapter", "name"),
    [(adapter, name) for adapter in ADAPTERS.values() for name in adapter.job_knobs],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_stated_default_is_written_as_the_adapter_writes_it(
    adapter: TrainerAdapter, name: str
) -> None:
    default = adapter.job_knobs[name].default
    assert default is not None
    for layout in (LAYOUT, WITH_EXPERTS):
        plain, stated = job({}, layout), job({name: default}, layout)
        assert adapter.all_lacking(stated) == adapter.all_lacking(plain)
        values = adapter.values(stated)
        assert values == adapter.values(plain) or values["layout"]["job"] == {name: default}
        assert adapter.arguments(stated) == adapter.arguments(plain)


def test_numbers_in_keys_and_sections_without_values_are_written() -> None:
    bucket = Writing(keys={"ddp.size": f"{VALUE}000000", "ddp.version": f"0{VALUE}"})
    assert dict(bucket.filled(0).keys) == {"ddp.size": "0000000", "ddp.version": "00"}
    assert dict(bucket.filled(5).keys)["ddp.size"] == 5_000_000
    assert with_keys({"ddp": None}, [bucket.filled(5)])["ddp"]["size"] == 5_000_000


@pytest.mark.parametrize("value", ["attn", "full_iteration"])
def test_bridge_captures_graphs_with_the_generator_that_they_need(value: str) -> None:
    values = MEGATRON_BRIDGE.values(job({"cuda_graphs": value}))
    assert values["model"]["use_te_rng_tracker"] is True
    assert values["rng"]["te_rng_tracker"] is True


OVER_EXPERTS: dict[str, JobValue] = {"ep_overlap": True, "moe_dispatcher": "deepep"}
COMPILED = job({"compile": True, "memory_budget": 25}, replace(LAYOUT, zero_stage=3))


def test_a_script_of_megatron_has_the_settings() -> None:
    script = exported("megatron-lm", job(OVER_EXPERTS, WITH_EXPERTS))
    assert "--overlap-moe-expert-parallel-comm" in script
    assert script.index("MAX_CONNECTIONS=1\n") < script.index("MAX_CONNECTIONS=32\n")


def test_files_of_megatron_bridge_have_the_settings() -> None:
    bridge = exported("megatron-bridge", job(OVER_EXPERTS, WITH_EXPERTS))
    assert "model.moe_flex_dispatcher_backend=deepep" in bridge
    assert "overlap_moe_expert_parallel_comm: true" in bridge


@pytest.mark.parametrize(
    ("adapter", "of", "section", "expected"),
    [
        (
            DEEPSPEED,
            job({"reduce_bucket_millions": 100}),
            "zero_optimization",
            {"stage": 1, "reduce_bucket_size": 100_000_000},
        ),
        (
            MEGATRON_DEEPSPEED,
            job({"contiguous_gradients": False}),
            "zero_optimization",
            {"stage": 1, "contiguous_gradients": False},
        ),
        (
            TORCHTITAN_0_2,
            COMPILED,
            "activation_checkpoint",
            {"mode": "memory_budget", "memory_budget": 0.25},
        ),
    ],
    ids=["deepspeed", "megatron-deepspeed", "torchtitan-0.2"],
)
def test_a_document_has_the_settings(
    adapter: TrainerAdapter, of: TrainerJob, section: str, expected: dict[str, Any]
) -> None:
    assert adapter.values(of)[section] == expected


def test_a_module_of_torchtitan_has_the_settings() -> None:
    module = exported("torchtitan-0.3", COMPILED)
    assert "config.compile.enable = True" in module
    assert "config.activation_checkpoint = MemoryBudgetAC.Config(memory_budget=0.25)" in module


def test_a_job_of_the_embedded_trainer_has_the_settings() -> None:
    assert '"job": {' in exported("embedded", job({"compile": True}, Layout(dp=2)))


def test_a_program_of_any_kind_gets_the_settings_in_its_environment() -> None:
    script = exported("command", job({"fused_mlp": True, "dispatch": "deepep"}))
    assert "export LAYOUT_JOB_DISPATCH=deepep\nexport LAYOUT_JOB_FUSED_MLP=true" in script


def test_flags_are_those_of_the_version_that_runs() -> None:
    chosen = job({"cuda_graphs": "full_iteration"})
    newest = MEGATRON_LM.arguments(chosen)
    assert newest[newest.index("--cuda-graph-impl") + 1] == "full_iteration"
    for version in ("core 0.16.1", "core_v0.16.1", "core_r0.16.0"):
        old = replace(MEGATRON_LM, version=version).arguments(chosen)
        assert old[old.index("--cuda-graph-scope") + 1] == "full_iteration"
    assert "--cuda-graph-scope" not in newest
    later = Writing(keys={"x": 1}, since="1.10", before="2.0")
    assert not later.is_for(True, (1, 9))
    assert later.is_for(True, (1, 10))
    assert not later.is_for(True, (2, 0))
    only_later = TrainerKnob(
        knob=JobKnob(name="x", kind="switch", values=(False, True), default=False),
        source="here",
        writings=(Writing(keys={"x": True}, since="1.10"),),
    )
    old_trainer = replace(DEEPSPEED, knobs=(only_later,), version="1.9")
    assert old_trainer.all_lacking(job({"x": True}))["x"].startswith("deepspeed 1.9 has no x=true")


@pytest.mark.parametrize("settings", [{"bogus": True}, {"moe_dispatcher": "carrier-pigeon"}])
def test_a_setting_that_the_trainer_lacks_is_named_and_may_be_dropped(
    settings: dict[str, JobValue],
) -> None:
    (name,) = settings
    chosen = job(settings, WITH_EXPERTS)
    with pytest.raises(
        KnobsLackingError, match=rf"megatron-lm has no .*; accept .*--without {name}"
    ):
        exported("megatron-lm", chosen)
    dropped = exported("megatron-lm", chosen, without=[name])
    assert f"# without {name}: megatron-lm has no" in dropped
    plain = exported("megatron-lm", job({}, WITH_EXPERTS))
    assert dropped.split("set -")[1:] == plain.split("set -")[1:]
    with pytest.raises(ExportImpossibleError, match="is not a knob of this layout"):
        exported("megatron-lm", job({"ep_overlap": True}, WITH_EXPERTS), without=["ep_overlap"])


def test_every_format_names_the_settings_of_another_trainer() -> None:
    chosen = TrainerJob(model=DENSE, layout=Layout(job=JobSettings({"no_trainer_has_it": True})))
    for name, form in FORMATS.items():
        lacks = "no_trainer_has_it" in form.adapter.all_lacking(chosen)
        assert lacks == (name != "command"), name


def test_values_that_a_layout_a_model_or_a_device_does_not_have_are_not_searched() -> None:
    asked: dict[str, list[JobValue]] = {
        "moe_dispatcher": ["alltoall", "deepep"],
        "cuda_graphs": ["none", "full_iteration"],
        "ep_overlap": [False, True],
    }
    choices = JobChoices.of(asked, MEGATRON_LM.job_knobs, "megatron-lm")

    def settings(layout: Layout, cluster: str) -> set[str]:
        model, machine = MOE if layout.ep > 1 else DENSE, CLUSTER_PRESETS[cluster]
        every = (
            {"moe_dispatcher": "deepep"},
            {"cuda_graphs": "full_iteration"},
            {"ep_overlap": True},
        )
        return {
            next(iter(each))
            for each in every
            if choices.holds(replace(layout, job=JobSettings(each)), model, machine)
        }

    assert settings(WITH_EXPERTS, "perlmutter") == {"moe_dispatcher", "ep_overlap"}
    assert settings(WITH_EXPERTS, "frontier") == {"ep_overlap"}
    assert settings(LAYOUT, "perlmutter") == {"cuda_graphs"}
    assert settings(replace(LAYOUT, recompute="full"), "perlmutter") == set()
    piped = replace(WITH_EXPERTS, pp=2, num_microbatches=4)
    assert settings(piped, "perlmutter") == {"moe_dispatcher"}
    assert settings(replace(piped, vpp=2), "perlmutter") == {"moe_dispatcher", "ep_overlap"}


@pytest.mark.parametrize(("depths", "is_had"), [(0, True), (1, True), (2, False)])
def test_experts_overlap_with_one_depth_at_most(depths: int, is_had: bool) -> None:
    """megatron/core/transformer/transformer_config.py, `__post_init__`."""
    choices = JobChoices.of({"ep_overlap": [False, True]}, MEGATRON_LM.job_knobs, "megatron-lm")
    overlapped = replace(WITH_EXPERTS, job=JobSettings({"ep_overlap": True}))
    model = replace(MOE, num_mtp_layers=depths)
    assert choices.holds(overlapped, model, CLUSTER_PRESETS["perlmutter"]) == is_had


def test_the_priors_of_the_exchange_follow_from_the_four_times() -> None:
    plain, overlapped, hybrid, both = 41.25, 31.31, 24.71, 20.99
    gain, gain_of_hybrid = 1 - overlapped / plain, (hybrid - both) / plain
    factor = gain_of_hybrid / gain
    share = (1 - hybrid / plain) / (1 - factor)
    assert factor == pytest.approx(0.37, abs=0.005)
    effect = MEGATRON_LM.job_knobs["ep_overlap"].effect(True)
    assert effect is not None
    assert effect.factor == pytest.approx(1 - gain / share, abs=0.005)


def test_bridge_and_megatron_lm_offer_the_same_knobs_but_for_types_of_moments() -> None:
    assert MEGATRON_LM.job_knobs.keys() - MEGATRON_BRIDGE.job_knobs.keys() == {"moment_dtype"}
    assert not TORCHTITAN_0_3.job_knobs.keys() - {
        "compile",
        "async_tp",
        "memory_budget",
        "cuda_graphs",
    }


def printed(name: str, value: object) -> str:
    """A line of Megatron-LM's list of its arguments."""
    return f"  {name} {'.' * (48 - len(name))} {value}"


@pytest.mark.parametrize(
    ("adapter", "settings", "line", "ran"),
    [
        (
            MEGATRON_LM,
            {"moe_dispatcher": "deepep"},
            printed("moe_token_dispatcher_type", "alltoall"),
            "alltoall",
        ),
        (
            MEGATRON_LM,
            {"ep_overlap": True},
            printed("overlap_moe_expert_parallel_comm", False),
            "False",
        ),
        (MEGATRON_LM, {"grad_overlap": False}, printed("overlap_grad_reduce", True), "True"),
        (MEGATRON_LM, {"tp_overlap": True}, printed("tp_comm_overlap", False), "False"),
        (
            MEGATRON_BRIDGE,
            {"moe_dispatcher": "deepep"},
            "WARNING:x:DeepEP is only applicable to Ampere, Hopper GPUs. Current GPU: NVIDIA GB200. "
            "Falling back to alltoall.",
            "alltoall",
        ),
        (
            MEGATRON_BRIDGE,
            {"tp_overlap": True},
            "Disabling tensor parallel communication overlap due to TP size < 2.",
            "false",
        ),
    ],
)
def test_a_dropped_setting_is_read_from_the_log(
    adapter: TrainerAdapter, settings: dict[str, JobValue], line: str, ran: str
) -> None:
    checks = adapter.ran_checks(job(settings, WITH_EXPERTS))
    (found,) = filter(None, (each.dropped(line) for each in checks))
    assert f"{next(iter(settings))}: " in found
    assert f"it runs with {ran} (" in found
    assert not adapter.ran_checks(job({}, WITH_EXPERTS))
    assert not any(each.dropped("a line of something else") for each in checks)


def test_a_line_without_the_value_says_nothing_of_what_ran() -> None:
    pattern = r"fused_mlp(?: is (?P<value>\w+))?"
    check = RanCheck(name="fused_mlp", asked=True, pattern=pattern, ran=None)
    assert check.dropped("fused_mlp") is None
    assert check.dropped("fused_mlp is off") is not None


def test_what_ran_as_asked_is_not_called_dropped() -> None:
    checks = MEGATRON_LM.ran_checks(job({"ep_overlap": True, "tp_overlap": True}, WITH_EXPERTS))
    assert len(checks) == 2
    for name in ("overlap_moe_expert_parallel_comm", "tp_comm_overlap", "tp_comm_overlap_ag"):
        assert not any(each.dropped(printed(name, True)) for each in checks)
    assert not any(each.dropped(printed("tp_comm_overlap_rs_dgrad", False)) for each in checks)
