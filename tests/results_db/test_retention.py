"""What is old goes when that was said, and nothing else does."""

import pytest
from sqlalchemy import text

from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.campaigns.idempotency_keys import RequestKey
from layout_tuner.results_db.errors import RetentionInvalidError
from layout_tuner.results_db.retention import Pruned, Retention
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import TurnableClock, make_campaign, make_spec, run_trial

pytestmark = pytest.mark.sqlite_is_enough

DAY_S = 86_400.0


def count(store: Store, table: str) -> int:
    with store._db.read() as session:
        return int(session.scalar(text(f"SELECT count(*) FROM {table}")) or 0)


@pytest.fixture
def campaigns(store: Store, clock: TurnableClock) -> tuple[int, int]:
    """One ended ten days ago, with two measured trials; one runs, with one trial of each age."""
    old, going = make_campaign(store, "old"), make_campaign(store, "going")
    for campaign, size in ((old, 1), (old, 2), (going, 1)):
        run_trial(store, campaign, Layout(micro_batch_size=size))
    store.campaigns.end(old, "COMPLETED", "budget", "")
    clock.forward(10 * DAY_S)
    run_trial(store, going, Layout(micro_batch_size=2))
    store.events.number()
    return old, going


@pytest.mark.sqlite_is_enough(False)
def test_old_logs_go_and_their_trials_stay(store: Store, campaigns: tuple[int, int]) -> None:
    assert store.retention.prune(Retention(events=None, requests=None)) == Pruned()
    assert count(store, "trial_logs") == 4
    assert store.retention.prune(Retention(logs=5, events=None)) == Pruned(logs=3)
    details = [store.trials.detail(trial) for trial in (1, 2, 3, 4)]
    assert [bool(detail.log_tail) for detail in details] == [False, False, False, True]
    assert all(detail.trial.measurement is not None for detail in details)
    assert all(detail.iterations for detail in details)


def test_iterations_go_after_the_end_of_a_campaign(
    store: Store, campaigns: tuple[int, int], database_url: str
) -> None:
    before = store.trials.get(1).measurement
    assert store.retention.prune(Retention(iterations=5, events=None)) == Pruned(iterations=24)
    # The losses of a campaign that goes on are still compared with those that come.
    assert [len(store.trials.detail(trial).iterations) for trial in (1, 2, 3, 4)] == [0, 0, 12, 12]
    assert store.trials.get(1).measurement == before
    assert len(store.leaderboard.ranked_layouts(campaigns[0], "tokens_per_s")) == 2
    assert check_database(database_url).findings == ()
    assert store.retention.prune(Retention(iterations=5, events=None)) == Pruned()


def test_the_audit_goes_only_on_wish_and_says_so(store: Store, campaigns: tuple[int, int]) -> None:
    someone = store.by(Actor(name="physics", role="admin"))
    number = count(store, "audit")
    assert store.retention.prune(Retention(events=None)).audit == 0
    pruned = someone.retention.prune(Retention(audit=5, events=None))
    assert pruned.audit > 0
    assert count(store, "audit") == number - pruned.audit + 1
    with store._db.read() as session:
        newest = session.execute(text("SELECT actor, action FROM audit ORDER BY id DESC LIMIT 1"))
        assert newest.one() == ("physics", "database.prune")


@pytest.mark.sqlite_is_enough(False)
def test_old_request_keys_go_and_their_campaigns_stay(store: Store, clock: TurnableClock) -> None:
    physics = store.by(Actor(name="physics", role="submitter"))
    old, young = (RequestKey(key=key, request_hash="h") for key in ("old", "young"))
    physics.campaigns.create(make_spec("one"), num_legal_layouts=1, request=old)
    clock.forward(10 * DAY_S)
    physics.campaigns.create(make_spec("two"), num_legal_layouts=1, request=young)
    assert store.retention.prune(Retention(events=None)).requests == 1
    assert len(store.campaigns.find()) == 2
    assert physics.campaigns.of_request(old) is None
    assert physics.campaigns.of_request(young) is not None


def test_more_rows_than_a_transaction_takes_all_go_and_nothing_else_does(
    store: Store, campaigns: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [store.trials.find(campaign) for campaign in campaigns]
    monkeypatch.setattr("layout_tuner.results_db.retention.ROWS_AT_ONCE", 1)
    everything = Retention(logs=0, iterations=0, events=0, audit=0, requests=0)
    pruned = store.retention.prune(everything)
    assert pruned.logs == 3, "the youngest ended this very moment"
    assert [store.trials.find(campaign) for campaign in campaigns] == before
    left = {event.campaign_id for event in store.events.find(after=0, limit=99)}
    assert (left, pruned.events > 0) == (set(campaigns), True)
    assert [each.spec for each in store.campaigns.find()] == [make_spec("going"), make_spec("old")]


def test_settings_are_read_as_people_write_them_and_others_refused_with_what_to_write() -> None:
    assert Retention.read([]) == Retention(events=30, requests=7, messages=30)
    read = Retention.read(["logs=90", "iterations=365.5", "events=forever", "logs=30"])
    assert read == Retention(logs=30, iterations=365.5, events=None, requests=7, messages=30)

    for setting in ("logs", "logs=", "logs=-1", "logs=nan", "logs=x", "trials=3", ""):
        with pytest.raises(RetentionInvalidError, match=r"does not say .*: write "):
            Retention.read([setting])
