"""What the long run measures of each service, and what is to hold at its end."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from sqlalchemy import select

from benchmarks.results_file import table
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.models.tables import Attempt
from layout_tuner.results_db.records import ENDED_CAMPAIGN_STATES
from layout_tuner.results_db.store import Store
from tests.e2e.fake_probe_worker import read_journal
from tests.long_run.people import CAMPAIGNS, GROUP_SIZE, OWNERS, WEIGHTS, campaign_of, name_of
from tests.long_run.processes import SERVICES, WORKERS, Processes
from tests.results_db.legal_history import violations, wrong_leaderboards

WARM: Final = 0.1
"""The part of the run before its first half: the services fill their caches."""
END: Final = 0.9
"""The part of the run after which its second half ends."""

_REQUESTS: Final = re.compile(r"^layout_tuner_http_requests_total\{.*\} ([\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One service at one moment."""

    at: float
    """The part of the run that was over."""
    service: str
    pid: int
    handles: int
    sockets: int
    """Those of them that are sockets."""
    pss_bytes: int
    uss_bytes: int
    cpu_s: float
    requests: float
    """Answered since it started."""


def sample(at: float, service: str, pid: int, metrics: str) -> Sample:
    """Measures a service that has just sent its metrics."""
    process = psutil.Process(pid)
    with process.oneshot():
        memory, times = process.memory_full_info(), process.cpu_times()
        return Sample(
            at=at,
            service=service,
            pid=pid,
            handles=process.num_fds(),
            sockets=len(process.net_connections("all")),
            pss_bytes=memory.pss,
            uss_bytes=memory.uss,
            cpu_s=times.user + times.system,
            requests=sum(float(each) for each in _REQUESTS.findall(metrics)),
        )


def keep(path: Path, taken: Sample) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(taken)) + "\n")


def kept(path: Path) -> list[Sample]:
    """All samples of a run, also of its earlier parts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Sample(**json.loads(line)) for line in lines]


def _cpu_ms_a_request(samples: Sequence[Sample]) -> float:
    """Processor time between samples of one process, by request."""
    pairs = [(one, two) for one, two in pairwise(samples) if one.pid == two.pid]
    requests = sum(two.requests - one.requests for one, two in pairs)
    return 1e3 * sum(two.cpu_s - one.cpu_s for one, two in pairs) / max(requests, 1.0)


FIGURES: Final[dict[str, tuple[float, Callable[[Sequence[Sample]], float]]]] = {
    "handles": (1.0, lambda samples: median(each.handles for each in samples)),
    "memory (PSS), MiB": (1.05, lambda s: median(each.pss_bytes for each in s) / 2**20),
    "memory of its own (USS), MiB": (1.05, lambda s: median(each.uss_bytes for each in s) / 2**20),
    "processor time a request, ms": (1.10, _cpu_ms_a_request),
}
"""By figure, the most that is asked for the second half over the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """A figure of a service by half of the run."""

    service: str
    figure: str
    first: float
    second: float
    most: float

    @property
    def ratio(self) -> float:
        return self.second / self.first

    def cells(self) -> tuple[str, ...]:
        numbers = (f"{self.first:.1f}", f"{self.second:.1f}", f"{self.ratio:.3f}")
        return f"{self.service}: {self.figure}", *numbers, f"<= {self.most:.2f}"


def halves(samples: Sequence[Sample]) -> Iterator[Halves]:
    """The figures of each service; without those before the run was warm, and at its end."""
    middle = (WARM + END) / 2
    for service in SERVICES:
        own = [each for each in samples if each.service == service]
        first = [each for each in own if WARM <= each.at < middle]
        second = [each for each in own if middle <= each.at < END]
        if not (first and second):
            continue
        for figure, (most, value) in FIGURES.items():
            yield Halves(
                service=service, figure=figure, first=value(first), second=value(second), most=most
            )


def shares_of_weights(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """Percent of the node-hours of owners with weight 2, and those of the owner furthest off.

    The second is the largest difference between an owner's node-hours and its share of all, in
    percent of that share.
    """
    use = {name_of(each): 0.0 for each in range(OWNERS)}
    use |= {name: hours - before.get(name, 0.0) for name, hours in after.items() if name in use}
    weights = {name_of(each): WEIGHTS[each % GROUP_SIZE] for each in range(OWNERS)}
    total, weight = sum(use.values()), sum(weights.values())
    heavy = sum(hours for name, hours in use.items() if weights[name] == max(WEIGHTS))
    off = max(abs(hours * weight / (total * weights[name]) - 1) for name, hours in use.items())
    return 100 * heavy / total, 100 * off


def lost(processes: Processes, store: Store) -> Iterator[str]:
    """What is not as it is to be at the end of a run, a sentence each."""
    campaigns = store.campaigns.find()
    expected = {campaign_of(owner, place) for owner in range(OWNERS) for place in range(CAMPAIGNS)}
    if sorted(each.name for each in campaigns) != sorted(expected):
        yield f"there are {len(campaigns)} campaigns where {len(expected)} were submitted"
    for each in campaigns:
        is_endless = each.name.endswith(f"-{CAMPAIGNS - 1}")
        ended = ("CANCELLED",) if is_endless else ("COMPLETED",)
        if each.state not in ended:
            yield f"the campaign {each.name} is {each.state}: {each.message}"
    yield from _lost_outcomes(processes, store)
    yield from _lost_messages(
        processes.folder / "messages.jsonl",
        {each.name for each in campaigns if each.state in ENDED_CAMPAIGN_STATES},
    )
    yield from violations(store)
    yield from (f"the leaderboard of {each} is not right" for each in wrong_leaderboards(store))
    yield from (each.message for each in check_database(processes.url).findings)


def _lost_outcomes(processes: Processes, store: Store) -> Iterator[str]:
    with store._db.read() as session:
        columns = select(Attempt.trial_id, Attempt.attempt, Attempt.ending)
        endings = {(trial, attempt): end for trial, attempt, end in session.execute(columns)}
    num_kept = num_accepted = 0
    for worker in WORKERS:
        lines = read_journal(processes.journal(worker))
        answers: dict[tuple[int, int], bool] = {}
        for line in lines:
            if line["what"] == "receipt":
                key = line["trial"], line["attempt"]
                answers[key] = answers.get(key, False) or line["accepted"]
        stored = [(line["trial"], line["attempt"]) for line in lines if line["what"] == "kept"]
        for key in stored:
            if key not in answers:
                yield f"{worker} stored an outcome of trial and attempt {key} that was never answered"
        for key, accepted in answers.items():
            if accepted and endings.get(key) != "reported":
                yield f"the outcome of {key} was accepted, and its attempt is {endings.get(key)}"
        left = [path.name for path in processes.spool(worker).rglob("*.json")]
        if left:
            yield f"the spool of {worker} still has {left[:5]}"
        num_kept += len(stored)
        num_accepted += sum(answers.values())
    reported = sum(end == "reported" for end in endings.values())
    if reported != num_accepted:
        yield f"{num_accepted} outcomes were accepted, and {reported} are there"
    if not num_kept:
        yield "no probe has ended"


def _lost_messages(path: Path, ended: set[str]) -> Iterator[str]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {line["id"]: line["campaign"] for line in lines}
    told = Counter(by_id.values())
    for name in sorted(ended):
        if told[name] != 1:
            yield f"{told[name]} messages say that {name} has ended"


def num_told(path: Path) -> int:
    """Messages that have arrived, without repeats."""
    lines = path.read_text().splitlines() if path.exists() else []
    return len({json.loads(line)["id"] for line in lines})


def text_of(samples: Sequence[Sample]) -> str:
    """The figures as a table."""
    header = ("figure", "first half", "second half", "ratio", "asked")
    return table(header, [each.cells() for each in halves(samples)])
