"""What trainers are told of attention and dropout, in their own words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS, Attention
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.exports.export import ExportImpossibleError, export
from layout_tuner.trainers.exports.export_source import ExportSource
from layout_tuner.trainers.exports.exported import ExportRead
from layout_tuner.trainers.placeholders import environment_values, placeholder_values
from layout_tuner.trainers.registry import ADAPTERS

PLAIN = model_preset("small-llama")
STATED: dict[str, Any] = {"attention": "unfused", "attention_dropout": 0.1, "hidden_dropout": 0.25}
LAYOUT = Layout(dp=2, precision="bf16")
FLAGS = ("--attention-backend", "--use-flash-attn-v2", "--attention-dropout", "--hidden-dropout")


def job(layout: Layout = LAYOUT, **fields: Any) -> TrainerJob:
    return TrainerJob(model=replace(PLAIN, **fields), layout=layout)


def exported(name: str, **fields: Any) -> ExportRead:
    return export(name, ExportSource(campaign="c", trial=1, job=job(**fields)))


def flags(name: str, **fields: Any) -> list[str]:
    """The words about attention and dropout on the command line of the trainer."""
    words = ADAPTERS[name].arguments(job(**fields))
    found: list[str] = []
    for at, word in enumerate(words):
        if word in FLAGS:
            found += words[at : at + (1 if word.startswith("--use") else 2)]
    return found


def test_megatron_lm_has_flags_of_attention_and_of_dropout() -> None:
    dropout = ["--attention-dropout", "0.1", "--hidden-dropout", "0.25"]
    assert flags("megatron-lm", **STATED) == [*dropout, "--attention-backend", "unfused"]
    assert flags("megatron-lm", attention="fused")[-2:] == ["--attention-backend", "auto"]
    none = ["--attention-dropout", "0.0", "--hidden-dropout", "0.0"]
    assert flags("megatron-lm") == none, "its default: auto"
    files = "\n".join(file.content for file in exported("megatron-lm", **STATED).files)
    assert "--attention-backend unfused" in files
    assert "--attention-dropout 0.1 --hidden-dropout 0.25" in files


def test_megatron_deepspeed_fuses_attention_where_the_model_says_so() -> None:
    dropout = ["--attention-dropout", "0.1", "--hidden-dropout", "0.25"]
    assert flags("megatron-deepspeed", **STATED) == dropout
    assert "--use-flash-attn-v2" in flags("megatron-deepspeed", attention="fused")
    assert "--use-flash-attn-v2" in flags("megatron-deepspeed"), "as the probe's"
    assert "--use-flash-attn-v2" not in flags("megatron-deepspeed", attention="unfused")
    for attention in (None, "fused", "unfused"):
        notes = " ".join(exported("megatron-deepspeed", attention=attention).notes)
        assert ("needs flash-attn 2 on every node" in notes) == (attention != "unfused")
    wide = job(Layout(dp=2), attention="fused")
    (reason,) = ADAPTERS["megatron-deepspeed"].refusals(wide)
    assert "attention=fused with precision=fp32" in reason


def test_megatron_bridge_has_keys_of_dropout_and_refuses_a_word_that_it_would_not_read() -> None:
    fields = STATED | {"attention": "fused"}
    (content,) = (
        f.content for f in exported("megatron-bridge", **fields).files if "yaml" in f.name
    )
    model = yaml.safe_load(content)["model"]
    assert (model["attention_dropout"], model["hidden_dropout"]) == (0.1, 0.25)
    with pytest.raises(
        ExportImpossibleError,
        match="attention=unfused has no counterpart in Megatron-Bridge's overrides",
    ):
        exported("megatron-bridge", **STATED)


@pytest.mark.parametrize(
    "name",
    ["embedded", "torchtitan-0.2", "torchtitan-0.3", "torchtitan-main", "nanotron", "axonn"],
)
def test_trainers_without_them_refuse_unfused_attention_and_dropout(name: str) -> None:
    for field, value in STATED.items():
        says = f"{field}={value} has no counterpart in .*; use the format megatron-lm"
        with pytest.raises(ExportImpossibleError, match=says):
            exported(name, **{field: value})
    assert exported(name, attention="fused").files


def test_accelerate_refuses_them_with_its_plugin_for_megatron_lm_alone() -> None:
    wide = Layout(tp=2, precision="bf16", recompute="full")
    refused = ADAPTERS["accelerate"].refusals(job(wide, **STATED))
    assert [reason.partition("=")[0] for reason in refused] == list(ATTENTION_FIELDS)
    assert not ADAPTERS["accelerate"].refusals(job(**STATED))


@pytest.mark.parametrize("layout", [LAYOUT, Layout(cp=2)])
def test_megatron_lm_refuses_unfused_attention_over_context_parallel_ranks(layout: Layout) -> None:
    refused = ADAPTERS["megatron-lm"].refusals(job(layout, attention="unfused"))
    assert [reason.partition(":")[0] for reason in refused] == (
        ["attention=unfused with cp=2"] if layout.cp > 1 else []
    )
    assert not ADAPTERS["megatron-lm"].refusals(job(layout, attention="fused"))


@pytest.mark.parametrize("attention", ["fused", "unfused", None])
def test_a_script_reads_them_in_its_environment(attention: Attention | None) -> None:
    told = job(attention=attention, hidden_dropout=0.25)
    environment = environment_values(told)
    assert environment.get("LAYOUT_ATTENTION") == attention
    assert environment["LAYOUT_HIDDEN_DROPOUT"] == "0.25"
    assert "LAYOUT_ATTENTION_DROPOUT" not in environment
    placeholders = placeholder_values(told)
    assert placeholders["attention"] == (attention or "default")
    assert placeholders["attention_dropout"] == "0"


def test_the_job_file_of_the_embedded_trainer_states_the_model() -> None:
    (content,) = (
        f.content for f in exported("embedded", attention="fused").files if "json" in f.name
    )
    model = ModelShape.from_mapping(json.loads(content)["model"])
    assert model == replace(PLAIN, attention="fused")
