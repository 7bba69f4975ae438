"""Methods of both clients: each route is described once, and typed for each client."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

from api.client.call import Answer, Call, Item, PagedCall, SomePage, Stream
from api.client.sending import AsyncSender, SyncSender
from api.schemas.campaigns_and_trials import EventRead

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
AsyncReturned = TypeVar("AsyncReturned")


class ClientMethod(Generic[Parameters, Returned, AsyncReturned]):
    """A method that sends what a function describes.

    The function's docstring and parameters are the method's. `Client` and `AsyncClient` differ in
    what the method returns.

    Attributes:
        describe: the function; it returns a `Call`, a `PagedCall` or a `Stream`.
        kind: the method of the sender that takes the description.
    """

    def __init__(
        self,
        describe: Callable[Concatenate[Any, Parameters], Any],
        kind: Literal["send", "walk", "follow"],
    ) -> None:
        @functools.wraps(describe)
        def ask(client: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            return getattr(client, kind)(describe(client, *args, **kwargs))

        self.describe = describe
        self.kind = kind
        self._ask = ask
        functools.update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: SyncSender, owner: type) -> Callable[Parameters, Returned]: ...
    @overload
    def __get__(self, client: AsyncSender, owner: type) -> Callable[Parameters, AsyncReturned]: ...
    def __get__(self, client: SyncSender | AsyncSender | None, owner: type) -> Any:
        return self if client is None else MethodType(self._ask, client)


def route(
    describe: Callable[Concatenate[Any, Parameters], Call[Answer]],
) -> ClientMethod[Parameters, Answer, Coroutine[Any, Any, Answer]]:
    """Makes the description of a call a method that returns the answer, or a coroutine of it."""
    return ClientMethod(describe, "send")


def walk(
    describe: Callable[Concatenate[Any, Parameters], PagedCall[SomePage, Item]],
) -> ClientMethod[Parameters, Iterator[Item], AsyncIterator[Item]]:
    """Makes the description of a list a method that iterates over all of its pages."""
    return ClientMethod(describe, "walk")


def follow(
    describe: Callable[Concatenate[Any, Parameters], Stream],
) -> ClientMethod[Parameters, Iterator[EventRead], AsyncIterator[EventRead]]:
    """Makes the description of a stream a method that iterates over its events."""
    return ClientMethod(describe, "follow")
