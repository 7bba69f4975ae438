"""A rank that SIGKILL does not end, as if stuck in a driver; the kernel's freezer makes one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.process_checks import is_alive, wait_until_gone
from tests.workers.side_by_side import SideBySide
from workers.errors import RanksLeftError

pytestmark = pytest.mark.ranks


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes can be frozen; what is frozen can't be killed."""
    group = Path("/sys/fs/cgroup/freezer") / f"layout-tuner-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group of the version 1 freezer can be made here: {error}")
    yield group
    (group / "freezer.state").write_text("THAWED")
    group.rmdir()


@pytest.mark.slow  # ten seconds pass before a rank counts as left
def test_a_rank_that_cannot_be_ended_is_named_and_reaped_once_it_can(freezer: Path) -> None:
    node = SideBySide()
    other = node.start("meet")
    group = node.start("hang", num_ranks=2)
    frozen, mortal = [report["pid"] for report in node.reports(group, "hanging", 2)]
    (freezer / "cgroup.procs").write_text(str(frozen))
    (freezer / "freezer.state").write_text("FROZEN")
    with pytest.raises(RanksLeftError, match=rf"processes \[{frozen}\] are still there 10 s"):
        node.ranks.end(group)
    assert is_alive(frozen)
    assert not is_alive(mortal)
    node.ranks.tell(other, {"go": "on"})
    assert node.report(other, "result")["told"] == {"go": "on"}
    (freezer / "freezer.state").write_text("THAWED")
    wait_until_gone([frozen])
    assert set(node.ranks.end(other)) == {0}
    node.ranks.close()


@pytest.mark.slow  # twenty seconds pass before it is given up
def test_a_node_that_cannot_be_closed_says_who_is_still_at_it(freezer: Path) -> None:
    node = SideBySide()
    group = node.start("hang")
    frozen = node.report(group, "hanging")["pid"]
    warden = node.ranks.pids["warden"]
    (freezer / "cgroup.procs").write_text(str(frozen))
    (freezer / "freezer.state").write_text("FROZEN")
    with pytest.raises(RanksLeftError, match=f"the warden, process {warden}, could not end"):
        node.ranks.close()
    assert is_alive(frozen)
    (freezer / "freezer.state").write_text("THAWED")
    node.ranks.close()  # now it can
    wait_until_gone([frozen, warden])
