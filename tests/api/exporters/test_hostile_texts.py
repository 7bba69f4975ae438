"""No text that somebody reported changes a command or a value of an exported file."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from api.exporters import FORMATS, export
from api.exporters.base import ExportSource
from api.exporters.launch_script import exported
from api.exporters.torchtitan_files import _toml_lines
from api.formatting import measured_sentence
from api.report.probe_command import probe_command
from results_db.records import MeasurementRecord
from results_db.rows import record_of
from search_spaces.documents.reading import is_name
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from search_spaces.trainers.base import TrainerJob
from search_spaces.trainers.parameters import parameters_of
from tests.kit.hostile_texts import hostile_texts
from tests.kit.store import make_environment, make_measurement
from tests.search_spaces.campaigns.test_campaign_spec import read as campaign

LAYOUT: Final = Layout(num_nodes=2, dp=4, num_microbatches=4, precision="bf16")
HARMLESS: Final = "harmless"
HALVES: Final = re.compile("[\ud800-\udfff]")
"""Halves of characters, which no file can hold."""
some_texts: Final = st.lists(hostile_texts, min_size=20, max_size=20)
"""Texts of one example: one bash parses all of them."""


def with_text(document: Any, text: str) -> Any:
    """A copy of a dataclass in which every text is this one, as an old database may hold it."""
    found = object.__new__(type(document))
    for field in fields(document):
        value = getattr(document, field.name)
        if is_dataclass(value):
            value = with_text(value, text)
        object.__setattr__(found, field.name, text if isinstance(value, str) else value)
    return found


def files_of(text: str) -> dict[tuple[str, str], str]:
    """The files of all formats, with the text wherever somebody else than this project writes."""
    model = model_preset("tiny-llama")
    job = TrainerJob(model=replace(model, name=text if is_name(text) else HARMLESS), layout=LAYOUT)
    measured = measured_sentence(
        record_of(MeasurementRecord, with_text(make_measurement(), text)),
        with_text(make_environment(), text),
    )
    source = ExportSource(
        campaign=text, trial=7, job=job, comments=(text, measured), changes=(text,)
    )
    return {
        (name, file.name): file.content for name in FORMATS for file in export(name, source).files
    }


def named(text: str) -> str:
    """The name of the model in these files: the text, if a model may have that name."""
    return text if is_name(text) else HARMLESS


READERS: Final[dict[str, Callable[[str], Any]]] = {
    "py": lambda content: ast.dump(ast.parse(content.encode())),
    "yaml": yaml.safe_load,
    "toml": tomllib.loads,
    "json": json.loads,
}


def values_of(text: str) -> dict[tuple[str, str], Any]:
    """What the language of each file reads in it; bash's are in `commands_of`."""
    return {
        key: READERS[kind](content)
        for key, content in files_of(text).items()
        if (kind := key[1].rpartition(".")[2]) != "sh"
    }


def commands_of(texts: Sequence[str], folder: Path) -> list[dict[tuple[str, str], str]]:
    """The commands of each text's scripts, as bash prints what it has read. It runs none."""
    scripts = {
        f"script_{number}_{place}": ((number, key), content)
        for number, text in enumerate(texts)
        for place, (key, content) in enumerate(files_of(text).items())
        if key[1].endswith(".sh")
    }
    read = "".join(f"{name}() {{\n{script}\n}}\n" for name, (_, script) in scripts.items())
    printed = run_by_bash(f"{read}declare -f\n", folder)
    found: list[dict[tuple[str, str], str]] = [{} for _text in texts]
    for name, body in re.findall(r"^(script_\d+_\d+) \(\) \n(\{.*?^\}$)", printed, re.M | re.S):
        (number, key), _script = scripts[name]
        found[number][key] = body
    return found


def run_by_bash(program: str, folder: Path) -> str:
    """What bash prints; it finds no program, so that only its own commands can run."""
    bash = shutil.which("bash")
    assert bash
    asked: dict[str, Any] = {"cwd": folder, "env": {"PATH": ""}, "input": program.encode()}
    done = subprocess.run([bash], **asked, capture_output=True, check=False)
    assert (done.returncode, done.stderr, [*folder.iterdir()]) == (0, b"", [])
    return done.stdout.decode()


def assert_same_commands_and_values(texts: Sequence[str], folder: Path) -> None:
    plain_values, (plain_commands,) = values_of(HARMLESS), commands_of([HARMLESS], folder)
    assert len(plain_values) == 11
    assert len(plain_commands) == 11
    for text, commands in zip(texts, commands_of(texts, folder), strict=True):
        values = values_of(text)
        assert values["embedded", "job.json"]["model"].pop("name") == named(text)
        values["embedded", "job.json"]["model"]["name"] = HARMLESS
        assert values == plain_values, repr(text)
        # The model's name is a value of scripts: bash reads it as one word.
        word = shlex.quote(named(text))
        assert commands == {
            key: body.replace(f"LAYOUT_MODEL={HARMLESS}", f"LAYOUT_MODEL={word}")
            for key, body in plain_commands.items()
        }, repr(text)


SEARCH: Final = settings(deadline=None, phases=[Phase.explicit, Phase.generate])
"""The text is named where it fails; to make it shorter takes minutes."""


ATTACKS: Final = (
    *("{tp} $(exit 1)`exit 1`'\"\\", "coding: utf-7 +AAo-x=1", "\r\ntouch x", "\0\ud800", "\x85a"),
)
"""Texts that changed something once."""


@settings(SEARCH, max_examples=1)
@given(texts=some_texts)
def test_no_text_changes_a_command_or_a_value(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_same_commands_and_values([*ATTACKS, *texts], tmp_path_factory.mktemp("empty"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(SEARCH, max_examples=250)
@given(texts=some_texts)
def test_none_of_5000_texts_changes_a_command_or_a_value(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert_same_commands_and_values(texts, tmp_path_factory.mktemp("empty"))


@settings(SEARCH, max_examples=5)
@given(texts=some_texts)
def test_a_text_is_the_value_of_a_variable_of_bash_as_it_is(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = [HALVES.sub("", text.replace("\0", "")) for text in texts]  # no variable holds NUL
    lines = [f"{exported({'V': text})[0]}\nprintf '%s\\0' \"$V\"\n" for text in given]
    found = run_by_bash("".join(lines), tmp_path_factory.mktemp("empty"))
    assert found.split("\0") == [*given, ""]


@given(text=hostile_texts)
def test_a_text_is_a_value_of_toml_as_it_is(text: str) -> None:
    whole = HALVES.sub("", text)
    content = "\n".join(_toml_lines({"section": {"key": whole}}))
    assert tomllib.loads(content.encode().decode()) == {"section": {"key": whole}}


@settings(max_examples=30)
@given(value=hostile_texts.filter(str.isprintable) | st.integers() | st.sampled_from(["5", "true"]))
def test_a_parameter_of_a_probe_is_the_same_when_its_command_is_run_again(value: int | str) -> None:
    given = {"rate": value}
    spec = campaign(probe={"trainer": "mine", "parameters": given}).to_mapping()
    found = probe_command(spec, Layout())
    assert found is not None
    words = shlex.split(found.line)
    assert parameters_of([words[words.index("--parameter") + 1]]) == given
