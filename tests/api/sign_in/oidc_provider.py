"""The certified provider of npm's `oidc-provider` on loopback, and what its pages ask a person."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin

import httpx
import pytest

from layout_tuner.api.http.sign_in_options import SignInOptions
from tests.kit.persons import NAVIGATION, Person
from tests.kit.waiting import wait_until

HERE: Final = Path(__file__).parent / "provider"
SECRET: Final = "s+cret/of:the%client"
GROUPS: Final = {"ana": ["hpc", "/not a name"], "eve": ["guests"], "root": ["hpc", "operators"]}
"""Others are in no group."""


class OidcProvider:
    """The provider as a process, that can be ended and started again with other keys."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("node") is None or not (HERE / "node_modules").is_dir():
            pytest.skip("oidc-provider is not installed; `make provider-packages` installs it")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        self.issuer = f"http://localhost:{self.port}"
        self.urls: list[str] = []
        """Of the services that it sends browsers back to."""
        self._secret, self._log = folder / "client-secret", folder / "provider.log"
        self._secret.write_text(SECRET)
        self._num_keys = 0
        self._process: subprocess.Popen[bytes] | None = None

    def options(self, **others: Any) -> SignInOptions:
        """The options of a service that uses it."""
        return SignInOptions(
            oidc_issuer=self.issuer,
            oidc_client_id="tuner of tests",
            oidc_client_secret_file=str(self._secret),
            oidc_scopes="profile email groups",
            **others,
        )

    def start(self, *, clock_s: float = 0.0) -> None:
        """Starts it, or starts it again, with a new key; its clock may be ahead."""
        self.stop()
        self._num_keys += 1
        told = {
            "issuer": self.issuer,
            "port": self.port,
            "urls": self.urls,
            "kid": f"key-{self._num_keys}",
            "client_id": "tuner of tests",
            "client_secret": SECRET,
            "clock_s": clock_s,
            "groups": GROUPS,
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["node", "provider.mjs", json.dumps(told)], cwd=HERE, stdout=log, stderr=log
            )
        wait_until("the provider answers", self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            pytest.fail(f"the provider ended: {self._log.read_text()[-2000:]}")
        try:
            url = f"{self.issuer}/.well-known/openid-configuration"
            return httpx.get(url, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def oidc_provider(folder: Path) -> Iterator[OidcProvider]:
    """A provider that is not started yet."""
    provider = OidcProvider(folder)
    try:
        yield provider
    finally:
        provider.stop()


def come_back(person: Person, login: str, path: str = "/sign-in/with-provider") -> str:
    """Signs a person in at the provider; returns the address that the browser is sent back to."""
    answer = person.open(path)
    assert answer.status_code == 303, answer.text
    url = answer.headers["Location"]
    while not url.startswith(person.url):
        answer = person.http.get(url, headers=NAVIGATION)
        form = re.search(r"<form[^>]*>", answer.text)
        if answer.status_code == 200 and form is not None:
            answer = _filled_in(person, str(answer.url), answer.text, login)
        assert answer.is_redirect, answer.text
        url = urljoin(str(answer.url), answer.headers["Location"])
    return url


def _filled_in(person: Person, url: str, page: str, login: str) -> httpx.Response:
    action = re.search(r'<form[^>]*action="([^"]+)"', page)
    hidden = re.findall(r'name="(prompt)" value="([^"]+)"', page)
    fields: Mapping[str, str] = {**dict(hidden), "login": login, "password": "any"}
    assert action is not None, page
    return person.http.post(urljoin(url, unescape(action[1])), data=dict(fields))


def signed_in_by(
    person: Person, login: str, path: str = "/sign-in/with-provider"
) -> httpx.Response:
    """The service's answer when a person comes back from the provider."""
    back = come_back(person, login, path)
    return person.http.get(back, headers={**NAVIGATION, "Sec-Fetch-Site": "cross-site"})
