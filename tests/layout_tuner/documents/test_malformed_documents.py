"""Whatever a user sends, numbers and texts too, is read, or refused by a `SearchSpaceError`; a text
from a rank, a worker, an import, a program or a person is one visible line, or a log."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import string
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from layout_tuner.documents.duration import read_duration_s, read_walltime_s
from layout_tuner.documents.json_and_yaml import read_yaml
from layout_tuner.documents.limits import (
    acceptable_log,
    document_problem,
    visible_line,
    visible_text_problem,
)
from layout_tuner.documents.numbers import (
    core_value,
    read_number,
    read_printed,
    read_whole,
)
from layout_tuner.documents.reading import shown
from layout_tuner.errors import DocumentMalformedError, SearchSpaceError
from layout_tuner.protocol.measurement import Environment
from layout_tuner.protocol.outcome import MAX_MESSAGE_LENGTH, Outcome, ProbeRequest
from layout_tuner.protocol.worker_messages import (
    AllocationBody,
    BeatBody,
    HeartbeatBody,
    NodeBody,
    NodeStatusBody,
    OutcomePost,
    StatusBody,
    WorkerCreate,
)
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.clusters.calibration_file import MeasuredConstants
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.models.model_presets import model_preset, resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace
from layout_tuner.search_spaces.spaces.space_presets import resolve_space
from layout_tuner.search_spaces.tables import read_table
from layout_tuner.search_spaces.tables.fields import Fields
from layout_tuner.trainers.log_patterns import LogPatterns, StepPattern
from layout_tuner.trainers.program import read_trainers
from tests.kit.hostile_texts import changed, hostile_texts, mappings, text_places
from tests.kit.odd_values import ODD_TEXTS, nested, odd_texts, one_of
from tests.kit.store import completed, failed
from tests.layout_tuner.trainers.test_program_trainers import ENTRY
from tests.search_spaces.campaigns.test_campaign_spec import read as campaign
from tests.search_spaces.layouts.test_vocabulary import make_constants
from tests.search_spaces.tables.tables import make_row

BAD_FAITH: list[Any] = [
    *(text for text in ODD_TEXTS if len(text) < 1000),
    *(json.loads(nested(depth)) for depth in (101, 300)),
    *(
        int("9" * 4000),
        10**5000,
        1 << 20,
        1 << 63,
        -(1 << 70),
        dict.fromkeys(map(str, range(500)), 1),
    ),
    *(1e308, 5e-324, math.inf, -math.inf, math.nan, "\ud800", "9" * 5000),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | one_of(BAD_FAITH)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from(["", "tiny", "local-cpu", "frontier", "10m", "full", "bf16", "gpt", "random"])
    | odd_texts
)
KEYS = (
    st.sampled_from(["from", "to", "step", "times", "min", "max", "preset", "name"])
    | st.text(max_size=3)
    | odd_texts
)
ODD_KEYS = st.integers() | st.none() | st.booleans() | st.just(date(2020, 1, 1))
"""Keys that YAML has."""
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | ODD_KEYS, inner, max_size=4),
    max_leaves=8,
)

SPACE_FIELDS = ["global_batch_size", "allow_tp_across_nodes", "preset", *LAYOUT_FIELDS]
MODEL_FIELDS = ["preset", *ModelShape.__dataclass_fields__]
CLUSTER_FIELDS = ["preset", "device_memory_gb", *Cluster.__dataclass_fields__]
CAMPAIGN: dict[str, Any] = {
    "name": "fuzz",
    "model": "tiny",
    "cluster": {"preset": "local-cpu"},
    "space": {"global_batch_size": 8, "tp": [1, 2]},
    "budget": {"trials": 3},
    "probe": {"warmup": 2},
    "objective": "tokens_per_s",
    "strategy": "random",
    "seed": 1,
    "warnings": [],
}
PATHS = [
    *((name,) for name in CAMPAIGN),
    *(("space", name) for name in SPACE_FIELDS),
    *(("cluster", name) for name in CLUSTER_FIELDS),
    *(("budget", name) for name in ("trials", "node_hours", "wall_time", "wall_time_s")),
    *(("probe", name) for name in ("warmup", "iterations", "deadline", "deadline_s", "compile")),
]


def storable(document: dict[str, Any]) -> bytes:
    """What a database and an answer must be able to hold."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def is_read_or_refused(read: Callable[[Any], object], document: object) -> None:
    with contextlib.suppress(SearchSpaceError):
        read(document)


READERS: dict[str, tuple[list[str], list[Callable[[Any], object]]]] = {
    "space": (SPACE_FIELDS, [resolve_space, SearchSpace.from_mapping]),
    "model": (MODEL_FIELDS, [resolve_model, ModelShape.from_mapping]),
    "changed model": (MODEL_FIELDS[1:], [lambda given: resolve_model({"preset": "tiny"} | given)]),
    "cluster": (CLUSTER_FIELDS, [lambda given: storable(resolve_cluster(given)[0].to_mapping())]),
    "layout": (list(LAYOUT_FIELDS), [Layout.from_mapping]),
    "campaign": (list(CAMPAIGN), [CampaignSpec.from_mapping]),
    "probe request": (
        ["model", "layout", "seed", "warmup", "iterations", "deadline_s", "compile"],
        [ProbeRequest.from_mapping],
    ),
    "outcome": (
        ["state", "reason", "message", "duration_s", "measurement", "environment"],
        [lambda given: storable(Outcome.from_mapping(given).to_mapping())],
    ),
}
"""The fields of each document, and what reads it."""


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=50)
@given(data=st.data())
def test_a_document_is_read_or_refused(name: str, data: st.DataObject) -> None:
    names, readers = READERS[name]
    some_fields = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    document = data.draw(some_fields if name == "changed model" else JSON | some_fields)
    for read in readers:
        is_read_or_refused(read, document)


def campaign_with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *inner = path
    return CAMPAIGN | {first: {**CAMPAIGN[first], inner[0]: value} if inner else value}


def judge(document: Any) -> None:
    spec = CampaignSpec.from_mapping(document)
    assert CampaignSpec.from_mapping(json.loads(storable(spec.to_mapping()))) == spec
    spec.refuse_if_too_large()


@settings(max_examples=100)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_a_campaign_with_one_field_changed_is_judged_or_refused(
    path: tuple[str, ...], value: Any
) -> None:
    is_read_or_refused(judge, campaign_with(path, value))


WRAPPINGS: list[Callable[[Any], Any]] = [
    lambda value: [value],
    lambda value: [value] * 17,
    lambda value: {"from": value},
    lambda value: {"2": value},
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_values_of_bad_faith_are_judged_or_refused_in_every_field(path: tuple[str, ...]) -> None:
    for at, value in enumerate(BAD_FAITH):
        for document in (value, WRAPPINGS[at % len(WRAPPINGS)](value)):
            is_read_or_refused(judge, campaign_with(path, document))


TEXTS = st.text(alphabet="0123456789+-.eE_,: \t\n\u0663\uff15xonaif", max_size=12)
"""Texts of what Python's own functions accept, and more."""


def is_number(text: str) -> bool:
    """Whether Python reads it, without what people do not write."""
    try:
        return set(text) <= set(string.digits + "+-.eE") and math.isfinite(float(text))
    except ValueError:
        return False


def read(reader: Callable[[str], Any], text: str) -> Any:
    try:
        return reader(text)
    except (ValueError, SearchSpaceError):
        return None


@given(TEXTS)
def test_what_is_outside_of_the_grammar_is_no_number_anywhere(text: str) -> None:
    expected = float(text) if is_number(text) else None
    assert read(read_number, text) == expected
    whole = int(text) if re.fullmatch("[-+]?[0-9]+", text) and text.isascii() else None
    assert read(read_whole, text) == whole
    stated = float(text) if is_number(text.strip()) else 0.0
    assert read(Fields({"figure": text}).figure, "figure") == (stated if stated > 0 else None)
    packed = text.replace(" ", "").replace("\t", "")
    if not is_number(text) and "," not in text and not is_number(packed):
        printed = read(read_printed, packed)
        assert printed is None or not math.isfinite(printed)


@given(TEXTS)
def test_a_plain_scalar_is_a_number_in_yaml_by_the_core_schema_alone(text: str) -> None:
    try:
        value = read_yaml(f"[{text}]".encode())
    except DocumentMalformedError:
        return
    based = re.search(r"0o[0-7]+|0x[0-9a-fA-F]+|\.(inf|Inf|INF|nan|NaN|NAN)", text)
    is_told = based or any(is_number(part.strip()) for part in re.split("[,\n]", text))
    for each in value:
        if isinstance(each, (int, float)) and not isinstance(each, bool):
            assert is_told or not math.isfinite(each)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("010", 10), ("+5", 5), ("-0", 0), ("0o17", 15), ("0x1F", 31), ("1e3", 1000.0)),
        *((".5", 0.5), ("5.", 5.0), ("-1.5E-3", -0.0015), ("-.inf", -math.inf), (".INF", math.inf)),
        *(("true", True), ("FALSE", False), ("~", None), ("null", None), ("Null", None)),
        *((each, each) for each in ("1:0", "1:30", "1_0", "0b1", "0o8", "0x", "+0x1", "1,5", "1e")),
        *((each, each) for each in ("yes", "No", "on", "OFF", "y", "tRue", "nULL", "nan", "inf")),
        *((each, each) for each in ("2020-01-01", "=", "\u0663", "1.2.3", "+.nan", "--1")),
    ],
)  # fmt: skip
def test_a_plain_scalar_of_yaml_is_what_the_core_schema_says(text: str, value: object) -> None:
    assert core_value(text) == value
    assert type(core_value(text)) is type(value)
    if not (isinstance(value, float) and math.isinf(value)):  # JSON has no such number
        assert repr(read_yaml(f"a: {text}".encode())["a"]) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("12,345.6", 12345.6), ("-1,234,567", -1234567.0), ("1,234e2", 123400.0), (" 7 ", 7.0)),
        *(("1234.5", 1234.5), ("1.0E+01", 10.0), ("-inf", -math.inf), ("Infinity", math.inf)),
        *(("nan", math.nan), ("-NaN", math.nan)),
    ],
)
def test_numbers_are_read_as_programs_print_them(text: str, value: float) -> None:
    assert repr(read_printed(text)) == repr(value)
    read = LogPatterns(variants=(StepPattern(pattern="loss (?P<loss>.*)"),)).read(f"loss {text}")
    assert repr(read) == repr({"loss": value})


@pytest.mark.parametrize(
    "text",
    [
        "5,0",
        "5_0.0",
        "1,2345",
        "12,34,567",
        "1234,567",
        ",123",
        "1,234,",
        "\u0665",
        "5 0",
        "N/A",
        "",
    ],
)
def test_a_figure_of_a_log_that_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"step_time_ms={text!r} in the program's log")
    ) as said:
        LogPatterns(variants=(StepPattern(pattern="took (?P<step_time_ms>.*) ms"),)).read(
            f"took {text} ms"
        )
    assert "took (?P<step_time_ms>.*) ms" in str(said.value)


def test_durations_have_ascii_digits() -> None:
    assert read_walltime_s("1:30", field="x") == 90.0
    for text in ("\u0661:30", "1_0:00"):
        with pytest.raises(SearchSpaceError):
            read_walltime_s(text, field="x")
    for text in ("1:30", "1_0s", "\u0661s", "1e3"):
        with pytest.raises(SearchSpaceError, match="is not a duration: give seconds, or a number"):
            read_duration_s(text, field="wall_time")


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
SPEC: Final = replace(
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


OF_LINES: Final[dict[str, tuple[Callable[[Any], Any], Any]]] = {
    "outcome": (Outcome.from_mapping, OUTCOME),
    "failed outcome": (Outcome.from_mapping, asdict(failed())),
    "posted outcome": (message(OutcomePost), {"worker_id": "w", "attempt": 1, "outcome": OUTCOME}),
    "worker": (message(WorkerCreate), asdict(WORKER)),
    "heartbeat": (message(HeartbeatBody), asdict(HEARTBEAT)),
    "probe request": (ProbeRequest.from_mapping, REQUEST.to_mapping()),
    "model": (ModelShape.from_mapping, REQUEST.model.to_mapping()),
    "cluster": (Cluster.from_mapping, SPEC.cluster.to_mapping()),
    "campaign": (CampaignSpec.from_mapping, SPEC.to_mapping()),
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
@pytest.mark.parametrize("name", OF_LINES)
@settings(max_examples=15)
@given(text=hostile_texts)
def test_a_text_is_one_visible_line_or_refused_with_its_field(name: str, text: str) -> None:
    read, document = OF_LINES[name]
    for place in text_places(document):
        refusal = refusal_of(read, changed(document, place, text))
        if refusal is None:
            assert text.strip().isprintable() or any(step in NOT_A_LINE for step in place), place
        else:
            assert next(step for step in reversed(place) if isinstance(step, str)) in refusal


@pytest.mark.parametrize("name", [name for name in OF_LINES if name != "table"])
@settings(max_examples=5)
@given(text=hostile_texts.filter(lambda text: not text.isprintable()))
def test_a_name_that_a_client_chooses_is_one_visible_line(name: str, text: str) -> None:
    read, document = OF_LINES[name]
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


def test_a_refused_value_is_quoted_up_to_80_characters() -> None:
    assert shown("x" * 78) == f"'{'x' * 78}'"
    assert shown("x" * 79) == f"'{'x' * 76}..."
