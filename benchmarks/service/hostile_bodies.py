"""Hostile bodies of requests, and a search for the costliest one of each route."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote_plus

import httpx

from benchmarks.service.api_processes import ApiProcess

JSON: Final = "application/json"
YAML: Final = "application/yaml"
CSV: Final = "text/csv"
FORM: Final = "application/x-www-form-urlencoded"
PARTS: Final = "multipart/form-data; boundary=x"

SIZES: Final = (4 << 20, 1 << 20, 256 << 10, 128 << 10, 64 << 10, 16 << 10)
MOST_UNITS: Final = (1 << 30, 199_000, 24_000, 900)
"""Values of a body, so that it may stay below a limit on their number."""

UNITS: Final = {
    "ones": "1",
    "empty lists": "[]",
    "empty mappings": "{}",
    "lists of 90 levels": "[" * 90 + "]" * 90,
    "mappings of 90 levels": '{"a":' * 90 + "1" + "}" * 90,
    "mappings": '{"a":1}',
    "texts": '"a"',
    "escapes": '"' + "\\u0041" * 40 + '"',
    "long numbers": "9" * 300,
    "long fractions": "1." + "7" * 300,
    "floats": "1e308",
    "fields": '"k%x":1',
    "repeated fields": '"a":1',
    "fields with lists": '"k%x":[[]]',
}
LINES: Final = {
    "a list of lines": "- a\n",
    "lists in lines": "- - - - - a\n",
    "fields in lines": "k%x: 1\n",
    "numbers to the base 60": "- 1:2\n",
    "dates": "- 2001-01-01\n",
    "blocks": "- |\n a\n",
    "quoted": '- "\\x41"\n',
    "comments": "#\n",
}
BIG_SPACE: Final = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4, 8],
    "dp": [1, 2, 4, 8],
    "num_nodes": [1, 2, 4, 8],
    "micro_batch_size": [1, 2, 4],
    "recompute": ["none", "selective", "full"],
    "global_batch_size": 256,
    "vpp": 1,
    "zero_stage": 0,
    "sequence_parallel": False,
}
SMALL: Final[dict[str, Any]] = {
    "name": "small",
    "model": "gpt-22b",
    "cluster": "frontier",
    "strategy": "random",
    "budget": {"trials": 10},
    "space": {**BIG_SPACE, "micro_batch_size": 1, "recompute": "none"},
}
FIELDS: Final = ("", "space", "model", "cluster", "budget", "start_from", "name", "notes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A route that takes a body."""

    method: str
    path: str
    kinds: Sequence[str]
    """Content types that it accepts."""
    field: str = ""
    """Of a form: the field that has the text."""
    rest: str = ""
    """Of a form: its other fields, url-encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a body is made of."""

    route: Route
    kind: str
    unit: str
    field: str
    num_bytes: int
    num_units: int

    def body(self) -> bytes:
        """The body in its content type."""
        text = self._text()
        if self.kind == FORM:
            return f"{self.route.rest}&{self.route.field}={quote_plus(text)}".encode()
        if self.kind == PARTS:
            head = f'--x\r\nContent-Disposition: form-data; name="{self.route.field}"\r\n\r\n'
            return f"{head}{text}\r\n--x--".encode()
        return text.encode()

    def _text(self) -> str:
        most = self.num_bytes // (3 if self.kind == FORM else 1) - 1000
        if self.unit == "a large space":
            return json.dumps({**SMALL, "name": f"big{random.random()}"[:40], "space": BIG_SPACE})
        if self.kind == CSV:
            return "model,cluster\n" + UNITS.get(self.unit, LINES.get(self.unit, "")) * (
                most // 310
            )
        if self.unit in LINES:
            return self._repeated(LINES[self.unit], most, "")
        filled = self._repeated(UNITS[self.unit], most, ",")
        value = f"{{{filled}}}" if "field" in self.unit else f"[{filled}]"
        if not self.field:
            return value
        document = json.dumps(
            {**SMALL, self.field: "@"} if self.kind != JSON else {self.field: "@"}
        )
        return document.replace('"@"', value)

    def _repeated(self, unit: str, most: int, between: str) -> str:
        number = max(1, min(self.num_units, most // (len(unit) + 3)))
        return between.join(unit % i if "%x" in unit else unit for i in range(number))


@dataclass(frozen=True, kw_only=True, slots=True)
class CostlyBody:
    """The costliest body that was found for a route."""

    shape: Shape
    body: bytes
    cpu_s: float
    """Processor seconds of the service for one request."""
    status: int

    def request(self, host: str, token: str) -> bytes:
        """The request as bytes."""
        route = self.shape.route
        head = (
            f"{route.method} {route.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: {self.shape.kind}\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body

    def describe(self) -> str:
        shape = self.shape
        return (
            f"{shape.route.method} {shape.route.path}: {shape.unit} in {shape.field or 'the body'} "
            f"({shape.kind.partition(';')[0]}, {len(self.body):,} bytes): {self.status}, "
            f"{self.cpu_s * 1e3:.0f} ms"
        )


def costliest(api: ApiProcess, route: Route, token: str, for_s: float, seed: int) -> CostlyBody:
    """Random shapes in half of the time, then changes of the costliest one."""
    chance, until_s = random.Random(seed), time.monotonic() + for_s
    found: CostlyBody | None = None
    with httpx.Client(
        base_url=f"http://{api.address[0]}:{api.address[1]}",
        headers={"Authorization": f"Bearer {token}", "Accept": "text/html"},
        timeout=120,
    ) as http:
        sizes = [size for size in SIZES if _is_accepted(http, route, size)]
        shape = Shape(
            route=route, kind=route.kinds[0], unit="a large space", field="", num_bytes=sizes[0],
            num_units=MOST_UNITS[0],
        )  # fmt: skip
        while time.monotonic() < until_s:
            tried = _ask(api, http, shape)
            if found is None or tried.cpu_s > found.cpu_s:
                found = tried
            is_wide = time.monotonic() < until_s - for_s / 2
            shape = _changed(found.shape, chance, sizes, 4 if is_wide else 1)
    assert found is not None
    return found


def _changed(shape: Shape, chance: random.Random, sizes: Sequence[int], most: int) -> Shape:
    changes: dict[str, Callable[[], Any]] = {
        "kind": lambda: chance.choice(shape.route.kinds),
        "unit": lambda: chance.choice([*UNITS, *LINES, "a large space"]),
        "field": lambda: chance.choice(FIELDS),
        "num_bytes": lambda: chance.choice(sizes[:3]),
        "num_units": lambda: chance.choice(MOST_UNITS),
    }
    drawn = chance.sample(sorted(changes), chance.randint(1, most))
    return replace(shape, **{name: changes[name]() for name in drawn})


def _is_accepted(http: httpx.Client, route: Route, size: int) -> bool:
    body = b"#" * (size - 1000)
    headers = {"Content-Type": route.kinds[0]}
    return http.request(route.method, route.path, content=body, headers=headers).status_code != 413


def _ask(api: ApiProcess, http: httpx.Client, shape: Shape) -> CostlyBody:
    body, before_s = shape.body(), api.cpu_s
    headers = {"Content-Type": shape.kind}
    answer = http.request(shape.route.method, shape.route.path, content=body, headers=headers)
    if answer.status_code == 429:
        time.sleep(1)
    return CostlyBody(shape=shape, body=body, cpu_s=api.cpu_s - before_s, status=answer.status_code)
