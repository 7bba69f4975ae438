"""A mistake in a file has the same words and exit code, whichever command reads the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from tests.kit.api import CAMPAIGN, Api, Command
from tests.kit.odd_values import nested
from tests.search_spaces.tables.tables import make_row, make_text


@pytest.fixture(scope="module")
def api(lasting: TestClient) -> Api:
    return Api(lasting)


@pytest.fixture(autouse=True)
def no_other_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYOUT_TUNER_DATA_DIR", str(tmp_path / "none"))
    for name in ("LAYOUT_TUNER_URL", "LAYOUT_TUNER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def of_yaml(**changes: Any) -> bytes:
    return yaml.safe_dump({**CAMPAIGN, **changes}, sort_keys=False).encode()


def appended(text: str) -> bytes:
    return of_yaml() + text.encode()


OF_SYNTAX: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "a comment alone": b"# nothing\n",
    "no YAML": b"a: [1",
    "a tab": b"a:\n\t- 1\n",
    "no UTF-8": b"a: \xff\xfe\n",
    "a list": b"[1, 2]",
    "a word": b"frontier",
    "a key twice": b"name: a\nname: b\n",
    "an alias": b"a: &x [1]\nb: *x\n",
    "a tag": b"a: !!int ''\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "too deep": b"a: " + nested(101).encode(),
    "a number that no field accepts": b"a: .inf\n",
    "a text of two lines": b'name: "a\\nb"\n',
}
"""Mistakes that no document may have."""

OF_CAMPAIGN: dict[str, bytes] = {
    "an unknown field": of_yaml(objectives="tokens_per_s"),
    "a wrong type": of_yaml(budget=[3]),
    "a number as nobody writes it": of_yaml(budget={"trials": "1_0"}),
    "the same number without quotes": of_yaml(budget=None).replace(b"null", b"{trials: 1_0}"),
    "an unknown model": of_yaml(model="gpt-23b"),
    "an unknown field of the model": of_yaml(model={"preset": "tiny", "layers": 2}),
    "an unknown cluster": of_yaml(cluster="frontire"),
    "an unknown field of the cluster": of_yaml(cluster={"preset": "frontier", "colour": "red"}),
    "an unknown knob": of_yaml(space={**CAMPAIGN["space"], "offload": 1}),
    "a wrong name": of_yaml(name="a b"),
    "a missing space": of_yaml(space=None),
    "no budget": of_yaml(budget={}),
    "no legal layout": of_yaml(space={"global_batch_size": 8, "tp": 3}),
    "a model that is too large": of_yaml(model="gpt-22b", space={"global_batch_size": 8}),
    "an illegal baseline": of_yaml(baseline={"tp": 3}),
    "several at once": of_yaml(model="gpt-9", budget={"trials": 0}, colour="red", seed=-1),
}

WITH_A_CAMPAIGN = (
    "plan FILE",
    "export --plan FILE --format embedded",
    "export --plan FILE --format megatron-lm --software layout-tuner",
    "campaign submit FILE --dry-run",
    "campaign submit FILE",
)
KEY = "n1-tp1-pp1-dp1-vpp1-mbs1-mb4-z0-rc_none-sp0-fp32"
WITH_A_CLUSTER = (
    "estimate --model tiny --num-microbatches 4 --cluster FILE",
    "plan GOOD --cluster FILE",
    "export --plan GOOD --format embedded --cluster FILE",
    f"export --model tiny --layout {KEY} --format embedded --cluster FILE",
    "campaign submit GOOD --dry-run --cluster FILE",
    "probe --model tiny --num-microbatches 1 --cluster FILE",
    "calibrate --show --cluster FILE",
    "cluster put mine FILE",
)
WITH_A_MODEL = (
    "estimate --num-microbatches 4 --model FILE",
    f"export --cluster frontier --layout {KEY} --format embedded --model FILE",
    "probe --num-microbatches 1 --model FILE",
    "calibrate --show --model FILE",
    "model put mine FILE",
)
WITH_A_TABLE = (
    "replay FILE --strategy random",
    "estimate --table FILE",
    "estimate --model tiny --num-microbatches 4 --calibrate-from FILE",
    "plan GOOD --calibrate-from FILE",
    "export --plan GOOD --format embedded --calibrate-from FILE",
    "replay TABLE --strategy random --calibrate-from FILE",
)


def said(command: Command, words: str, file: Path | str) -> list[str]:
    """What a command says of a wrong file, or a wrong name in the place of one.

    The service looks at models and clusters first, so the order of several problems may differ.
    """
    folder = Path(file).parent if isinstance(file, Path) else Path(str(file))
    places = {
        "FILE": str(file),
        "GOOD": str(folder / "good.yaml"),
        "TABLE": str(folder / "good.csv"),
    }
    refused = command(*(places.get(word, word) for word in words.split()))
    assert isinstance(refused.exception, SystemExit), refused.exception
    assert (refused.exit_code, refused.stdout) == (2, ""), refused.output
    lines = refused.stderr.splitlines()
    assert lines
    assert all(line.startswith("Error: ") for line in lines), refused.stderr
    return sorted(line.removeprefix("Error: ") for line in lines)


def all_say_the_same(command: Command, commands: tuple[str, ...], file: Path) -> list[str]:
    first, *others = commands
    expected = said(command, first, file)
    for words in others:
        assert said(command, words, file) == expected, words
    return expected


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the wrong file is to be; right ones lie beside it."""
    (tmp_path / "good.yaml").write_bytes(of_yaml(name="never"))
    (tmp_path / "good.csv").write_text(make_text(make_row()))
    return tmp_path / "wrong.yaml"


@pytest.mark.parametrize("mistake", OF_SYNTAX)
def test_a_file_that_is_no_document(command: Command, file: Path, mistake: str) -> None:
    content = OF_SYNTAX[mistake]
    if content is not None:
        file.write_bytes(content)
    (line,) = all_say_the_same(command, WITH_A_CAMPAIGN, file)
    is_syntax = mistake not in ("a list", "a word")
    assert line.startswith(f"{file}: ") == is_syntax
    for commands in (WITH_A_CLUSTER, WITH_A_MODEL) if is_syntax else ():
        assert all_say_the_same(command, commands, file) == [line]


@pytest.mark.parametrize("mistake", OF_CAMPAIGN)
def test_a_campaign_that_is_wrong(command: Command, file: Path, mistake: str) -> None:
    file.write_bytes(OF_CAMPAIGN[mistake])
    if mistake != "an unknown cluster":
        lines = all_say_the_same(command, WITH_A_CAMPAIGN, file)
        assert len(lines) == {"several at once": 4, "an illegal baseline": 3}.get(mistake, 1)
        return
    # Each says where it has searched.
    starts = {said(command, words, file)[0].partition(";")[0] for words in WITH_A_CAMPAIGN}
    assert len({start.removeprefix("cluster: ") for start in starts}) == 1
    assert "unknown cluster 'frontire' (did you mean 'frontier'?)" in starts.pop()


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_repeated_field_of_json(command: Command, file: Path, suffix: str) -> None:
    text = json.dumps({**CAMPAIGN, "name": "never"})
    file = file.with_suffix(suffix)
    file.write_text(text.replace("{", '{"name": "x", ', 1))
    (line,) = all_say_the_same(command, WITH_A_CAMPAIGN, file)
    assert "name' is there twice" in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty; a measurement table begins with a header of columns"),
        (b"a,b\n1,2\n", "are missing from the header"),
        (b"\xff\xfe\n", "line 1 is not UTF-8"),
        (make_text(make_row(tp=4)).encode(), "row 1 (line 2): tp*pp*dp=4*2*2=16"),
        (make_text(make_row(step_time_s="1_0")).encode(), "row 1 (line 2): step_time_s"),
    ],
)
def test_a_table_that_is_wrong(
    command: Command, file: Path, content: bytes | None, says: str
) -> None:
    file = file.with_suffix(".csv")
    if content is not None:
        file.write_bytes(content)
    (line,) = all_say_the_same(command, WITH_A_TABLE, file)
    assert line.startswith(f"{file}: ")
    assert says in line


def test_an_unknown_name_of_a_cluster_and_of_a_model(command: Command, tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_bytes(of_yaml(name="never"))
    for words in WITH_A_CLUSTER[:4]:
        (line,) = said(command, words.replace("GOOD", str(good)), "frontire")
        assert line.startswith("unknown cluster 'frontire' (did you mean 'frontier'?)"), words
    estimated = said(command, WITH_A_MODEL[0], "gpt-23b")
    assert estimated == said(command, WITH_A_MODEL[2], "gpt-23b")
    assert estimated[0].startswith("unknown model 'gpt-23b'")


def test_an_unknown_scenario_ends_like_an_unknown_name(command: Command) -> None:
    (line,) = said(command, "scenario FILE", "h100")
    assert line.startswith("unknown scenario 'h100' (did you mean 'h100-8b'?); choose from ")
