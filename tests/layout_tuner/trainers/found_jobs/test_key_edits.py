"""Values of YAML, JSON and TOML are changed in the manner of the file."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.trainers.found_jobs.into.key_edits import KeyEdits, KeyNotWritableError
from layout_tuner.trainers.found_jobs.into.layout_changes import GONE
from layout_tuner.trainers.found_jobs.into.script_edits import edited
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned import positioned


def changed(name: str, text: str, **changes: Any) -> str:
    """The text with values at paths, whose dots are written `__`; it must read back."""
    file = JobFile(name=name, text=text)
    keys = KeyEdits(file)
    for path, value in changes.items():
        keys.set(path.replace("__", "."), value)
    result = edited(text, keys.finish())
    read = positioned(JobFile(name=name, text=result))
    for path, value in changes.items():
        node = read.get(path.replace("__", "."))
        if value is not GONE:
            assert node is not None
            assert node.value == value
    return result


def test_a_number_changes_alone_and_comments_stay() -> None:
    text = "model:\n  tp: 4   # of a node\n  pp: 2\n"

    assert changed("a.yaml", text, model__tp=8) == text.replace("tp: 4", "tp: 8")


def test_a_value_that_is_the_same_changes_nothing() -> None:
    text = "model:\n  tp: 0x4\n  name: 'llama'\n"

    assert changed("a.yaml", text, model__tp=4, model__name="llama") == text


def test_quotes_of_a_text_stay() -> None:
    text = "a: {mode: 'none', other: \"x\"}\n"

    result = changed("a.yaml", text, a__mode="full", a__other="y")

    assert result == "a: {mode: 'full', other: \"y\"}\n"


@pytest.mark.parametrize("value", ["no", "null", "1e5x: y", "-", "12", "true", ""])
def test_a_text_that_yaml_would_take_for_something_else_is_quoted(value: str) -> None:
    changed("a.yaml", "a:\n  b: word\n", a__b=value)


def test_an_empty_value_is_filled() -> None:
    assert changed("a.yaml", "a:\n  b:\n  c: 1\n", a__b=3) == "a:\n  b: 3\n  c: 1\n"


def test_a_new_key_of_yaml_stands_behind_its_section_with_its_indentation() -> None:
    text = "model:\n    tp: 4\n    pp: 2  # stages\ntrain:\n    steps: 5\n"

    result = changed("a.yaml", text, model__cp=2)

    assert result == text.replace("# stages\n", "# stages\n    cp: 2\n")


@pytest.mark.parametrize("text", ["format: 1\nmodel:\n  tp: 4\n", "model:\n  tp: 4\n"])
def test_a_new_section_of_yaml_stands_at_the_end(text: str) -> None:
    result = changed("a.yaml", text, ddp__zero__stage=1)

    assert result == f"{text}ddp:\n  zero:\n    stage: 1\n"


def test_a_new_section_stands_behind_others_of_its_section() -> None:
    text = "a:\n  b:\n    c:\n      d: 1\n    e:\n      f: 2\ng: 3\n"

    result = changed("a.yaml", text, a__b__h__i="on")

    assert result == text.replace("f: 2\n", 'f: 2\n    h:\n      i: "on"\n')


def test_a_new_section_of_json_stands_behind_the_others() -> None:
    text = '{\n  "a": {\n    "b": 1\n  }\n}\n'

    result = changed("a.json", text, c__d=2)

    assert result == text.replace("\n  }\n}", '\n  },\n  "c": {"d": 2}\n}')


def test_a_new_key_of_a_flow_mapping_stays_in_its_braces() -> None:
    assert changed("a.yaml", "a: {b: 1, c: 2}\n", a__d=[1, 2]) == "a: {b: 1, c: 2, d: [1, 2]}\n"


def test_json_keeps_its_commas_and_indentation() -> None:
    text = '{\n    "zero": {\n        "stage": 1\n    },\n    "batch": 8\n}\n'

    result = changed("a.json", text, zero__hpz=2, fp8=True)

    assert result == (
        '{\n    "zero": {\n        "stage": 1,\n        "hpz": 2\n    },\n    "batch": 8,\n'
        '    "fp8": true\n}\n'
    )


def test_json_on_one_line_stays_on_it() -> None:
    assert changed("a.json", '{"a": 1, "b": 2}', c=3, b=GONE) == '{"a": 1, "c": 3}'


def test_toml_gets_keys_in_their_table_and_new_tables_at_the_end() -> None:
    text = "[training]\nsteps = 10_000  # all\n\n[parallelism]\ntp = 2\n"

    result = changed("a.toml", text, training__seed=1, parallelism__tp=4, compile__enable=True)

    assert result == (
        "[training]\nsteps = 10_000  # all\nseed = 1\n\n[parallelism]\ntp = 4\n"
        "\n[compile]\nenable = true\n"
    )


def test_a_key_goes_with_its_line_and_comment() -> None:
    text = "a:\n  method: uniform  # by layers\n  layers: 1\n"

    assert changed("a.yaml", text, a__method=GONE) == "a:\n  layers: 1\n"


def test_a_new_key_comes_behind_one_that_stays() -> None:
    text = "[a]\nb = 1\nc = 2\n"

    assert changed("a.toml", text, a__c=GONE, a__d=3) == "[a]\nb = 1\nd = 3\n"


def test_a_switch_that_goes_is_false_and_the_last_key_of_a_section_is_null() -> None:
    text = "a:\n  fsdp: true\n  n: 2\nb:\n  strategy: optim\n"

    result = changed("a.yaml", text, a__fsdp=GONE, b__strategy=GONE)

    assert result == "a:\n  fsdp: false\n  n: 2\nb:\n  strategy: null\n"


def test_lines_that_end_as_on_windows_stay_so() -> None:
    assert changed("a.yaml", "a:\r\n  b: 1\r\n", a__c=2) == "a:\r\n  b: 1\r\n  c: 2\r\n"


def test_a_list_over_several_lines_is_refused_by_its_path() -> None:
    with pytest.raises(KeyNotWritableError, match=r"a\.b"):
        changed("a.yaml", "a:\n  b:\n    - 1\n    - 2\n", a__b=[3])
