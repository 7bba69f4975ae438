"""Which kin a measurement is of: told by the first of its group, as long as nobody was off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import delete, update

from results_db.models.tables import IterationRow, MeasurementRow, Trial
from results_db.store import Store
from results_db.trials.loss_check import Kinship, KnownLosses
from search_spaces.protocol.outcome import Measurement
from search_spaces.spec.layout import Layout
from tests.results_db.factories import (
    completed,
    lease_one,
    make_campaign,
    make_measurement,
    make_worker,
)

pytestmark = pytest.mark.sqlite_is_enough

LAYOUTS = [Layout(num_microbatches=8), Layout(dp=2, num_microbatches=4), Layout(tp=2, num_microbatches=8)]  # fmt: skip
"""All of one batch."""
OTHER_BATCH = Layout(num_microbatches=16)
OTHER_PRECISION = Layout(num_microbatches=8, precision="bf16")


class Lab:
    """A campaign and a worker."""

    def __init__(self, store: Store, name: str = "first") -> None:
        self.store = store
        self.campaign = make_campaign(store, name)
        self.worker = make_worker(store, f"{name}-worker")

    def add(self, layout: Layout) -> int:
        return self.store.add_trial(self.campaign, layout).id

    def measure(self, layout: Layout, off: float = 0.0) -> int:
        """Has a layout measured; returns its trial."""
        trial_id = self.add(layout)
        lease = lease_one(self.store, self.worker.id)
        outcome = completed(layout, iterations=trained(off).iterations)
        assert self.store.post_outcome(trial_id, lease.attempt, outcome).accepted
        return trial_id

    def kins(self, *asked: tuple[int, float], known: KnownLosses | None = None) -> list[int | None]:
        """The kin of new measurements of one batch, by trials and by the offset of their losses."""
        with self.store._db.read() as session:
            kinship = Kinship.of(session, [self.campaign], known or KnownLosses())
            return [kinship.kin_of(session.get_one(Trial, id_), trained(off)) for id_, off in asked]


def trained(off: float) -> Measurement:
    """A measurement whose losses are off those of the factory, from the third iteration on."""
    measurement = make_measurement()
    return replace(
        measurement,
        iterations=tuple(
            replace(i, loss=i.loss + (off if i.index >= 2 else 0.0)) for i in measurement.iterations
        ),
    )


@pytest.fixture
def lab(store: Store) -> Lab:
    return Lab(store)


def test_the_first_of_a_group_is_its_own_kin_and_that_of_those_that_agree(lab: Lab) -> None:
    first, second = lab.add(LAYOUTS[0]), lab.add(LAYOUTS[1])
    assert lab.kins((first, 0.0), (second, 0.0)) == [first, first]


def test_what_was_measured_before_is_agreed_with(lab: Lab) -> None:
    first = lab.measure(LAYOUTS[0])
    lab.measure(LAYOUTS[1])
    assert lab.kins((lab.add(LAYOUTS[2]), 0.0)) == [first]


def test_one_that_is_off_is_to_be_judged_and_so_is_everybody_of_its_group_afterwards(
    lab: Lab,
) -> None:
    first = lab.measure(LAYOUTS[0])
    second, third = lab.add(LAYOUTS[1]), lab.add(LAYOUTS[2])
    assert lab.kins((second, 0.5), (third, 0.0)) == [None, None]
    assert lab.kins((third, 0.0)) == [first], "what was never written is of no account"


def test_a_group_with_two_kins_is_judged_by_those_who_read_all_of_it(lab: Lab) -> None:
    lab.measure(LAYOUTS[0])
    lab.measure(LAYOUTS[1], off=0.5)
    assert lab.kins((lab.add(LAYOUTS[2]), 0.0)) == [None]


@pytest.mark.parametrize("other", [OTHER_BATCH, OTHER_PRECISION])
def test_batches_and_precisions_have_kins_of_their_own(lab: Lab, other: Layout) -> None:
    first = lab.measure(LAYOUTS[0])
    apart, alike = lab.add(other), lab.add(LAYOUTS[1])
    assert lab.kins((apart, 0.5), (alike, 0.0)) == [apart, first]


def test_a_campaign_with_measurements_that_were_never_compared_is_judged_as_a_whole(
    lab: Lab,
) -> None:
    untold = lab.measure(LAYOUTS[0])
    with lab.store._db.write() as session:
        session.execute(
            update(MeasurementRow).where(MeasurementRow.trial_id == untold).values(kin=None)
        )
    assert lab.kins((lab.add(LAYOUTS[1]), 0.0), (lab.add(OTHER_BATCH), 0.0)) == [None, None]


def test_other_campaigns_are_of_no_kin(lab: Lab) -> None:
    lab.measure(LAYOUTS[0])
    elsewhere = Lab(lab.store, "second")
    mine = elsewhere.add(LAYOUTS[0])
    assert elsewhere.kins((mine, 0.5)) == [mine]


def test_losses_are_read_once_and_outlive_their_rows(lab: Lab) -> None:
    first, known = lab.measure(LAYOUTS[0]), KnownLosses()
    second, third = lab.add(LAYOUTS[1]), lab.add(LAYOUTS[2])
    assert lab.kins((second, 0.0), known=known) == [first]
    with lab.store._db.write() as session:
        session.execute(delete(IterationRow))  # as retention does
    assert lab.kins((second, 0.5), (third, 0.0), known=known) == [None, None]
    assert lab.kins((second, 0.5)) == [first], "with nothing to compare with nothing is off"


def test_no_more_losses_are_remembered_than_there_is_room_for(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = len(make_measurement().iterations)
    monkeypatch.setattr("results_db.trials.loss_check.MAX_KNOWN", one)
    known = KnownLosses()
    trials = [lab.measure(LAYOUTS[0]), lab.measure(OTHER_BATCH)]
    with lab.store._db.read() as session:
        for _ in range(2):
            for trial in trials:
                assert list(known.of(session, [trial])) == [trial]
                assert known.num_known == one
        fresh = KnownLosses()
        assert sorted(fresh.of(session, trials)) == trials
        assert fresh.num_known == 0, "what has no room alone is not remembered"
