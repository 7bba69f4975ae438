"""The checks of the long run find what they are for."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.e2e.fake_probe_worker import Journal
from tests.kit.store import completed, lease_one, make_campaign, make_worker, post_outcome
from tests.long_run.measured import Sample, _lost_messages, _lost_outcomes, halves
from tests.long_run.processes import WORKERS


def sample(at: float, **figures: float) -> Sample:
    plain = {"handles": 50, "sockets": 40, "pss_bytes": 2**27, "uss_bytes": 2**27}
    cpu = {"cpu_s": 100 * at, "requests": 5000 * at}
    return Sample(at=at, service="serve-2", pid=7, **{**plain, **cpu, **figures})


def test_figures_of_the_second_half_are_over_the_first() -> None:
    samples = [sample(0.05, handles=900), sample(0.2), sample(0.4)]
    samples += [sample(0.6, handles=60), sample(0.8, handles=60, cpu_s=90), sample(0.95, handles=1)]
    ratios = {each.figure.split(",")[0]: round(each.ratio, 2) for each in halves(samples)}
    assert ratios["handles"] == 1.2
    assert ratios["memory (PSS)"] == 1.0
    assert ratios["processor time a request"] == 1.5


def test_a_message_that_is_missing_or_twice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    lines = [{"id": "1", "campaign": "a"}, {"id": "1", "campaign": "a"}]  # a repeat is none more
    lines += [{"id": "2", "campaign": "b"}, {"id": "3", "campaign": "b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [*_lost_messages(path, {"a", "b", "c"})]
    assert found == ["2 messages say that b has ended", "0 messages say that c has ended"]


@pytest.mark.parametrize("fault", [None, "unanswered", "not there", "in the spool"])
def test_a_lost_outcome_is_found(sqlite_url: str, tmp_path: Path, fault: str | None) -> None:
    place = SimpleNamespace(
        journal=lambda worker: tmp_path / f"journal-{worker}",
        spool=lambda worker: tmp_path / f"spool-{worker}",
    )
    journal = Journal(place.journal(WORKERS[0]))
    with closing(Store(sqlite_url)) as store:
        trial = store.trials.add(make_campaign(store), Layout()).id
        lease_one(store, make_worker(store).id)
        if fault != "not there":
            post_outcome(store, trial, 1, completed())
        journal.write(what="kept", trial=trial, attempt=1)
        if fault != "unanswered":
            journal.write(what="receipt", trial=trial, attempt=1, accepted=True)
        if fault == "in the spool":
            place.spool(WORKERS[0]).mkdir()
            place.spool(WORKERS[0]).joinpath("trial-1-attempt-1.json").touch()
        found = [*_lost_outcomes(place, store)]
    assert bool(found) == (fault is not None), found
