"""Malformed and odd HTTP over sockets: never a server error, and the service keeps running.

The input follows from a seed; a failure shows the seed and the bytes.
"""

from __future__ import annotations

import random
import socket
from typing import Final

import httpx
import pytest

from tests.kit.populated import Populated

SEED: Final = 20
FEW: Final = 400
MANY: Final = 2000
ANSWER_WITHIN_S: Final = 30.0
REST_WITHIN_S: Final = 0.3
"""How long an answer is waited for to what may not be whole."""

METHODS: Final = [
    *("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "get", "\x00")
]
ODD: Final = [
    *("..", "%2e%2e", "%00", "%ff", "%", "%zz", "a" * 300, "9" * 40, "-1", "0", "\u00e9", "'", '"'),
    *("%0d%0aX: y", "%F0%9F%92%A9", "*", "null", "first", "ended", "1", "2", "tiny", "n0"),
    *("%2F", "//", ";", "?", "#", "\\", "\x7f", "1e309", "NaN", "local-cpu", "w" * 32),
]
QUERIES: Final = [
    *(
        "limit",
        "cursor",
        "state",
        "sort",
        "after",
        "fields",
        "tp",
        "min_mfu",
        "objective",
        "within",
    ),
    *("format", "name", "since", "until", "created_after", "front", "tokens_per_s_min", "wait_s"),
]
HEADERS: Final = [
    *("Host", "Content-Type", "Content-Length", "Transfer-Encoding", "Authorization", "Expect"),
    *("If-None-Match", "Last-Event-ID", "Idempotency-Key", "Accept", "Range", "Connection"),
    *("Origin", "X-Forwarded-For", "Content-Encoding", "Upgrade", "Cookie", "Accept-Encoding"),
]
BODIES: Final = [
    *(b"", b"{}", b"[]", b"null", b"0", b'"x"', b"{", b"\xff\xfe", b"\x00" * 50, b"[" * 5000),
    *(b"{" + b'"a":{' * 3000, b'{"name":"\\ud800"}', b'{"name":"\\u0000"}', b"NaN", b"9" * 5000),
    *(b'{"max_trials":1e400}', b'{"budget":{"trials":1e999}}', b"a: &a [*a,*a]"),
    *(b"- !!python/object/apply:os.system [id]", b"name,tp\n" * 40),
    b'{"trials":[{"trial_id":1,"attempt":9223372036854775808}]}',
]
TYPES: Final = ["application/json", "application/yaml", "text/csv", "a/b; charset=\xff", "", "json"]


class Fuzzer:
    """Makes requests up, most of them of routes that there are."""

    def __init__(self, service: Populated, paths: list[str], seed: int) -> None:
        self._dice = random.Random(seed)
        self._service = service
        self._paths = paths

    def request(self) -> tuple[bytes, bool]:
        """A request, and whether it is whole: of others the service waits for the rest."""
        dice = self._dice
        is_sane = dice.random() < 0.6
        method, target = dice.choice(METHODS[:5] if is_sane else METHODS), self._target()
        body = dice.choice(BODIES)
        lines = [f"{method} {target} HTTP/1.1"]
        lines += ["Host: 127.0.0.1", "Connection: close"]
        if dice.random() < 0.9:
            role = dice.choice(list(self._service.tokens))
            lines.append(f"Authorization: Bearer {self._service.tokens[role]}")
        lines.append(f"Content-Type: {dice.choice(TYPES[:3] if is_sane else TYPES)}")
        length = len(body) if is_sane else dice.choice([len(body), 0, -1, "x"])
        lines.append(f"Content-Length: {length}")
        if not is_sane:
            lines += [f"{dice.choice(HEADERS)}: {self._odd()}" for _ in range(dice.randint(0, 3))]
        request = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
        return (request, True) if is_sane else (self._broken(request), False)

    def _target(self) -> str:
        path = self._dice.choice(self._paths)
        while "{" in path:
            before, _, rest = path.partition("{")
            name, _, after = rest.partition("}")
            known = self._service.names.get(name, ["x"])
            value = self._dice.choice(known) if self._dice.random() < 0.7 else self._odd()
            path = before + value + after
        queries = [
            f"{self._dice.choice(QUERIES)}={self._odd()}"
            for _ in range(self._dice.choice([0, 0, 1, 3]))
        ]
        return path + ("?" + "&".join(queries) if queries else "")

    def _odd(self) -> str:
        return self._dice.choice(ODD)

    def _broken(self, request: bytes) -> bytes:
        """The same with some bytes changed, or cut off."""
        garbled = bytearray(request)
        for _ in range(self._dice.choice([0, 0, 1, 5])):
            garbled[self._dice.randrange(len(garbled))] = self._dice.randrange(256)
        end = self._dice.choice([len(garbled), self._dice.randrange(1, len(garbled) + 1)])
        return bytes(garbled[:end])


@pytest.fixture(scope="module")
def paths(shared: Populated) -> list[str]:
    document = httpx.get(f"{shared.url}/openapi.json", timeout=60).json()
    return [*document["paths"], "/docs", "/openapi.json", "/v1", "/", "*"]


def status_of(service: Populated, request: bytes, within_s: float) -> int | None:
    """The answer to these bytes; None: none in time, or the connection is closed without one."""
    address = httpx.URL(service.url)
    with socket.create_connection((address.host, address.port or 80), within_s) as connection:
        try:
            connection.sendall(request)
            answer = connection.recv(65536)
        except (ConnectionError, TimeoutError):
            return None
    return int(answer.split(None, 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [FEW, pytest.param(MANY, marks=[pytest.mark.nightly, pytest.mark.timeout(400)])]
)
def test_whatever_is_sent_is_no_fault_and_the_service_lives_on(
    shared: Populated, paths: list[str], number: int
) -> None:
    fuzzer = Fuzzer(shared, paths, SEED + number)
    seen: set[int] = set()
    for _ in range(number):
        request, is_whole = fuzzer.request()
        status = status_of(shared, request, ANSWER_WITHIN_S if is_whole else REST_WITHIN_S)
        assert status is None or status < 500, (status, request)
        assert status or not is_whole, ("no answer", request)
        seen.add(status or 0)
    assert {200, 400, 401, 403, 404, 405, 422} <= seen, "the fuzzer does not reach far"
    assert httpx.get(f"{shared.url}/v1/health").status_code == 200
    shared.assert_lists_answer()
