"""What job knobs do on a simulated machine."""

from dataclasses import replace
from itertools import count

import pytest

from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.launchers.simulated import SimulatedLauncher
from layout_tuner.workers.packing.request import Share
from layout_tuner.workers.simulation.knob_effects import (
    FACTORS,
    MEMORY_FACTORS,
    NO_EFFECT,
    PARTS,
    HiddenEffect,
    HiddenEffects,
    Part,
)
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster
from layout_tuner.workers.simulation.simulated_peaks import rank_memory
from layout_tuner.workers.simulation.steps import SimulatedStep, steps

MIXTURE = model_preset("mixtral-8x7b")
MACHINE = Machine.of(CLUSTER_PRESETS["h100-sxm"])
LAYOUT = Layout(
    num_nodes=4,
    tp=2,
    cp=2,
    pp=2,
    dp=4,
    ep=4,
    num_microbatches=8,
    precision="bf16",
    zero_stage=1,
)
DRAWN = HiddenEffects(seed=5, trainer="embedded")


def with_job(layout: Layout = LAYOUT, **job: bool | int | str) -> Layout:
    return replace(layout, job=JobSettings(job))


def step(layout: Layout, effects: HiddenEffects = DRAWN) -> SimulatedStep:
    return steps([layout], MIXTURE, MACHINE, effects=effects)[0]


def touched(effect: HiddenEffect) -> set[str]:
    return {part for part, factor in zip(PARTS, effect.factors, strict=True) if factor != 1}


def of_part_alone(part: Part) -> Layout:
    """A job whose only setting scales this part alone."""
    numbers = (each for each in count() if touched(DRAWN.of(with_job(knob=each))) == {part})
    return with_job(knob=next(numbers))


def test_a_job_without_settings_is_as_it_was() -> None:
    assert DRAWN.of(LAYOUT) == NO_EFFECT
    assert step(LAYOUT) == steps([LAYOUT], MIXTURE, MACHINE)[0]


def test_seed_trainer_knob_and_value_decide_an_effect_and_nothing_else() -> None:
    def effect(name: str, value: bool | int | str, **of: object) -> HiddenEffect:
        return replace(DRAWN, **of).of_value(name, value, has_tp=False)  # type: ignore[arg-type]

    found = effect("overlap", True)
    assert found == effect("overlap", True)
    others = (
        effect("overlap", 1),
        effect("overlap", "on"),
        effect("graphs", True),
        effect("overlap", True, seed=6),
        effect("overlap", True, trainer="megatron-lm"),
    )
    assert found not in others
    both = DRAWN.of(with_job(overlap=True, graphs="full"))
    alone = [DRAWN.of(with_job(**each)) for each in ({"overlap": True}, {"graphs": "full"})]
    assert both == alone[1].and_of(alone[0]) == alone[0].and_of(alone[1])


def test_a_value_scales_one_or_two_parts_and_some_values_others_where_tp_is_above_one() -> None:
    pairs = [
        tuple(DRAWN.of_value("knob", n, has_tp=has_tp) for has_tp in (False, True))
        for n in range(300)
    ]
    assert {len(touched(effect)) for pair in pairs for effect in pair} == {1, 2}
    assert set().union(*(touched(usual) for usual, _ in pairs)) == set(PARTS)
    factors = [f for usual, with_tp in pairs for f in usual.factors + with_tp.factors if f != 1]
    assert FACTORS[0] <= min(factors) < 0.65
    assert 1.25 < max(factors) <= FACTORS[1]
    assert all(MEMORY_FACTORS[0] <= usual.memory <= MEMORY_FACTORS[1] for usual, _ in pairs)
    differ = sum(usual != with_tp for usual, with_tp in pairs)
    assert 60 < differ < 140


@pytest.mark.parametrize("part", PARTS)
def test_a_knob_scales_its_part_of_the_step(part: Part) -> None:
    job = of_part_alone(part)
    factor = DRAWN.of(job).of(part)
    usual, scaled = step(LAYOUT), step(job)
    if part == "host":  # its device waits for no host here
        small = replace(job, num_nodes=1, cp=1, pp=1, dp=4, ep=1)
        gpt = model_preset("gpt-125m")
        plain, hosted = steps([small.without_job, small], gpt, MACHINE, effects=DRAWN)
        assert (hosted.step_s > plain.step_s) == (factor > 1)
        assert hosted.step_s != plain.step_s
        return
    assert (scaled.step_s > usual.step_s) == (factor > 1)
    assert scaled.step_s != usual.step_s
    if part in ("tp", "cp", "ep", "optimizer"):
        name = f"{part}_s"
        assert scaled.parts_s[name] == pytest.approx(factor * usual.parts_s[name])
        assert scaled.parts_s["compute_s"] == usual.parts_s["compute_s"]


def test_a_part_that_a_layout_does_not_have_is_not_scaled() -> None:
    job = of_part_alone("ep")
    alone = replace(job, ep=1)
    assert step(alone) == step(alone.without_job)


def test_a_knob_changes_what_passes_hold_and_not_the_states() -> None:
    job = with_job(knob="large")
    factor = DRAWN.of(job).memory
    usual, changed = (
        rank_memory(each, MIXTURE, MACHINE, seed=3, effects=DRAWN) for each in (LAYOUT, job)
    )
    for before, after in zip(usual, changed, strict=True):
        assert (after.allocated_bytes > before.allocated_bytes) == (factor > 1)
        ratio = after.allocated_bytes / before.allocated_bytes
        assert abs(ratio - 1) < 0.9 * abs(factor - 1)
        assert (after.reserved_bytes > before.reserved_bytes) == (factor > 1)


def test_the_seed_and_the_trainer_of_a_campaign_decide_what_its_probes_measure() -> None:
    machine = SimulatedCluster.of("h100-sxm", num_nodes=4, seed=1)
    launcher = SimulatedLauncher(machine, first_node=0, num_nodes=4, clock=lambda: 0.0)
    shares = tuple(Share(node=node, devices=tuple(range(8))) for node in range(4))

    def seconds(seed: int, trainer: str, layout: Layout, run_seed: int = 3) -> float:
        request = ProbeRequest(
            model=MIXTURE, layout=layout, trainer=trainer, simulation_seed=seed, deadline_s=1e4
        )
        outcome = launcher.run(request, shares, run_seed=run_seed).outcome
        assert outcome.measurement is not None, outcome.message
        return outcome.measurement.step_time_s

    job = replace(with_job(overlap=True, graphs="full"), recompute="full", zero_stage=1)
    assert seconds(1, "embedded", job) == seconds(1, "embedded", job)
    found = {seconds(seed, of, job) for seed in (1, 2) for of in ("embedded", "megatron-lm")}
    assert len(found) == 4
    plain = job.without_job
    assert len({seconds(seed, "embedded", plain) for seed in (1, 2)}) == 1
