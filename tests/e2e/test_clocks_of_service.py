"""The clock of the driver's or the service's machine jumps by an hour: leases, wall times, tokens.

On SQLite all times come from the machine's clock. On PostgreSQL they come from the server's clock,
and the clocks of the machines of services and drivers have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from results_db.campaigns.driver_lease import DriverLease
from results_db.store import Store
from tests.e2e.faked_clock import Clock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

HOUR_S = 3600
RENEWALS = 3
NUM_TRIALS = 4
PATIENCE_S = 60.0

Kind = Literal["sqlite", "postgresql"]


@dataclass
class Scene:
    """A service on either database, and a clock for one of its processes."""

    kind: Kind
    service: LiveService
    clock: Clock

    @property
    def store(self) -> Store:
        return self.service.store


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def folder(
    kind: Kind, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where a service is to be; what is started from now on finds the test's database."""
    if kind == "postgresql":
        monkeypatch.setenv("LAYOUT_TUNER_DATABASE_URL", request.getfixturevalue("postgres_url"))
    return tmp_path


def scene_on(
    stack: ExitStack, kind: Kind, service: LiveService, clock: Clock, url: str | None
) -> Scene:
    stack.enter_context(service)
    if url is not None:
        service.store.close()
        service.store = stack.enter_context(closing(Store(url)))
    return Scene(kind, service, clock)


@pytest.fixture
def url(kind: Kind, request: pytest.FixtureRequest) -> str | None:
    return str(request.getfixturevalue("postgres_url")) if kind == "postgresql" else None


@pytest.fixture
def with_driver(kind: Kind, folder: Path, url: str | None) -> Iterator[Scene]:
    """The clock is the driver's."""
    with ExitStack() as stack:
        yield scene_on(stack, kind, LiveService(folder), Clock(folder / "clock-of-driver"), url)


@pytest.fixture
def with_clock(kind: Kind, folder: Path, url: str | None) -> Iterator[Scene]:
    """The clock is the service's."""
    clock = Clock(folder / "clock-of-service")
    with ExitStack() as stack:
        service = LiveService(folder, environment=clock.environment)
        yield scene_on(stack, kind, service, clock, url)


def start_driver(scene: Scene, name: str, clock: Clock | None = None) -> LiveProcess:
    command = ["api.cli", "driver", "--data-dir", str(scene.service.data.path)]
    driver = scene.service.make(name, command, {} if clock is None else clock.environment)
    driver.start()
    return driver


def start_worker(scene: Scene) -> None:
    service = scene.service
    where = ["--url", service.url, "--token-file", str(service.data.token_file)]
    own = ["--spool-dir", str(service.folder / "spool"), "--journal", str(service.folder / "said")]
    service.make("worker", ["tests.e2e.fake_probe_worker", *where, "--name", "w1", *own]).start()


def wait_for_renewals(scene: Scene, driver: LiveProcess, ahead_s: int) -> DriverLease:
    """Until the active driver has renewed its lease some times, by the clock that it goes by."""
    shift = timedelta(seconds=ahead_s if scene.kind == "sqlite" else 0)
    seen: set[datetime] = set()

    def renewed() -> bool:
        assert not driver.has_ended(), driver.said()
        at = scene.store.driver_lease().seen_at
        if at is not None and abs(at - datetime.now(UTC) - shift) < timedelta(seconds=60):
            seen.add(at)
        return len(seen) >= RENEWALS

    wait_until("the lease is renewed", renewed, PATIENCE_S)
    return scene.store.driver_lease()


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_driver_whose_clock_jumps_stays_the_active_one_and_spends_no_budget(
    with_driver: Scene, ahead_s: int
) -> None:
    scene = with_driver
    campaign = scene.service.submit(
        budget={"trials": NUM_TRIALS, "wall_time": "10m"},
        space={"global_batch_size": 8, "dp": [1, 2], "micro_batch_size": [1, 2, 4]},
    )
    driver = start_driver(scene, "driver", scene.clock)
    began = wait_for_renewals(scene, driver, 0)
    if scene.kind == "postgresql":
        # On SQLite all drivers are on one machine, which has one clock.
        standby = start_driver(scene, "standby")
        wait_until("the other one stands by", lambda: "standing by" in standby.said(), PATIENCE_S)
    wait_until("trials wait", lambda: scene.store.trials(campaign["id"]), PATIENCE_S)
    for ahead in (ahead_s, 0):
        scene.clock.set(ahead)
        lease = wait_for_renewals(scene, driver, ahead)
        assert (lease.fence, lease.pid) == (began.fence, driver.pid), driver.said()
    start_worker(scene)
    ended = lambda: scene.store.campaign(campaign["id"]).ended_at is not None  # noqa: E731
    wait_until("the campaign has ended", ended, PATIENCE_S)
    found = scene.store.campaign(campaign["id"])
    assert (found.state, found.reason) == ("COMPLETED", "budget")
    assert len(scene.store.trials(campaign["id"])) == NUM_TRIALS, found.message
    assert found.wall_time_s < 120, "the hour was counted"
    assert scene.store.driver_lease().fence == began.fence


def test_tokens_end_by_the_clock_that_the_database_goes_by(with_clock: Scene) -> None:
    scene = with_clock

    def make(name: str, **ends_in: float) -> dict[str, str]:
        end = datetime.now(UTC) + timedelta(**ends_in)
        body = {"name": name, "role": "viewer", "expires_at": end.isoformat()}
        made = scene.service.post("/tokens", body)
        return {"Authorization": f"Bearer {made['token']}"}

    def whoami(token: dict[str, str]) -> int:
        return scene.service.http.get("/whoami", headers=token).status_code

    def set_clock(ahead_s: int) -> None:
        scene.clock.set(ahead_s)
        wait_until("the service's clock has jumped", lambda: shows(ahead_s), PATIENCE_S)

    def shows(ahead_s: int) -> bool:
        shown = parsedate_to_datetime(scene.service.http.get("/health").headers["Date"])
        expected = datetime.now(UTC) + timedelta(seconds=ahead_s)
        return abs(shown - expected) < timedelta(seconds=60)

    goes_by_its_own = scene.kind == "sqlite"
    long, short = make("long", minutes=30), make("short", seconds=4)
    assert (whoami(long), whoami(short)) == (200, 200)
    wait_until("the short one has ended", lambda: whoami(short) == 401, PATIENCE_S)
    set_clock(HOUR_S)
    assert whoami(long) == (401 if goes_by_its_own else 200)
    set_clock(-HOUR_S)
    assert (whoami(long), whoami(short)) == ((200, 200) if goes_by_its_own else (200, 401))
    set_clock(0)
    assert (whoami(long), whoami(short)) == (200, 401)
    states: list[dict[str, Any]] = scene.service.get("/tokens")["tokens"]
    assert {each["name"]: each["is_valid"] for each in states} == {"long": True, "short": False}
