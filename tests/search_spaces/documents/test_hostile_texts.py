"""A text from a rank, a worker, an import, a program or a person is one visible line, or a log."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.documents.limits import (
    acceptable_log,
    document_problem,
    visible_line,
    visible_text_problem,
)
from search_spaces.protocol.measurement import Environment
from search_spaces.protocol.outcome import MAX_MESSAGE_LENGTH, Outcome, ProbeRequest
from search_spaces.protocol.worker_messages import (
    AllocationBody,
    BeatBody,
    HeartbeatBody,
    NodeBody,
    NodeStatusBody,
    OutcomePost,
    StatusBody,
    WorkerCreate,
)
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.calibration_file import MeasuredConstants
from search_spaces.spec.presets.models import model_preset
from search_spaces.tables import read_table
from search_spaces.trainers.program import read_trainers
from tests.kit.hostile_texts import changed, hostile_texts, mappings, text_places
from tests.kit.store import completed, failed
from tests.search_spaces.campaigns.test_campaign_spec import read as campaign
from tests.search_spaces.spec.test_calibration_file import make_constants
from tests.search_spaces.tables.tables import make_row
from tests.search_spaces.trainers.test_program_trainers import ENTRY

OUTCOME: Final = asdict(completed())
WORKER: Final = WorkerCreate(
    **dict.fromkeys(("name", "host", "cluster", "device"), "w"),
    num_nodes=1,
    devices_per_node=2,
    versions={"torch": "2"},
    trainers={"mine": "1"},
    allocation=AllocationBody(job_id="7", launcher="srun"),
    nodes=[NodeBody(name="n", num_devices=2)],
)
NODE: Final = NodeStatusBody(name="n", state="idle", health={"failure": "", "device": "cpu"})
HEARTBEAT: Final = HeartbeatBody(
    trials=[BeatBody(trial_id=1, attempt=1, iterations_done=0, waiting_because="of others")],
    status=StatusBody(nodes=[NODE]),
)
CAMPAIGN: Final = replace(
    campaign(probe={"trainer": "mine", "parameters": {"rate": "x"}}, start_from=["wide"]),
    warnings=("it is small",),
)
REQUEST: Final = ProbeRequest(
    model=model_preset("tiny"), layout=Layout(), trainer="mine", parameters={"rate": "x"}
)
PARAMETERS: Final = {
    "word": {"type": "choice", "choices": ["a", "b"]},
    "file": {"type": "path", "below": "/data", "default": "x"},
    "rate": {"type": "text", "pattern": ".*"},
}


def message(cls: Any) -> Callable[[Any], Any]:
    """A message of workers, as the service reads it."""
    return TypeAdapter(cls).validate_python


def read_row(row: dict[str, Any]) -> Any:
    """A table of one row, all of whose fields are quoted, as its reader takes it."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([row, row.values()])
    return read_table(text.getvalue())


READERS: Final[dict[str, tuple[Callable[[Any], Any], Any]]] = {
    "outcome": (Outcome.from_mapping, OUTCOME),
    "failed outcome": (Outcome.from_mapping, asdict(failed())),
    "posted outcome": (message(OutcomePost), {"worker_id": "w", "attempt": 1, "outcome": OUTCOME}),
    "worker": (message(WorkerCreate), asdict(WORKER)),
    "heartbeat": (message(HeartbeatBody), asdict(HEARTBEAT)),
    "probe request": (ProbeRequest.from_mapping, REQUEST.to_mapping()),
    "model": (ModelShape.from_mapping, REQUEST.model.to_mapping()),
    "cluster": (Cluster.from_mapping, CAMPAIGN.cluster.to_mapping()),
    "campaign": (CampaignSpec.from_mapping, CAMPAIGN.to_mapping()),
    "constants": (
        MeasuredConstants.from_mapping,
        make_constants(warnings=("it was busy",)).to_mapping(),
    ),
    "trainers": (read_trainers, {"trainers": [{**ENTRY, "parameters": PARAMETERS}]}),
    "table": (read_row, make_row(family="gpt")),
}

NOT_A_LINE: Final = ("log_tail", "command", "pattern")
"""Logs, and what the owner of a worker writes for a program: its arguments, a regular expression.
No file has them."""


def refusal_of(read: Callable[[Any], Any], document: Any) -> str | None:
    try:
        read(document)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of such a regular expression
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=15)
@given(text=hostile_texts)
def test_a_text_is_one_visible_line_or_refused_with_its_field(name: str, text: str) -> None:
    read, document = READERS[name]
    for place in text_places(document):
        refusal = refusal_of(read, changed(document, place, text))
        if refusal is None:
            assert text.strip().isprintable() or any(step in NOT_A_LINE for step in place), place
        else:
            assert next(step for step in reversed(place) if isinstance(step, str)) in refusal


@pytest.mark.parametrize("name", [name for name in READERS if name != "table"])
@settings(max_examples=5)
@given(text=hostile_texts.filter(lambda text: not text.isprintable()))
def test_a_name_that_a_client_chooses_is_one_visible_line(name: str, text: str) -> None:
    read, document = READERS[name]
    for place in mappings(document):
        with pytest.raises(ValueError):
            read(changed(document, (*place, text), "x"))


@given(text=hostile_texts, most=st.integers(1, 20))
def test_what_a_system_says_is_made_one_visible_line(text: str, most: int) -> None:
    line = visible_line(text, most)
    assert visible_text_problem(line) is None
    assert len(line) <= most
    assert line == text[:most] or not text.isprintable()
    Environment.described(**dict.fromkeys(OUTCOME["environment"], text * 30))


def test_what_a_rank_prints_is_kept_as_lines_and_why_it_failed_as_one_visible_line() -> None:
    printed = "x" * MAX_MESSAGE_LENGTH + "a\0b" + "\ud800\n"
    kept = acceptable_log(printed, MAX_MESSAGE_LENGTH)
    assert document_problem(kept) is None
    assert kept.endswith("a\ufffdb?\n")
    assert len(kept) == MAX_MESSAGE_LENGTH
    assert acceptable_log("first last", 4) == "last"

    said = "  CUDA error\r\n\tlaunch\u2028failed\0\ud800\u202e" + "x" * MAX_MESSAGE_LENGTH
    kept = visible_line(said, MAX_MESSAGE_LENGTH)
    assert document_problem(kept, visible_text_problem) is None
    assert kept.startswith("CUDA error launch failed\ufffd\ufffd\ufffdxx")
    assert len(kept) == MAX_MESSAGE_LENGTH
    assert visible_line("two  spaces", 6) == "two  s"
