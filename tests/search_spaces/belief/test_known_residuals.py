"""What the residuals of one model's measurements say about another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from search_spaces.belief.known_measurements import Sample
from search_spaces.belief.known_residuals import known_residual
from search_spaces.belief.residual import relative_coordinates
from search_spaces.belief.time import TimeCalibration
from search_spaces.belief.time_evidence import Origin
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from tests.search_spaces.belief.test_time_calibration import A100, LARGE, LAYOUTS, SMALL, Truth

Floats = NDArray[np.float64]

DEEPER = replace(SMALL, name="deeper", num_layers=48)
COLUMNS = LayoutColumns.of_each(LAYOUTS)


def wave(layouts: Sequence[Layout]) -> Floats:
    """An error of the closed form that no factor expresses, the same for jobs of all sizes."""
    points = relative_coordinates(LayoutColumns.of_each(layouts))
    return np.asarray(0.2 * np.sin(points @ np.linspace(0.5, 1.5, points.shape[1])))


def wavy(model: ModelShape, layouts: Sequence[Layout], *, software: str = "") -> list[Sample]:
    samples = Truth(factors={}).samples(model, layouts)
    return [
        replace(each, step_time_s=(each.step_time_s or 0.0) * np.exp(off), software=software)
        for each, off in zip(samples, wave(layouts).tolist(), strict=True)
    ]


SOUND = wavy(SMALL, LAYOUTS)


def expected(samples: list[Sample], model: ModelShape, *, software: str = "") -> Floats:
    origin = Origin(
        cluster=A100.name, software=software, model=model, num_devices=16, campaign="this"
    )
    return known_residual(TimeCalibration.fit(samples), origin, COLUMNS)


def scatter(values: Floats) -> float:
    return float(np.abs(values - np.median(values)).mean())


def test_an_error_of_the_form_is_expected_of_a_deeper_model_too() -> None:
    calibrated, _ = TimeCalibration.fit(SOUND).predict(COLUMNS, DEEPER, A100)
    truth = np.log([each.step_time_s or 0.0 for each in wavy(DEEPER, LAYOUTS)])
    off = truth - calibrated
    assert scatter(off - expected(SOUND, DEEPER)) < 0.7 * scatter(off)


def test_the_expected_residual_is_of_the_same_software_and_shrinks_with_the_parameters() -> None:
    doublings = np.log2(LARGE.num_parameters / SMALL.num_parameters)
    shrunk = expected(SOUND, SMALL) * np.exp(-doublings / 4.0)
    np.testing.assert_allclose(expected(SOUND, LARGE), shrunk)
    others = wavy(SMALL, LAYOUTS, software="another")
    assert not expected(others, SMALL).any()
    assert expected(others, SMALL, software="another").any()
    assert not expected([], SMALL).any()


def test_a_slowed_run_hardly_teaches_the_residual() -> None:
    slowed = [replace(SOUND[0], step_time_s=3.0 * (SOUND[0].step_time_s or 0.0)), *SOUND[1:]]
    moved = np.abs(expected(slowed, SMALL) - expected(SOUND, SMALL))
    assert moved[0] < 0.1  # its own layout is judged by the others: the run was 1.1 too slow
    assert moved[1:].max() < 0.01


def test_equal_divisions_of_larger_jobs_have_the_same_coordinates() -> None:
    layout = LAYOUTS[5]
    larger = replace(layout, num_nodes=4, dp=2 * layout.dp)  # twice the devices and the batch
    longer = replace(layout, num_microbatches=4 * layout.num_microbatches)
    split = replace(layout, tp=2 * layout.tp, dp=layout.dp // 2)
    points = relative_coordinates(LayoutColumns.of_each([layout, larger, longer, split]))
    np.testing.assert_allclose(points[1:3], points[[0, 0]])
    assert np.abs(points[3] - points[0]).max() == 1.0
