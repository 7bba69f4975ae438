"""YAML, JSON and TOML with the place of each value."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned import positioned
from layout_tuner.trainers.found_jobs.positioned_node import Positioned

YAML = """\
# a job, größer als
run: "größe"
parallelism:
  tp: 4   # ranks
  rate: 1e-5
  steps: 1_000
  flow: {pp: 2, names: [a, "b c"]}
wanted: yes
said: 'no'
time: 24:00:00
empty:
dtype: !!python/object/apply:torch.dtype [bf16]
forced: !!str 8
base: &base {dp: 8, mbs: 1}
other: {<<: *base, mbs: 2}
same: *base
"""

JSON = """\
{ // the engine's
\t"train_batch_size": 32, "zero_optimization": {"stage": 2, "bucket": 5e8,},
\t/* types */ "bf16": {"enabled": true}, "fp16": {"enabled": "auto"}, # no
\t"names": ["a // b", null], "bad": NaN, "open": <BATCH>,
}
"""

TOML = """\
top = "a # b"  # a comment
[training]
local_batch_size = 10_000
rate = 1e-5
text = '''
[parallelism]
seq_len = 1
'''
names = ["loss", # one
  'x']
[parallelism]
pipeline.degree = 2
sub = {tp = 4, "cp x" = [1, 2]}
day = 2026-01-02 03:04:05
[[data]]
weight = 1
[[data]]
weight = 2
[data.more]
file = "c"
"""


def read(text: str, name: str) -> Positioned:
    return positioned(JobFile.of(name, text.encode()))


def literals(node: Positioned) -> dict[str, str]:
    """The literal of each scalar by its path."""
    if node.entries is not None:
        return {k: v for each in node.entries.values() for k, v in literals(each).items()}
    if node.items is not None:
        return {k: v for each in node.items for k, v in literals(each).items()}
    assert node.place is not None, node.path
    return {node.path: node.text[node.place.start : node.place.end]}


@pytest.mark.parametrize(
    ("path", "value", "said", "line"),
    [
        ("run", "größe", 'run: "größe"', 2),
        ("parallelism.tp", 4, "parallelism.tp: 4", 4),
        ("parallelism.rate", 1e-5, "parallelism.rate: 1e-5", 5),
        ("parallelism.steps", 1000, "parallelism.steps: 1_000", 6),
        ("parallelism.flow.pp", 2, "parallelism.flow.pp: 2", 7),
        ("parallelism.flow.names", ["a", "b c"], 'parallelism.flow.names: [a, "b c"]', 7),
        ("wanted", True, "wanted: yes", 8),
        ("said", "no", "said: 'no'", 9),
        ("time", "24:00:00", "time: 24:00:00", 10),
        ("empty", None, "empty:", 11),
        ("forced", "8", "forced: 8", 13),
        ("other.dp", 8, "other.dp: 8", 14),
        ("other.mbs", 2, "other.mbs: 2", 15),
        ("same.mbs", 1, "same.mbs: 1", 14),
    ],
)
def test_yaml_has_values_and_places(path: str, value: Any, said: str, line: int) -> None:
    found = read(YAML, "job.yaml").get(path)
    assert found is not None
    assert (found.value, type(found.value), found.why) == (value, type(value), "")
    assert (found.said.replace("!!str ", ""), found.line) == (said, line)


def test_a_tag_of_a_program_is_not_understood() -> None:
    found = read(YAML, "job.yaml").get("dtype")
    assert found is not None
    assert found.value is None or found.value == ["bf16"]
    assert "!!python/object/apply:torch.dtype" in found.why
    assert read("a: !x {b: 1}", "a.yaml").get("a.b") is None


@pytest.mark.parametrize("text", ["a: .inf", "a: -.inf", "a: .nan", "a: " + "9" * 500])
def test_numbers_that_are_none_are_not_understood(text: str) -> None:
    found = read(text, "job.yaml").get("a")
    assert found is not None
    assert found.value is None
    assert found.why


def test_json_as_deepspeed_reads_it() -> None:
    root = read(JSON, "ds_config.json")
    assert literals(root) == {
        "train_batch_size": "32",
        "zero_optimization.stage": "2",
        "zero_optimization.bucket": "5e8",
        "bf16.enabled": "true",
        "fp16.enabled": '"auto"',
        "names[0]": '"a // b"',
        "names[1]": "null",
        "bad": "NaN",
        "open": "<BATCH>",
    }
    assert root.value["zero_optimization"] == {"stage": 2, "bucket": 5e8}
    assert root.value["fp16"] == {"enabled": "auto"}
    assert root.value["names"] == ["a // b", None]
    unknown = [each.path for each in root.leaves() if each.why]
    assert unknown == ["bad", "open"]
    assert [each.line for each in root.leaves()] == [2, 2, 2, 3, 3, 4, 4, 4]


def test_toml_has_the_values_of_tomllib_and_their_places() -> None:
    root = read(TOML, "job.toml")
    expected = tomllib.loads(TOML)
    assert root.value == {
        **expected,
        "parallelism": {**expected["parallelism"], "day": "2026-01-02 03:04:05"},
    }
    assert literals(root) == {
        "top": '"a # b"',
        "training.local_batch_size": "10_000",
        "training.rate": "1e-5",
        "training.text": "'''\n[parallelism]\nseq_len = 1\n'''",
        "training.names[0]": '"loss"',
        "training.names[1]": "'x'",
        "parallelism.pipeline.degree": "2",
        "parallelism.sub.tp": "4",
        "parallelism.sub.cp x[0]": "1",
        "parallelism.sub.cp x[1]": "2",
        "parallelism.day": "2026-01-02 03:04:05",
        "data[0].weight": "1",
        "data[1].weight": "2",
        "data[1].more.file": '"c"',
    }


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is there twice"),
        ("a.json", '{"a": 1,\n "a": 2}', "line 2: the key 'a' is there twice"),
        ("a.toml", "a = 1\na = 2\n", "malformed TOML"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "a second document begins"),
        ("a.json", '{"a": 1}\n{"b": 2}', "line 2: malformed JSON: the end of the file"),
        ("a.json", '{"a": 1', "malformed JSON"),
        ("a.json", '{"a": ', "malformed JSON: a value is expected"),
        ("a.json", '{"a" 1}', "malformed JSON"),
        ("a.json", '{"a": "b', "malformed JSON"),
        ("a.json", '{"a": [1 2]}', "malformed JSON"),
        ("a.json", '{"a": "\\u12"}', "no text of JSON"),
        ("a.yaml", "a: [1, 2\nb: 3\n", "malformed YAML"),
        ("a.yaml", "a: *b\n", "stands for nothing"),
        ("a.yaml", "a: &a [*a]\n", "stands for nothing"),
        ("a.yaml", "? [a, b]\n: 1\n", "a key must be a word"),
        ("a.yaml", "# nothing\n", "no value"),
        ("a.yaml", "[" * 200 + "]" * 200, "nested too deeply"),
        ("a.json", "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("a.toml", "a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a.json", "[" + "1," * 60_000 + "]", "more than 50000"),
        ("a.yaml", "a: &a [" + "x, " * 300 + "]\nb: [" + "*a, " * 300 + "]\n", "more than 50000"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(name: str, text: str, words: str) -> None:
    with pytest.raises(JobFileInvalidError) as error:
        read(text, name)
    assert str(error.value).startswith(f"{name}: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8).filter(
    lambda text: not re.fullmatch(r"[-+\d.]+[eE][-+\d]+", text)  # a number here, PyYAML's text
)
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS
_DOCUMENTS = st.dictionaries(
    _TEXTS,
    st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


@given(_DOCUMENTS)
def test_what_json_writes_is_read(document: dict[str, Any]) -> None:
    finite = json.loads(json.dumps(document).replace("Infinity", "0"))
    assert read(json.dumps(finite, indent=1), "a.json").value == finite


@given(_DOCUMENTS, st.booleans())
def test_what_pyyaml_writes_is_read_with_its_places(document: dict[str, Any], flow: bool) -> None:
    finite = json.loads(json.dumps(document).replace("Infinity", "0"))
    text = yaml.safe_dump(finite, allow_unicode=True, default_flow_style=flow)
    root = read(text, "a.yaml")
    assert root.value == yaml.safe_load(text)
    for leaf in root.leaves():
        assert leaf.place is not None
        literal = leaf.text[leaf.place.start : leaf.place.end]
        if leaf.items is None and not leaf.is_mapping and "\n" not in literal:
            assert yaml.safe_load(literal) == leaf.value
