"""Routes of the API as methods of both clients: described once, typed for each."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from api.client.call import Call, Item, Listing, SomePage
from api.client.following import Stream
from api.client.sending import AsyncSender, SyncSender
from api.schemas import EventRead

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


class Route(Generic[Parameters, Answer]):
    """A method that sends the call which the function below it describes.

    Of `Client` it returns the answer, of `AsyncClient` a coroutine of it. The function's docstring and
    parameters are the method's.
    """

    def __init__(self, describe: Callable[Concatenate[Any, Parameters], Call[Answer]]) -> None:
        @functools.wraps(describe)
        def ask(client: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            return client.send(describe(client, *args, **kwargs))

        self.describe = describe
        self._ask = ask
        functools.update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: SyncSender, owner: type) -> Callable[Parameters, Answer]: ...
    @overload
    def __get__(
        self, client: AsyncSender, owner: type
    ) -> Callable[Parameters, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, client: SyncSender | AsyncSender | None, owner: type) -> Any:
        return self if client is None else MethodType(self._ask, client)


class Walk(Generic[Parameters, SomePage, Item]):
    """A method that goes through the list which the function below it describes, page after page.

    Of `Client` it returns an iterator, of `AsyncClient` an asynchronous one.
    """

    def __init__(
        self, describe: Callable[Concatenate[Any, Parameters], Listing[SomePage, Item]]
    ) -> None:
        @functools.wraps(describe)
        def go(client: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            return client.walk(describe(client, *args, **kwargs))

        self.describe = describe
        self._go = go
        functools.update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: SyncSender, owner: type) -> Callable[Parameters, Iterator[Item]]: ...
    @overload
    def __get__(
        self, client: AsyncSender, owner: type
    ) -> Callable[Parameters, AsyncIterator[Item]]: ...
    def __get__(self, client: SyncSender | AsyncSender | None, owner: type) -> Any:
        return self if client is None else MethodType(self._go, client)


class Follow(Generic[Parameters]):
    """A method that follows the stream which the function below it describes.

    Of `Client` it returns an iterator, of `AsyncClient` an asynchronous one.
    """

    def __init__(self, describe: Callable[Concatenate[Any, Parameters], Stream]) -> None:
        @functools.wraps(describe)
        def go(client: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
            return client.follow(describe(client, *args, **kwargs))

        self.describe = describe
        self._go = go
        functools.update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(
        self, client: SyncSender, owner: type
    ) -> Callable[Parameters, Iterator[EventRead]]: ...
    @overload
    def __get__(
        self, client: AsyncSender, owner: type
    ) -> Callable[Parameters, AsyncIterator[EventRead]]: ...
    def __get__(self, client: SyncSender | AsyncSender | None, owner: type) -> Any:
        return self if client is None else MethodType(self._go, client)


def route(
    describe: Callable[Concatenate[Any, Parameters], Call[Answer]],
) -> Route[Parameters, Answer]:
    """Makes the description of a call a method of both clients."""
    return Route(describe)


def walk(
    describe: Callable[Concatenate[Any, Parameters], Listing[SomePage, Item]],
) -> Walk[Parameters, SomePage, Item]:
    """Makes the description of a list a method of both clients."""
    return Walk(describe)


def follow(describe: Callable[Concatenate[Any, Parameters], Stream]) -> Follow[Parameters]:
    """Makes the description of a stream a method of both clients."""
    return Follow(describe)
