"""Outcomes survive on disk until they are taken."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.kit.worker_loop import make_report
from workers.errors import SpoolInUseError, SpoolUnusableError
from workers.service.lease_client import EncodedOutcome
from workers.worker.outcome_spool import Spool, adopt_abandoned


def make_kept(trial_id: int = 7) -> EncodedOutcome:
    return EncodedOutcome.of(make_report(trial_id))


def test_outcomes_that_are_kept_are_there_for_the_next_process(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.keep(make_kept(9))
        spool.keep(make_kept(3))
    with Spool(tmp_path / "spool") as spool:
        assert spool.kept() == [make_kept(9), make_kept(3)]
        spool.forget(make_kept(9))
        assert spool.kept() == [make_kept(3)]


def test_a_second_owner_and_a_directory_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Spool(tmp_path), pytest.raises(SpoolInUseError, match="another worker uses"):
        Spool(tmp_path)
    with pytest.raises(SpoolUnusableError, match="give another --spool-dir"):
        Spool(tmp_path / "file" / "spool")


def test_what_is_refused_or_is_no_outcome_is_set_aside_and_not_lost(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        spool.keep(make_kept())
        spool.reject(make_kept(), "the trial is gone")
        (tmp_path / "other.json").write_text("{}")
        assert spool.kept() == []
    names = {path.name for path in (tmp_path / "rejected").iterdir()}
    assert names == {"trial-7-attempt-2.json", "other.json"}


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    (tmp_path / "trial-1-attempt-1.tmp").write_text('{"trial_id": 1,')
    with Spool(tmp_path) as spool:
        (tmp_path / "trial-1-attempt-1.json").mkdir()
        spool.keep(make_kept(9))
        assert spool.kept() == [make_kept(9)]
        assert (tmp_path / "trial-1-attempt-1.json").exists()


def test_a_directory_that_has_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.keep(make_kept())
        (tmp_path / "spool").rename(tmp_path / "elsewhere")
        with pytest.raises(SpoolUnusableError, match="the outcomes can't be read"):
            spool.kept()
        with pytest.raises(SpoolUnusableError, match="the outcome can't be written"):
            spool.keep(make_kept())
        with pytest.raises(SpoolUnusableError, match="the outcome can't be set aside"):
            spool.reject(make_kept(), "no reason")


def test_the_name_of_an_outcome_is_on_disk_before_it_counts_as_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        synced.append((is_directory, (tmp_path / "trial-7-attempt-2.json").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with Spool(tmp_path) as spool:
        spool.keep(make_kept())
    assert synced == [(False, False), (True, True)]


def test_what_workers_of_other_names_left_behind_is_taken_over(tmp_path: Path) -> None:
    for name, trial_id in (("job1-abc", 1), ("job2-abc", 2), ("job1-xyz", 3)):
        with Spool(tmp_path / name) as spool:
            spool.keep(make_kept(trial_id))
    with Spool(tmp_path / "job2-abc"), Spool(tmp_path / "job3-abc") as spool:
        adopt_abandoned(spool, "*-abc")
        assert spool.kept() == [make_kept(1)], "not of a worker that lives, nor another service's"
