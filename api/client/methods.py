"""Methods of the client: each route is described once, and sent as it is described."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec

from api.client.call import Answer, Call, Item, PagedCall, SomePage, Stream
from api.schemas.campaigns_and_trials import EventRead

Parameters = ParamSpec("Parameters")

KIND = "kind"
"""Attribute of a method: the method of the sender that takes its description."""


def route(
    describe: Callable[Concatenate[Any, Parameters], Call[Answer]],
) -> Callable[Concatenate[Any, Parameters], Answer]:
    """Makes the description of a call a method that returns the answer."""
    return _sent(describe, "send")


def walk(
    describe: Callable[Concatenate[Any, Parameters], PagedCall[SomePage, Item]],
) -> Callable[Concatenate[Any, Parameters], Iterator[Item]]:
    """Makes the description of a list a method that iterates over all of its pages."""
    return _sent(describe, "walk")


def follow(
    describe: Callable[Concatenate[Any, Parameters], Stream],
) -> Callable[Concatenate[Any, Parameters], Iterator[EventRead]]:
    """Makes the description of a stream a method that iterates over its events."""
    return _sent(describe, "follow")


def _sent(describe: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(describe)
    def ask(client: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(client, kind)(describe(client, *args, **kwargs))

    setattr(ask, KIND, kind)
    return ask
