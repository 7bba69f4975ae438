"""What job knobs do to peaks of memory, before and after measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from layout_tuner.predictions.belief.job_knobs.knob_memory import KnobMemory
from layout_tuner.predictions.belief.job_knobs.knob_step_time import KnownKnobs
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import TrainerMemory
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobEffect
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.units import GIB
from tests.kit.layouts import filled_layouts

Floats = NDArray[np.float64]

A100 = CLUSTER_PRESETS["a100-sxm"]
SMALL = model_preset("gpt-1.3b")
LAYOUTS = filled_layouts(
    16,
    global_batch=256,
    fixed={"num_nodes": 2, "precision": "bf16"},
    tp=(1, 2, 4),
    pp=(1, 2),
    micro_batch_size=(1, 2, 4),
)
GRAPHS = JobSettings({"graphs": True})


def knob(*effects: KnobEffect) -> KnobMemory:
    declared = JobKnob(
        name="graphs",
        kind="switch",
        values=(False, True),
        default=False,
        touches=("host",),
        effects={True: effects[0]} if effects else {},
    )
    return KnobMemory(known=KnownKnobs(knobs={"graphs": declared}))


def with_graphs(layouts: Sequence[Layout]) -> list[Layout]:
    return [replace(layout, job=GRAPHS) for layout in layouts]


def peaks(memory: TrainerMemory, layouts: Sequence[Layout]) -> tuple[Floats, Floats]:
    return memory.peak_bytes(LayoutColumns.of_each(layouts), SMALL)


def added(memory: TrainerMemory, layouts: Sequence[Layout]) -> Floats:
    """Bytes that the setting adds to the expected peaks."""
    return peaks(memory, with_graphs(layouts))[0] - peaks(memory, layouts)[0]


def believe(*effects: KnobEffect) -> TrainerMemory:
    return TrainerMemory.prior(A100, knobs=knob(*effects))


def test_stated_bytes_are_added_and_the_job_fits_less_surely() -> None:
    memory = believe(KnobEffect(memory_bytes=5 * GIB, source="a table"))
    assert added(memory, LAYOUTS) == pytest.approx(np.full(len(LAYOUTS), 5.0 * GIB))
    columns, plain = (LayoutColumns.of_each(each) for each in (with_graphs(LAYOUTS), LAYOUTS))
    mean, _ = peaks(memory, LAYOUTS)
    capacity = float(np.median(mean))
    fits = [memory.fits(each, SMALL, capacity) for each in (columns, plain)]
    assert (fits[0] < fits[1]).all()


@pytest.mark.parametrize("part", ["weights", "gradients", "optimizer", "all"])
def test_a_factor_scales_its_part_of_the_peak(part: str) -> None:
    memory = believe(KnobEffect(memory_of=part, memory_factor=0.5))  # type: ignore[arg-type]
    layout = LAYOUTS[0]
    assert layout.pp == 1
    (stage,) = stage_memory(layout, SMALL, memory.storage)
    held = stage.total_bytes if part == "all" else getattr(stage, f"{part}_bytes")
    assert added(memory, [layout])[0] == pytest.approx(-0.5 * held, rel=1e-6)


def test_a_setting_never_saves_the_whole_peak() -> None:
    memory = believe(KnobEffect(memory_bytes=-1e14))
    left, whole = (peaks(memory, each)[0] for each in (with_graphs(LAYOUTS), LAYOUTS))
    assert left == pytest.approx(0.1 * whole)


@pytest.mark.parametrize("effects", [(), (KnobEffect(touches=("host",), factor=0.9),)])
def test_a_value_whose_memory_is_not_stated_widens_the_peak_alone(
    effects: tuple[KnobEffect, ...],
) -> None:
    memory = believe(*effects)
    assert added(memory, LAYOUTS) == pytest.approx(np.zeros(len(LAYOUTS)), abs=1.0)
    (mean, with_sd), (_, sd) = (peaks(memory, each) for each in (with_graphs(LAYOUTS), LAYOUTS))
    assert np.sqrt(np.square(with_sd) - np.square(sd)) == pytest.approx(0.06 * mean)


def test_measured_peaks_teach_what_a_knob_adds_to_jobs_that_were_not_measured() -> None:
    memory = believe(KnobEffect(memory_factor=1.0, memory_log_sd=0.2))
    measured, others = LAYOUTS[::4], LAYOUTS[2::4]
    expected, _ = peaks(memory, measured)
    samples = [
        Sample(
            model=SMALL,
            cluster=A100,
            layout=layout,
            state="completed",
            step_time_s=1.0,
            peak_memory_bytes=round(peak * (1.15 if layout.job else 1.0)),
        )
        for each in (measured, with_graphs(measured))
        for layout, peak in zip(each, expected.tolist(), strict=True)
    ]
    learnt = memory.updated(samples)
    gained = added(learnt, others) / peaks(learnt, others)[0]
    assert gained.min() > 0.1
    assert gained.max() < 0.2
    assert peaks(learnt, others)[0] == pytest.approx(peaks(memory, others)[0], rel=0.03)


def test_stages_of_one_layout_have_its_settings() -> None:
    memory = believe(KnobEffect(memory_bytes=GIB))
    layout = next(each for each in LAYOUTS if each.pp == 2)
    plain, _ = memory.stage_peak_bytes(layout, SMALL)
    changed, _ = memory.stage_peak_bytes(replace(layout, job=GRAPHS), SMALL)
    assert changed - plain == pytest.approx([GIB, GIB])
