"""A Ray that does not start is one clear error, and leaves nothing."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, marked
from workers.errors import RayClusterFailedError
from workers.launchers.ray.cluster import LocalRay
from workers.launchers.ray.directory import DIRECTORY_VARIABLE


@pytest.mark.parametrize(
    ("command", "words"),
    [("exit 1", ""), ("echo first >&2; echo no port left >&2; exit 3", "first / no port left")],
)
def test_a_ray_that_does_not_start_says_its_last_words_and_leaves_nothing(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    short = Path(tempfile.mkdtemp(prefix="lt-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    try:
        with pytest.raises(RayClusterFailedError) as failed:
            LocalRay(["sh", "-c", command])
        assert str(failed.value) == f"Ray ended at its start; its last words: {words}"
        wait_until("no process is left", lambda: not marked(mark), 5)
        assert list(short.glob("lt-ray-*")) == []
    finally:
        short.rmdir()


def test_the_variable_that_names_the_directory_stands_last_also_where_one_is_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/none")
    monkeypatch.setenv(DIRECTORY_VARIABLE, "/tmp/lt-ray-of-another")
    monkeypatch.setenv("SOMETHING_LATER", "x")
    with pytest.raises(RayClusterFailedError) as failed:
        LocalRay(["sh", "-c", "tr '\\0' '\\n' </proc/$$/environ"])
    last = str(failed.value).rpartition(" / ")[2]
    assert last.startswith(f"{DIRECTORY_VARIABLE}=")
    assert "of-another" not in last
