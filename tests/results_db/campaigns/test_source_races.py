"""A campaign is deleted while another is made that starts from it: one of the two is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from benchmarks.service.postgres_server import PostgresServer
from results_db.campaigns import campaigns
from results_db.errors import CampaignNotFoundError, CampaignStateError
from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.errors import CampaignInvalidError
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import make_campaign, make_spec
from tests.kit.waiting import wait_until


class Race:
    """A campaign that has ended, and two services on one PostgreSQL."""

    def __init__(self, server: PostgresServer, url: str, here: Store, there: Store) -> None:
        self._server, self._url = server, url
        self._pool = ThreadPoolExecutor(1)
        self.here, self.there = here, there
        self.source = make_campaign(here, "source")
        here.campaigns.cancel(self.source)
        self.second: Future[Any] | None = None

    def make_heir(self) -> CampaignRecord:
        spec = make_spec("heir", start_from=["source"])
        return self.here.campaigns.create(spec, num_legal_layouts=1)

    def delete(self) -> None:
        self.there.campaigns.delete(self.source)

    def begin_second(self, do: Callable[[], Any]) -> None:
        """Starts a call of the other service within a transaction; waits until it is blocked."""
        if self.second is None:
            self.second = self._pool.submit(do)
            wait_until("it waits", lambda: is_anybody_waiting(self._server, self._url))

    def end_of_second(self) -> Any:
        assert self.second is not None, "nothing began"
        return self.second.result(30)


@pytest.fixture
def race(postgres_server: PostgresServer, postgres_url: str) -> Iterator[Race]:
    with closing(Store(postgres_url)) as here, closing(Store(postgres_url)) as there:
        yield Race(postgres_server, postgres_url, here, there)


def before(told: Callable[..., None], do: Callable[[], None]) -> Callable[..., None]:
    def tell(*arguments: Any, **named: Any) -> None:
        do()
        told(*arguments, **named)

    return tell


def test_a_deletion_waits_for_the_campaign_that_is_made_from_it_and_is_refused(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile = before(campaigns.emit, lambda: race.begin_second(race.delete))
    monkeypatch.setattr(campaigns, "emit", meanwhile)
    assert race.make_heir().name == "heir"
    with pytest.raises(CampaignStateError, match="'heir' starts from 'source'"):
        race.end_of_second()
    assert race.here.campaigns.get(race.source).name == "source"


def test_a_campaign_waits_for_the_deletion_of_what_it_starts_from_and_is_refused(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile = before(campaigns.emit, lambda: race.begin_second(race.make_heir))
    monkeypatch.setattr(campaigns, "emit", meanwhile)
    race.delete()
    with pytest.raises(CampaignInvalidError, match="start_from: there is no campaign named 'sou"):
        race.end_of_second()
    with pytest.raises(CampaignNotFoundError):
        race.here.campaigns.by_name("heir")


def test_what_a_campaign_starts_from_is_looked_for_when_it_is_kept(store: Store) -> None:
    spec = make_spec("heir", start_from=["nobody"])
    with pytest.raises(CampaignInvalidError, match="start_from: there is no campaign named 'nob"):
        store.campaigns.create(spec, num_legal_layouts=1)
