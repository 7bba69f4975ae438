from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces.estimates.time import step_time_parts, step_time_s, time_terms
from search_spaces.estimates.time_factors import TERM_NAMES
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.presets.clusters import CLUSTER_PRESETS
from search_spaces.presets.spaces import resolve_space
from search_spaces.space import enumerate_legal

A100 = CLUSTER_PRESETS["a100-sxm"]
MODEL = ModelShape(
    name="small",
    family="gpt",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_heads=16,
    num_kv_heads=16,
    seq_length=1024,
    vocab_size=32000,
    tied_embeddings=True,
)


def make_layout(**knobs: Any) -> Layout:
    return Layout(**{"precision": "bf16", **knobs})


def test_a_step_is_the_sum_of_its_parts() -> None:
    layout = make_layout(tp=2, pp=2, dp=2, num_microbatches=4, zero_stage=1)
    parts = step_time_parts(layout, MODEL, A100)
    assert sum(part.seconds for part in parts) == pytest.approx(
        float(step_time_s(layout, MODEL, A100)[0])
    )


def test_every_term_has_its_prior_and_none_is_negative() -> None:
    legal = enumerate_legal(resolve_space("paper-table-v"), MODEL, CLUSTER_PRESETS["frontier"])
    layouts = [legal.layout(i) for i in range(0, len(legal), max(len(legal) // 20, 1))]
    for layout in layouts:
        terms = time_terms(layout, MODEL, A100)
        assert terms.names == TERM_NAMES
        assert np.all(np.isfinite(terms.seconds))
        assert np.all(terms.seconds >= 0)
