"""Whatever a user sends is read, or refused by a `SearchSpaceError`; never a traceback."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import LAYOUT_FIELDS, Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import resolve_cluster
from search_spaces.spec.presets.models import resolve_model
from search_spaces.spec.presets.spaces import resolve_space
from search_spaces.spec.space import SearchSpace
from tests.kit.odd_values import ODD_TEXTS, nested, odd_texts, one_of

BAD_FAITH: list[Any] = [
    *(text for text in ODD_TEXTS if len(text) < 1000),
    *(json.loads(nested(depth)) for depth in (101, 300)),
    *(
        int("9" * 4000),
        10**5000,
        1 << 20,
        1 << 63,
        -(1 << 70),
        dict.fromkeys(map(str, range(500)), 1),
    ),
    *(1e308, 5e-324, math.inf, -math.inf, math.nan, "\ud800", "9" * 5000),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | one_of(BAD_FAITH)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from(["", "tiny", "local-cpu", "frontier", "10m", "full", "bf16", "gpt", "random"])
    | odd_texts
)
KEYS = (
    st.sampled_from(["from", "to", "step", "times", "min", "max", "preset", "name"])
    | st.text(max_size=3)
    | odd_texts
)
ODD_KEYS = st.integers() | st.none() | st.booleans() | st.just(date(2020, 1, 1))
"""Keys that YAML has."""
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | ODD_KEYS, inner, max_size=4),
    max_leaves=8,
)

SPACE_FIELDS = ["global_batch_size", "allow_tp_across_nodes", "preset", *LAYOUT_FIELDS]
MODEL_FIELDS = ["preset", *ModelShape.__dataclass_fields__]
CLUSTER_FIELDS = ["preset", "device_memory_gb", *Cluster.__dataclass_fields__]
CAMPAIGN: dict[str, Any] = {
    "name": "fuzz",
    "model": "tiny",
    "cluster": {"preset": "local-cpu"},
    "space": {"global_batch_size": 8, "tp": [1, 2]},
    "budget": {"trials": 3},
    "probe": {"warmup": 2},
    "objective": "tokens_per_s",
    "strategy": "random",
    "seed": 1,
    "warnings": [],
}
PATHS = [
    *((name,) for name in CAMPAIGN),
    *(("space", name) for name in SPACE_FIELDS),
    *(("cluster", name) for name in CLUSTER_FIELDS),
    *(("budget", name) for name in ("trials", "node_hours", "wall_time", "wall_time_s")),
    *(("probe", name) for name in ("warmup", "iterations", "deadline", "deadline_s", "compile")),
]


def storable(document: dict[str, Any]) -> bytes:
    """What a database and an answer must be able to hold."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def is_read_or_refused(read: Callable[[Any], object], document: object) -> None:
    with contextlib.suppress(SearchSpaceError):
        read(document)


READERS: dict[str, tuple[list[str], list[Callable[[Any], object]]]] = {
    "space": (SPACE_FIELDS, [resolve_space, SearchSpace.from_mapping]),
    "model": (MODEL_FIELDS, [resolve_model, ModelShape.from_mapping]),
    "changed model": (MODEL_FIELDS[1:], [lambda given: resolve_model({"preset": "tiny"} | given)]),
    "cluster": (CLUSTER_FIELDS, [lambda given: storable(resolve_cluster(given)[0].to_mapping())]),
    "layout": (list(LAYOUT_FIELDS), [Layout.from_mapping]),
    "campaign": (list(CAMPAIGN), [CampaignSpec.from_mapping]),
    "probe request": (
        ["model", "layout", "seed", "warmup", "iterations", "deadline_s", "compile"],
        [ProbeRequest.from_mapping],
    ),
    "outcome": (
        ["state", "reason", "message", "duration_s", "measurement", "environment"],
        [lambda given: storable(Outcome.from_mapping(given).to_mapping())],
    ),
}
"""The fields of each document, and what reads it."""


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=50)
@given(data=st.data())
def test_a_document_is_read_or_refused(name: str, data: st.DataObject) -> None:
    names, readers = READERS[name]
    some_fields = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    document = data.draw(some_fields if name == "changed model" else JSON | some_fields)
    for read in readers:
        is_read_or_refused(read, document)


def campaign_with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *inner = path
    return CAMPAIGN | {first: {**CAMPAIGN[first], inner[0]: value} if inner else value}


def judge(document: Any) -> None:
    spec = CampaignSpec.from_mapping(document)
    assert CampaignSpec.from_mapping(json.loads(storable(spec.to_mapping()))) == spec
    spec.refuse_if_too_large()


@settings(max_examples=100)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_a_campaign_with_one_field_changed_is_judged_or_refused(
    path: tuple[str, ...], value: Any
) -> None:
    is_read_or_refused(judge, campaign_with(path, value))


WRAPPINGS: list[Callable[[Any], Any]] = [
    lambda value: [value],
    lambda value: [value] * 17,
    lambda value: {"from": value},
    lambda value: {"2": value},
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_values_of_bad_faith_are_judged_or_refused_in_every_field(path: tuple[str, ...]) -> None:
    for at, value in enumerate(BAD_FAITH):
        for document in (value, WRAPPINGS[at % len(WRAPPINGS)](value)):
            is_read_or_refused(judge, campaign_with(path, document))
