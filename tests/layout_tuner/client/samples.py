"""Calls every method of a client with something for each of its parameters."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

from layout_tuner.api.schemas.access import QuotaPut, TokenCreate, WebhookCreate
from layout_tuner.api.schemas.plans import PlanRead
from layout_tuner.client.clients import Client
from layout_tuner.predictions.belief.plan import Plan
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.campaigns.filter import CampaignFilter
from layout_tuner.results_db.trials.filter import CHOICES, LISTED_FIELDS, TEXTS, TrialFilter
from layout_tuner.search_spaces.layouts.layout import KNOBS
from tests.kit.layouts import EVERY_KNOB


def full_filter() -> TrialFilter:
    """States something for every field."""
    words: dict[str, tuple[Any, ...]] = {**CHOICES, **dict.fromkeys(TEXTS, ("word", "b"))}
    words |= {
        name: (knob.default, getattr(EVERY_KNOB, name))
        for name, knob in KNOBS.items()
        if knob.is_text
    }
    values: dict[str, Any] = {name: words.get(name, (1, 2)) for name in LISTED_FIELDS}
    for metric in METRICS:
        whole = metric.endswith("_bytes")
        values |= {f"min_{metric}": 1 if whole else 0.5, f"max_{metric}": 7 if whole else 1e12}
    return TrialFilter(**values)


def full_campaign_filter() -> CampaignFilter:
    """States something for every field."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    texts: dict[str, Any] = dict.fromkeys(
        ("model", "cluster", "created_by", "name_contains", "group"), "n"
    )
    choices: dict[str, Any] = {
        "strategy": "random",
        "objective": "tokens_per_s",
        "visibility": "group",
    }
    times = {"created_after": moment, "created_before": moment}
    return CampaignFilter(states=("RUNNING",), **texts, **choices, **times)


SAMPLES: Mapping[Any, Callable[[], Any]] = {
    str: lambda: "some",
    int: lambda: 7,
    float: lambda: 0.5,
    bool: lambda: True,
    bytes: lambda: b"a,b\n",
    TrialFilter: full_filter,
    CampaignFilter: full_campaign_filter,
    TrainingJob: lambda: TrainingJob(tokens=10**9, num_nodes=2),
    TokenCreate: lambda: TokenCreate(name="some", role="viewer"),
    QuotaPut: lambda: QuotaPut(node_hours=0.5),
    WebhookCreate: lambda: WebhookCreate(address="https://hooks.test/x", events=["campaign.ended"]),
    datetime: lambda: datetime(2026, 1, 2, tzinfo=UTC),
}
"""A value of each type that a method takes."""


IMPORTED_LATE = {"Plan": Plan, "PlanRead": PlanRead, "Figure": object}
"""Names in the client's annotations that it imports when a plan or a plot is asked for."""


def described() -> list[str]:
    """Names of the methods that send requests, walk lists and follow streams."""
    methods = inspect.getmembers(Client, inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name != "close"]


def arguments(name: str) -> dict[str, Any]:
    """Something for each parameter of a method."""
    method = getattr(Client, name)
    hints = get_type_hints(method, localns=IMPORTED_LATE)
    kinds = {
        parameter: hints[parameter]
        for parameter in inspect.signature(method).parameters
        if parameter != "self"
    }
    for parameter, kind in list(kinds.items()):
        if get_origin(kind) is Unpack:  # **parameter: the keys of a TypedDict
            del kinds[parameter]
            kinds |= get_type_hints(get_args(kind)[0])
    return {parameter: _sample(kind, f"{name}({parameter})") for parameter, kind in kinds.items()}


def _sample(kind: Any, where: str) -> Any:
    if kind in SAMPLES:
        return SAMPLES[kind]()
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return parts[0]
    if origin in (Union, types.UnionType):
        return _sample(next(part for part in parts if part is not types.NoneType), where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"name": "some"}
    if isinstance(origin, type) and issubclass(origin, Sequence | Iterator):
        return [_sample(parts[0], where)]
    raise AssertionError(f"{where}: there is no sample of {kind} in {__name__}.SAMPLES: add one")
