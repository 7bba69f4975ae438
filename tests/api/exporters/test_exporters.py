"""The job that is exported, and files of one that differs from what was measured: they say so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from api.exporters import FORMATS, ExportFormatUnknownError, ExportSource, export
from api.exporters.base import ExportImpossibleError, KnobsLackingError
from api.schemas.campaigns_and_trials import ExportRead
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from workers.trainer.job.job import TrainJob

PLAIN = Layout(tp=2, dp=2, zero_stage=1, micro_batch_size=4, precision="bf16")
INTERLEAVED = Layout(pp=2, dp=4, vpp=2, num_microbatches=4, precision="bf16")
GROUPED = replace(INTERLEAVED, zero_stage=1, zero_replicas=2)
"""megatron-deepspeed lacks both its vpp and its zero_replicas."""


def make_source(layout: Layout = INTERLEAVED, model: str = "gpt-22b") -> ExportSource:
    job = TrainerJob(model=model_preset(model), layout=layout)
    return ExportSource(campaign="wide", trial=7, job=job, comments=("measured: 5 tokens/s",))


def comments_of(bundle: ExportRead) -> list[str]:
    script = next(file for file in bundle.files if file.name.endswith(".sh"))
    return [line[2:] for line in script.content.splitlines() if line.startswith("# ")]


def test_the_trainer_reads_the_exported_job_and_writes_it_back() -> None:
    source = make_source(PLAIN, "tiny-llama")
    (file,) = export("trainer", source).files
    assert file.name == "job.json"
    exported = json.loads(file.content)
    assert (exported["seed"], exported["warmup"]) == (0, 2)
    job = TrainJob.from_mapping(exported)
    assert (job.model, job.layout) == (source.job.model, PLAIN)
    assert exported.items() <= job.to_mapping().items()
    more = {"data": {"tokens": "t.npy"}, "checkpoint": {"directory": "saved"}}
    extended = TrainJob.from_mapping({**exported, **more})
    assert TrainJob.from_mapping(extended.to_mapping()) == extended


def test_a_compiled_probe_is_exported_as_a_compiled_job() -> None:
    plain = make_source(PLAIN, "tiny-llama")
    source = replace(plain, job=replace(plain.job, compile=True))
    (file,) = export("trainer", source).files
    assert TrainJob.from_mapping(json.loads(file.content)).compile
    assert not any("compile" in note for note in export("megatron-lm", plain).notes)
    assert any("compile=true has no flag" in note for note in export("megatron-lm", source).notes)


def test_an_unknown_format_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ExportFormatUnknownError, match=rf"'nemo'.*{', '.join(FORMATS)}"):
        export("nemo", make_source())


def test_knobs_that_the_trainer_lacks_are_refused_with_what_happens_and_how_to_accept_it() -> None:
    happens = r"plain 1F1B instead of vpp=2(.|\n)*accept that with --without vpp"
    both = ("vpp", "zero_replicas")
    for layout, without, knobs, says in (
        (INTERLEAVED, [], ("vpp",), happens),
        (GROUPED, [], both, "--without vpp --without zero_replicas"),
        (GROUPED, ["vpp"], ("zero_replicas",), "sharded over all of dp=4"),
    ):
        with pytest.raises(KnobsLackingError, match=says) as caught:
            export("megatron-deepspeed", make_source(layout), without=without)
        assert caught.value.knobs == knobs


def test_without_the_knob_the_files_are_those_of_the_plain_layout_and_say_so() -> None:
    bundle = export("megatron-deepspeed", make_source(), without=["vpp"])
    plain = export("megatron-deepspeed", make_source(replace(INTERLEAVED, vpp=1)))
    script, script_of_plain = (
        [line for line in each.files[0].content.splitlines() if not line.startswith("# ")]
        for each in (bundle, plain)
    )
    assert script == script_of_plain
    head = comments_of(bundle)
    assert head[:3] == [
        f"campaign wide, trial 7: {INTERLEAVED.key}",
        "measured: 5 tokens/s",
        f"this file is for {replace(INTERLEAVED, vpp=1).key}, which was not measured",
    ]
    assert head[3].startswith("without vpp: DeepSpeed's pipeline has no interleaved schedule")
    assert bundle.notes[:2] == head[2:4]
    assert not any("not measured" in line for line in comments_of(plain))


def test_a_changed_job_without_a_layout_or_with_one_in_json_says_so() -> None:
    source = make_source()
    changed = source.changed(source.job, "without recompute: it recomputes whatever it wants")
    assert changed.head[2:] == (
        "this file is for a job with other knobs than this layout, which was not measured",
        "without recompute: it recomputes whatever it wants",
    )

    bundle = export("megatron-deepspeed", make_source(replace(INTERLEAVED, vpp=1)))
    script, config = bundle.files
    assert "# measured: 5 tokens/s" in script.content
    assert json.loads(config.content)["train_batch_size"] == 16

    job = make_source(GROUPED).job.without(["zero_stage"])
    assert (job.layout.zero_stage, job.layout.zero_replicas) == (0, 1)
    assert replace(job.layout, zero_stage=1, zero_replicas=2) == GROUPED


def test_dropping_a_knob_that_the_trainer_has_or_nobody_knows_is_refused() -> None:
    plain = make_source(replace(INTERLEAVED, vpp=1))
    for source, without, why in (
        (plain, ["vpp"], r"without=vpp is not a knob .*lacks none"),
        (plain, ["colour"], r"without=colour is not a knob .*lacks none"),
        (make_source(), ["vpp", "tp"], r"without=tp .*it lacks vpp\)"),
    ):
        with pytest.raises(ExportImpossibleError, match=why):
            export("megatron-deepspeed", source, without=without)


def test_a_change_of_the_job_stands_in_every_file_that_can_have_comments() -> None:
    measured = Layout(dp=4, num_microbatches=4, precision="bf16")
    source = make_source(measured, "llama-7b")  # a model and a layout that no trainer refuses
    larger = replace(measured, num_nodes=2, dp=8, num_microbatches=2)
    scaled = source.changed(replace(source.job, layout=larger), "scaled from 1 node to 2")
    for name in FORMATS:
        accepted = [*FORMATS[name].adapter.all_lacking(scaled.job)]
        bundle = export(name, scaled, without=accepted)
        assert "scaled from 1 node to 2" in bundle.notes
        for file in bundle.files:
            if not file.name.endswith(".json"):
                assert "# scaled from 1 node to 2" in file.content
                assert f"trial 7: {measured.key}" in file.content
