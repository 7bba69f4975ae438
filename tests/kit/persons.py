"""Persons at browsers, as far as HTTP shows them: cookies, and headers that browsers write."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
from tests.kit.api import TOKEN, bearer
from tests.kit.live import Live, live_server
from tests.kit.postgres import upgraded
from tests.kit.store import TurnableClock

NAVIGATION = {
    "Accept": "text/html,application/xhtml+xml,*/*;q=0.8",
    "Sec-Fetch-Site": "none",
    "Sec-Fetch-Mode": "navigate",
    "Sec-Fetch-Dest": "document",
}
"""Headers of a page that a person opens by hand."""


class Person:
    """A person at a browser. It sends its cookies to every port, as browsers do."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=30, **options)

    @property
    def own(self) -> dict[str, str]:
        """Headers of what a page of the service sends."""
        return {"Origin": self.url, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}

    def open(self, path: str, **headers: str) -> httpx.Response:
        """Opens a page."""
        return self.http.get(path, headers={**NAVIGATION, **headers})

    def sign_in_with_code(self, code: str, next: str = "/", **headers: str) -> httpx.Response:  # noqa: A002
        """What the page's script does."""
        document = {"code": code, "next": next}
        return self.http.post("/sign-in", json=document, headers={**self.own, **headers})

    def sign_in_by_form(self, secret: str, next: str = "/", **headers: str) -> httpx.Response:  # noqa: A002
        """What the form does without a script."""
        return self.send_form("/sign-in", {"secret": secret, "next": next}, **headers)

    def form_token(self) -> str:
        """A form token of a page of this session."""
        page = self.open("/")
        assert page.status_code == 200, page.text
        found = re.search(r'name="csrf-token" content="([^"]+)"', page.text)
        return found[1]

    def send_form(self, path: str, fields: dict[str, str], **headers: str) -> httpx.Response:
        """Sends a form of a page, as without a script."""
        sent = {**NAVIGATION, **self.own, "Sec-Fetch-Mode": "navigate", **headers}
        return self.http.post(path, data=fields, headers=sent)

    @property
    def cookies(self) -> dict[str, str]:
        """The cookies that it has."""
        return {cookie.name: cookie.value or "" for cookie in self.http.cookies.jar}

    def take_cookies_of(self, other: Person) -> None:
        """What a thief does."""
        for name, value in other.cookies.items():
            self.http.cookies.set(name, value, domain="127.0.0.1")


class Signing:
    """A service with tokens, and persons at browsers."""

    def __init__(self, live: Live, store: Store, clock: TurnableClock) -> None:
        self.url, self.store, self.clock = live.url, store, clock
        self.address = live.address
        self._persons: list[Person] = []

    def person(self, **options: Any) -> Person:
        self._persons.append(Person(self.url, **options))
        return self._persons[-1]

    def code(self, token: str = TOKEN) -> str:
        url = f"{self.url}/v1/sign-in-codes"
        made = httpx.post(url, headers=bearer(token), trust_env=False)
        assert made.status_code == 201, made.text
        return str(made.json()["code"])

    def signed_in(self, token: str = TOKEN) -> Person:
        person = self.person()
        answer = person.sign_in_with_code(self.code(token))
        assert answer.status_code == 200, answer.text
        return person

    def close(self) -> None:
        for person in self._persons:
            person.http.close()


@contextmanager
def served(
    path: Path,
    *,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> Iterator[Signing]:
    """A service with these settings on a database of its own."""
    clock = TurnableClock()
    with (
        closing(Store.open(upgraded(path), clock=clock)) as store,
        live_server(Settings(token=TOKEN, **settings), store, tls=tls) as live,
        closing(Signing(live, store, clock)) as signing,
    ):
        yield signing
