"""What people write, good or bad: read, or refused with a 4xx that can be read. Never a 500."""

import json
from contextlib import suppress
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_tuner.documents import json_and_yaml as documents
from layout_tuner.documents.json_and_yaml import read_json, read_yaml, write_yaml
from layout_tuner.errors import DocumentInvalidError, DocumentMalformedError
from tests.kit.api import CAMPAIGN

YAML = {"Content-Type": "application/yaml"}


@pytest.fixture(params=[yaml.SafeLoader, documents._SafeLoader], ids=["python", "installed"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of PyYAML's readers: which one there is depends on how it was built."""
    monkeypatch.setattr(documents, "_SafeLoader", request.param)


def test_text_that_cannot_be_shown_is_no_document_and_text_of_any_language_is() -> None:
    document = {"name": "größe", "model": ["模型", "🙂"]}
    assert read_json(json.dumps(document).encode()) == document
    assert read_yaml(yaml.safe_dump(document, allow_unicode=True).encode()) == document
    for body in (rb'{"name": "\ud800"}', rb'{"\ud800": 1}', rb'["a\u0007"]'):
        with pytest.raises(DocumentMalformedError, match="cannot be shown"):
            read_json(body)
        with pytest.raises(
            DocumentMalformedError, match=r"cannot be shown|malformed YAML at line 1"
        ):
            read_yaml(body)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("name: x\n? [a]\n: b\n", "line 2, column 3: a key is a list or a mapping"),
        ("name: x\n? {a: 1}\n: b\n", "line 2, column 3: a key is a list or a mapping"),
        ("name: x\n<<: {a: 1}\n", "line 2, column 1: merge keys are not supported"),
        ("a: 1\n1: x\n0x1: y\n", "line 3, column 1: the key '0x1' is there twice"),
        ("a: !!timestamp soon\n", "line 1, column 4: the tag 'tag:yaml.org,2002:timestamp'"),
        ("a: !!int ''\n", "the tag 'tag:yaml.org,2002:int' is not supported"),
        ("a: !!set {b}\n", "the tag 'tag:yaml.org,2002:set' is not supported"),
        ("a: &x [1]\nb: *x\n", "line 2, column 4: aliases are not supported"),
        ("a: " + "[" * 200 + "]" * 200, "line 1, column 103: it is nested too deeply"),
        ('a: "\\UFFFFFFFF"', "malformed YAML"),
        ("a: 1\n---\nb: 2\n", "malformed YAML at line 2"),
    ],
)
def test_yaml_that_would_surprise_is_refused_with_its_line(
    loader: None, body: str, where: str
) -> None:
    with pytest.raises(DocumentMalformedError) as refused:
        read_yaml(body.encode())
    assert where in str(refused.value)


def test_both_readers_of_yaml_read_the_same(loader: None) -> None:
    text = "a: {b: [1, 2.5, true, null], c: 'x'}\n? d\n: |-\n  word\n2: 3\n"
    document = {"a": {"b": [1, 2.5, True, None], "c": "x"}, "d": "word", "2": 3}
    assert read_yaml(text.encode()) == document


@given(
    document=st.recursive(
        st.text(alphabet="0123456789+-.eE_xobnul~tTrfFyYs<=: ,", max_size=8)
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.sampled_from([True, False, None, "2020-01-01", "1e3", "0o7", "010", "1:30", "yes"]),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=8,
    ),
    flow=st.sampled_from([True, False, None]),
)
def test_what_is_written_is_read_again_by_either_version_of_yaml(document: Any, flow: Any) -> None:
    written = write_yaml({"a": document}, default_flow_style=flow)
    assert read_yaml(written.encode()) == {"a": document}
    assert yaml.safe_load(written) == {"a": document}


@pytest.mark.parametrize(
    ("budget", "field", "says"),
    [
        ("trials: 1_0", "trials", "'1_0' is not a whole number of at least 1"),
        ("trials: 3, wall_time: 1:30", "wall_time", "'1:30' is not a duration: give seconds, or a"),
    ],
)
def test_a_number_that_nobody_wrote_is_refused_by_its_field(
    lasting: TestClient, budget: str, field: str, says: str
) -> None:
    plain = yaml.safe_dump({name: value for name, value in CAMPAIGN.items() if name != "budget"})
    body = f"{plain}budget: {{{budget}}}\n"
    (refused,) = lasting.post("/v1/campaigns", content=body, headers=YAML).json()["errors"]
    assert refused["field"] == f"body.budget.{field}"
    assert says in refused["message"]
    decimal = f"{plain}budget: {{trials: 010}}\n".replace("name: first", f"name: of-{field}")
    created = lasting.post("/v1/campaigns", content=decimal, headers=YAML).json()
    assert created["spec"]["budget"]["trials"] == 10


class CountingWord(str):
    """Counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountingWord.compared += 1
        return str.__eq__(self, other)


def test_a_repeated_field_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(CountingWord(number), 0) for number in range(2000)]
    monkeypatch.setattr(CountingWord, "compared", 0)
    with pytest.raises(DocumentMalformedError, match="'1999' is there twice"):
        documents._without_duplicates([*pairs, pairs[-1]])
    assert CountingWord.compared < 10 * len(pairs)


FRAGMENTS = (
    "name: model: tiny cluster: local-cpu space: {tp: [1]} ? : - [ ] { } , & * ! !!int !!bool | > "
    "<<: \n \t ' \" # --- ... ~ 0x 1e9 .inf .nan 2026-01-01 1:30 = \\ud800 \\0 \x00 \ufeff \ud7ff %"
)
WORDS = st.sampled_from([*FRAGMENTS.split(" "), " ", "\n  "])


@settings(deadline=None)
@given(
    body=st.binary(max_size=40) | st.lists(WORDS, max_size=14).map(lambda w: "".join(w).encode())
)
def test_no_body_at_all_is_a_fault_of_the_service(body: bytes) -> None:
    """What can be read is checked by `check_submission`, which takes anything."""
    for read in (read_json, read_yaml):
        with suppress(DocumentMalformedError, DocumentInvalidError):
            read(body)
