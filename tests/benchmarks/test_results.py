"""The results of the benchmarks: their sections, and how benchmarks replace them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks import results_file
from benchmarks.bench_search import INTRO
from benchmarks.results_file import RESULTS, describe_machine, named_machines, record
from benchmarks.search.search_figures import RECORDED
from benchmarks.search.search_record import KEPT, Part, Promise, SearchRecord

SECTIONS = RESULTS.read_text().split("\n## ")[1:]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the results."""
    return Path(shutil.copy(RESULTS, tmp_path / "RESULTS.md"))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_a_section_states_a_date_and_a_named_machine(section: str) -> None:
    names = "|".join(named_machines().values())
    assert re.search(rf"\b20\d\d-\d\d-\d\d; ({names})\b", section)


def test_a_machine_of_the_head_has_its_name(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_file, "_cpu_name", lambda: "Some processor")
    described = describe_machine("pytest", path=copied)
    date, machine, _ = re.split(r"; (?!Linux)", described)
    assert machine.startswith("Some processor, ")
    copied.write_text(copied.read_text().replace("\n- ", f"\n- Mine: {machine}\n- ", 1))
    assert named_machines(copied)[machine] == "Mine"
    assert describe_machine("pytest", path=copied) == f"{date}; Mine; pytest {pytest.__version__}"


def test_a_section_is_replaced_where_it_stands(copied: Path) -> None:
    before = copied.read_text()
    title, _, text = SECTIONS[1].partition("\n")
    record(title, "another text", copied)
    assert f"\n## {title}\n\nanother text\n\n## " in copied.read_text()
    record(title, text, copied)
    assert copied.read_text() == before


def test_the_search_section_is_written_as_it_was_read(copied: Path) -> None:
    before = copied.read_text()
    SearchRecord.read(INTRO, RECORDED, copied).write(copied)
    assert copied.read_text() == before


def test_only_promises_are_kept_of_most_parts_of_a_search() -> None:
    found = SearchRecord(intro="", header=RECORDED, how="2026-01-01; A; numpy 1")
    for title in ("first-probe", KEPT[0]):
        promise = Promise(what=f"probes of {title}", asked="2", measured=3.0, most=2.0)
        found.add(Part(title=title, text="said", promises=(promise,)), "2026-01-02; B; numpy 1")
    assert found.parts == {KEPT[0]: "said\n\n2026-01-02; B; numpy 1."}
    assert found.promises == {
        what: (what, "2", "3", "**no**", "2026-01-02; B")
        for what in ("probes of first-probe", f"probes of {KEPT[0]}")
    }
