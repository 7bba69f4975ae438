"""A campaign with cheap probes beside full ones, over HTTP."""

from __future__ import annotations

from typing import Any

from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from tests.kit.api import CAMPAIGN, Api
from tests.kit.campaigns import space_of

MODEL = model_preset("tiny")
FULL = Layout(dp=2, num_microbatches=64)
ONLY_CHEAP = Layout(tp=2, dp=2, num_microbatches=64)
FEWER = Fidelity(num_microbatches=8, dp=1, num_layers=MODEL.num_layers)
FEWER_LAYERS = Fidelity(num_microbatches=8, dp=2, num_layers=2)
CHEAP_CAMPAIGN: dict[str, Any] = {
    **CAMPAIGN,
    "name": "large",
    "strategy": "guided",
    "budget": {"node_hours": 40},
    "space": space_of(global_batch_size=128, tp=[1, 2], dp=2),
}
PREDICTION = Prediction(
    step_time_s=0.25,
    log_step_time_sd=0.1,
    peak_memory_bytes=4 << 30,
    fit_probability=0.99,
    source="calibrated",
)


def add_cheap_campaign(api: Api) -> dict[int, int]:
    """Two cheap probes of one layout, one of another, and a full one; returns ids by number.

    1: fewer micro-batches and replicas; 2: fewer micro-batches and layers, of another layout; 3:
    the layout of the first in full, which is the winner.
    """
    api.post("/campaigns", CHEAP_CAMPAIGN, status=201)
    worker = api.register()
    cheap = {"tokens_per_s": 2048.0, "prediction": PREDICTION}
    first = api.complete(worker, "large", FULL, fidelity=FEWER, **cheap)
    second = api.complete(worker, "large", ONLY_CHEAP, fidelity=FEWER_LAYERS, **cheap)
    third = api.complete(worker, "large", FULL, tokens_per_s=16384.0, prediction=PREDICTION)
    return {1: first, 2: second, 3: third}
