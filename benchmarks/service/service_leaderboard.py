"""Pages of leaderboards from a database of a million trials, beside the SQL for the same figures.

The service is a process of its own and is asked over HTTP on loopback, one page at a time. The SQL
goes through the plain driver of the database, in the benchmark's own process. Pages and queries
take turns, each of a campaign drawn at random.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.service.api_processes import ApiProcess
from benchmarks.service.bare_leaderboard import BareLeaderboard
from benchmarks.service.postgres_server import FAST, running_server
from benchmarks.service.service_database import fill
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.results_db.store import Store

TRIALS: Final = 1000
"""Of each campaign."""
CAMPAIGNS_A_SCALE: Final = 125
FEW_CAMPAIGNS: Final = 10
ROUNDS_A_SCALE: Final = 100
WARM_UP: Final = 50
P99_S: Final = 0.060
TIMES_SMALL: Final = 2.0
LIMIT: Final = 100
"""Layouts of a page: what the API hands out unless asked for another number."""
SERVER: Final = {**FAST, "shared_buffers": "512MB"}

LEADERBOARD_NOTES: Final = f"""\
{LIMIT} layouts a page, 180 KB of JSON, read to the last byte and not parsed; 20 of the trials are repeats. Pages take turns with bare \
queries (`benchmarks/service/bare_leaderboard.py`), {ROUNDS_A_SCALE * 8} of each; a run prints the ratio. A ratio is that of two p99s. The files are in the page cache, PostgreSQL 18 has 512 MB of shared buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of what took turns."""

    page_s: list[float]
    bare_s: list[float]
    list_s: list[float]
    """Of `GET /v1/campaigns`, 50 campaigns."""


def measure_leaderboard(folder: Path, scale: int) -> list[Figure]:
    """Both databases, large and small."""
    figures = []
    for name, database in (("SQLite", sqlite_database), ("PostgreSQL", postgres_database)):
        many, few = (
            measure_pages(folder / f"{name}-{campaigns}", database, campaigns, scale)
            for campaigns in (CAMPAIGNS_A_SCALE * scale, FEW_CAMPAIGNS)
        )
        figures += figures_of(name, many, few, CAMPAIGNS_A_SCALE * scale)
    return figures


def figures_of(name: str, many: Times, few: Times, campaigns: int) -> list[Figure]:
    page_s, bare_s = percentile(many.page_s, 99), percentile(many.bare_s, 99)
    small_s = percentile(few.page_s, 99)
    what = f"{name}, {campaigns:,} campaigns of {TRIALS:,} trials"
    return [
        Figure(
            name=f"a page of the leaderboard, {what}, p99",
            asked=f"under {P99_S * 1e3:.0f} ms",
            measured=spread(many.page_s),
            reached=page_s < P99_S,
        ),
        Figure(
            name=f"that over the bare query, {name}",
            asked="",
            measured=f"{page_s / bare_s:.2f} times (medians {ratio(many.page_s, many.bare_s)}); "
            f"the query {spread(many.bare_s)}",
            reached=None,
        ),
        Figure(
            name=f"the page over that from {FEW_CAMPAIGNS} campaigns, {name}",
            asked=f"under {TIMES_SMALL:g} times",
            measured=f"{page_s / small_s:.2f} times (medians {ratio(many.page_s, few.page_s)}); "
            f"there {spread(few.page_s)}",
            reached=page_s / small_s < TIMES_SMALL,
        ),
        Figure(
            name=f"a page of 50 campaigns with their progress, {what}",
            asked="",
            measured=spread(many.list_s),
            reached=None,
        ),
    ]


def measure_pages(folder: Path, database: Any, campaigns: int, scale: int) -> Times:
    """Fills a database and asks for pages of it."""
    folder.mkdir()
    with database(folder, campaigns) as (api, bare):
        return _take_turns(api, bare, campaigns, ROUNDS_A_SCALE * scale)


@contextmanager
def sqlite_database(folder: Path, campaigns: int) -> Iterator[tuple[ApiProcess, BareLeaderboard]]:
    """SQLite in the data directory of the service that is asked."""
    api = ApiProcess(folder, "api")
    with closing(Store.open(api.data)) as store:
        fill(store, campaigns=campaigns, trials=TRIALS)
    path = api.data.database_url.removeprefix("sqlite:///")
    with api, closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield api, BareLeaderboard(connection)


@contextmanager
def postgres_database(folder: Path, campaigns: int) -> Iterator[tuple[ApiProcess, BareLeaderboard]]:
    """A database of a server of its own."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server(settings=SERVER))
        url = stack.enter_context(server.database())
        with closing(Store.connect(url)) as store:
            fill(store, campaigns=campaigns, trials=TRIALS)
        api = stack.enter_context(ApiProcess(folder, "api", url))
        connection = stack.enter_context(
            closing(psycopg.connect(url, autocommit=True, prepare_threshold=0))
        )
        yield api, BareLeaderboard(connection)


def _take_turns(api: ApiProcess, bare: BareLeaderboard, campaigns: int, rounds: int) -> Times:
    dice = random.Random(7)
    times = Times(page_s=[], bare_s=[], list_s=[])
    with closing(Pages(api)) as pages:
        _refuse_different_figures(pages, bare)
        for turn in range(WARM_UP + rounds):
            first, second = (f"campaign-{dice.randint(1, campaigns)}" for _ in range(2))
            page_s = seconds_of(lambda name=first: pages.leaderboard(name))
            bare_s = seconds_of(lambda name=second: bare.page(name, LIMIT))
            if turn >= WARM_UP:
                times.page_s.append(page_s)
                times.bare_s.append(bare_s)
            if turn >= WARM_UP and turn % 10 == 0:
                times.list_s.append(seconds_of(pages.campaigns))
    return times


class Pages:
    """Pages over one kept connection."""

    def __init__(self, api: ApiProcess) -> None:
        host, port, token = api.address
        self._http = http.client.HTTPConnection(host, port)
        self._headers = {"Authorization": f"Bearer {token}"}

    def leaderboard(self, campaign: str) -> bytes:
        """The page as it comes."""
        return self._get(f"/v1/campaigns/{campaign}/leaderboard?limit={LIMIT}")

    def campaigns(self) -> bytes:
        """The first page of the list."""
        return self._get("/v1/campaigns?limit=50")

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str) -> bytes:
        self._http.request("GET", path, headers=self._headers)
        answer = self._http.getresponse()
        body = answer.read()
        assert answer.status == http.client.OK, body
        return body


def _refuse_different_figures(pages: Pages, bare: BareLeaderboard) -> None:
    """Both ways yield the same layouts with the same figures, or the comparison is of nothing."""
    page = json.loads(pages.leaderboard("campaign-2"))
    found = bare.page("campaign-2", LIMIT)
    assert (page["total"], page["constrained"]) == (found.total, 0)
    shown = [(trial["id"], trial["value"], trial["measurement"]["mfu"]) for trial in page["trials"]]
    assert [each[0] for each in shown] == [each[0] for each in found.figures]
    figures = zip(chain(*shown), chain(*found.figures), strict=True)
    assert all(math.isclose(one, other, rel_tol=1e-12) for one, other in figures)
    peaks = {
        trial["id"]: trial["measurement"]["peak_memory_bytes_by_stage"] for trial in page["trials"]
    }
    assert peaks == found.peaks


def seconds_of(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def percentile(seconds: list[float], percent: int) -> float:
    """The smallest that so many percent do not exceed."""
    return sorted(seconds)[max(-(-len(seconds) * percent // 100) - 1, 0)]


def spread(seconds: list[float]) -> str:
    return (
        f"{percentile(seconds, 99) * 1e3:.1f} ms (median {percentile(seconds, 50) * 1e3:.1f} ms, "
        f"{len(seconds)} of them)"
    )


def ratio(one: list[float], other: list[float]) -> str:
    return f"{percentile(one, 50) / percentile(other, 50):.2f}"
