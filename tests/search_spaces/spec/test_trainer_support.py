"""The rules about the embedded trainer say what the trainer itself says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces.spec.layout import PRECISIONS, RECOMPUTE_MODES, Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from search_spaces.spec.rules import violations
from workers.trainer.open_training import unsupported

TINY = model_preset("tiny")
BASE = Layout(tp=2, pp=2, dp=2, num_microbatches=2)

FEATURES: list[dict[str, Any]] = [
    {},
    {"vpp": 2},
    {"sequence_parallel": True},
    {"zero_stage": 1},
    {"dp": 4, "zero_stage": 1, "zero_replicas": 2},
    *({"recompute": mode} for mode in RECOMPUTE_MODES),
    *({"precision": precision} for precision in PRECISIONS),
]


def test_the_space_refuses_exactly_what_the_trainer_refuses() -> None:
    for feature in FEATURES:
        layout = replace(BASE, **feature)
        refused = violations(layout, TINY, CLUSTER_PRESETS["frontier"], scopes={"trainer"})
        assert bool(refused) == bool(unsupported(layout, TINY)), feature
