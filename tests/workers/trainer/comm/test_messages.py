"""Messages between ranks are read as JSON: a false rank cannot run code in the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from layout_tuner.workers.trainer.comm import groups
from layout_tuner.workers.trainer.comm.groups import make_groups
from layout_tuner.workers.trainer.comm.messages import (
    MAX_BYTES,
    broadcast_document,
    gather_documents,
    reading_from,
)
from layout_tuner.workers.trainer.errors import MessageInvalidError
from layout_tuner.workers.trainer.job.checkpoint_directory import CheckpointSettings
from layout_tuner.workers.trainer.job.job_checkpoints import JobCheckpoints
from tests.workers.trainer.cases import CPU, make_layout
from tests.workers.trainer.ranks import run_ranks

pytestmark = pytest.mark.ranks

DOCUMENTS: list[Any] = ["", {"a": [1, 2.5, None]}, [2**200, "\udcff", "é" * 1000]]


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_file, (str(self.file), os.getpid())


def _make_file(file: str, sender: int) -> None:
    if os.getpid() != sender:
        Path(file).touch()


def failure_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except MessageInvalidError as error:
        return str(error)
    return ""


def resuming(rank: int, folder: Path) -> str:
    """What a rank says of rank 0's word on where a job goes on."""
    mesh = SimpleNamespace(rank=rank, layout=make_layout(dp=2))
    training = SimpleNamespace(mesh=mesh, device=CPU)
    settings = CheckpointSettings(directory=str(folder))
    return failure_of(JobCheckpoints(None, settings, training, lambda _: None).resume)


def test_documents_of_different_lengths_reach_every_rank_in_order() -> None:
    def work(rank: int) -> list[Any]:
        gathered = gather_documents(DOCUMENTS[rank], CPU)
        own = DOCUMENTS[2] if rank == 2 else object()
        return [*gathered, broadcast_document(own, source=2, device=CPU)]

    assert run_ranks(3, work) == [[*DOCUMENTS, DOCUMENTS[2]]] * 3


def test_a_document_that_is_too_long_is_refused_on_every_rank() -> None:
    def work(rank: int) -> list[str]:
        long = "x" * MAX_BYTES if rank == 1 else ""
        return [
            failure_of(lambda: gather_documents(long, CPU)),
            failure_of(lambda: broadcast_document(long, source=1, device=CPU)),
        ]

    for said in chain.from_iterable(run_ranks(2, work)):
        assert said.startswith(f"what rank 1 sent is {MAX_BYTES + 2} bytes long, and 1 to ")


def test_a_pickle_in_a_ranks_place_is_not_run_when_the_groups_are_made(tmp_path: Path) -> None:
    file = tmp_path / "code-was-run"

    def work(rank: int) -> str:
        if rank == 0:
            return failure_of(
                lambda: make_groups(
                    [dist.group.WORLD], timeout=timedelta(seconds=20), shares_memory=True
                )
            )
        with pytest.raises(Exception, match=r"pickle|invalid load key"):
            dist.all_gather_object([None, None], Hostile(file))
        return ""

    said, _ = run_ranks(2, work)
    assert not file.exists()
    assert said.startswith("what rank 1 sent is no JSON")


def test_a_pickle_in_rank_0s_place_is_not_run_when_a_job_is_resumed(tmp_path: Path) -> None:
    file = tmp_path / "code-was-run"

    def work(rank: int) -> str:
        if rank == 0:
            dist.broadcast_object_list([Hostile(file)], src=0)
            return ""
        return resuming(rank, tmp_path)

    _, said = run_ranks(2, work)
    assert not file.exists()
    assert said.startswith("what rank 0 sent is no JSON")


def test_another_document_in_rank_0s_place_is_one_error(tmp_path: Path) -> None:
    documents = [[], 5, "found", None]

    def work(rank: int) -> list[str]:
        if rank == 0:
            for document in documents:
                broadcast_document(document, source=0, device=CPU)
            return []
        return [resuming(rank, tmp_path) for _ in documents]

    for said in run_ranks(2, work)[1]:
        assert said.startswith("what rank 0 sent has no readable fields")


SAID = {"identity": "", "process": 1, "cores": [], "files": []}


@pytest.mark.parametrize(
    "document",
    [
        *(None, 5, {}),
        *(SAID | {"process": process} for process in ("x", float("inf"))),
        *(SAID | {"files": files} for files in (7, [[]], [[[0], [1]]])),
    ],
)
def test_fields_that_are_missing_or_of_another_type_are_one_error(document: Any) -> None:
    with (
        pytest.raises(MessageInvalidError, match="what rank 3 sent has no readable fields"),
        reading_from(3),
    ):
        groups._RankDescription.from_document(document)


def test_what_a_rank_tells_of_itself_is_read_back_as_it_was() -> None:
    told = groups._RankDescription(
        identity="h", process=5, cores=frozenset({3, 1}), files={(0, 1): (5, 7, 2**63)}
    )
    (read,) = run_ranks(1, lambda _: gather_documents(told.to_document(), CPU))
    assert groups._RankDescription.from_document(read[0]) == told
