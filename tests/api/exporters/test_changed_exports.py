"""Exports of a job that differs from the one that was measured: the files say so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from api.exporters import FORMATS, export
from api.exporters.base import ExportBundle, ExportImpossibleError, ExportSource, KnobsLackingError
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob

INTERLEAVED = Layout(pp=2, dp=4, vpp=2, num_microbatches=4, precision="bf16")
GROUPED = replace(INTERLEAVED, zero_stage=1, zero_replicas=2)
"""megatron-deepspeed lacks both its vpp and its zero_replicas."""


def make_source(layout: Layout = INTERLEAVED, model: str = "gpt-22b") -> ExportSource:
    job = TrainerJob(model=model_preset(model), layout=layout)
    return ExportSource(campaign="wide", trial=7, job=job, comments=("measured: 5 tokens/s",))


def comments_of(bundle: ExportBundle) -> list[str]:
    script = next(file for file in bundle.files if file.name.endswith(".sh"))
    return [line[2:] for line in script.content.splitlines() if line.startswith("# ")]


def test_knobs_that_the_trainer_lacks_are_refused_with_what_happens_and_how_to_accept_it() -> None:
    with pytest.raises(KnobsLackingError) as caught:
        export("megatron-deepspeed", make_source())
    assert caught.value.knobs == ("vpp",)
    said = str(caught.value)
    assert "plain 1F1B instead of vpp=2" in said
    assert "accept that with --without vpp" in said
    with pytest.raises(KnobsLackingError, match="--without vpp --without zero_replicas"):
        export("megatron-deepspeed", make_source(GROUPED))
    with pytest.raises(KnobsLackingError) as caught:
        export("megatron-deepspeed", make_source(GROUPED), without=["vpp"])
    assert caught.value.knobs == ("zero_replicas",)


def test_without_the_knob_the_files_are_those_of_the_plain_layout_and_say_so() -> None:
    bundle = export("megatron-deepspeed", make_source(), without=["vpp"])
    plain = export("megatron-deepspeed", make_source(replace(INTERLEAVED, vpp=1)))
    arguments = [line for line in bundle.files[0].content.splitlines() if not line.startswith("# ")]
    assert arguments == [
        line for line in plain.files[0].content.splitlines() if not line.startswith("# ")
    ]
    head = comments_of(bundle)
    assert head[:3] == [
        f"campaign wide, trial 7: {INTERLEAVED.key}",
        "measured: 5 tokens/s",
        f"this file is for {replace(INTERLEAVED, vpp=1).key}, which was not measured",
    ]
    assert head[3].startswith("without vpp: DeepSpeed's pipeline has no interleaved schedule")
    assert bundle.notes[:2] == tuple(head[2:4])
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


@pytest.mark.parametrize("knob", ["tp", "vpp", "colour"])
def test_dropping_a_supported_knob_is_refused(knob: str) -> None:
    source = make_source(replace(INTERLEAVED, vpp=1))
    with pytest.raises(ExportImpossibleError, match=rf"without={knob} is not a knob .*lacks none"):
        export("megatron-deepspeed", source, without=[knob])
    if knob != "vpp":
        with pytest.raises(ExportImpossibleError, match=rf"without={knob} .*it lacks vpp\)"):
            export("megatron-deepspeed", make_source(), without=["vpp", knob])


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
