"""What commands refuse, in a sentence: what was written wrong ends with 2, all else with 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

from layout_tuner.cli.main import main
from tests.kit.api import Api, Command, refused_line

HERE = str(Path(__file__).parent)
BAD_USAGE: list[tuple[str, str]] = [
    ("campaign list --created-after yesterday", "'yesterday' is not a time"),
    ("campaign list --limit 1_0", "1_0"),
    ("campaign update first", "nothing is to be changed"),
    ("campaign update first --trials 3 --no-trials", "exclude each other"),
    (f"campaign update first --notes x --notes-file {__file__}", "exclude each other"),
    ("campaign clone first --set strategy", "write it as FIELD=VALUE"),
    ("campaign clone first --set seed.deep=3", "set the whole field"),
    ("campaign clone first --set seed=[1", "malformed YAML"),
    ("campaign clone first --set budget=5 --trials 3", "budget.trials=40"),
    (f"model put mine {__file__}", "malformed YAML"),
    ("leaderboard first --limit 5_0", "5_0"),
    ("leaderboard first --where tpp=2", "did you mean 'tp'?"),
    ("leaderboard first --csv --json", "exclude each other"),
    (f"leaderboard first --parquet {HERE}", "is a directory"),
    ("plan first --top \u0665", "\u0665"),
    ("trial list first --where tp=1_0", "1_0"),
    ("trial list first --where step_time_s<1_0.5", "is not NAME=VALUE"),
    ("trial show first/9999999999", "neither the id of a trial nor"),
    (f"trial show first/{'9' * 5000}", "neither the id of a trial nor"),
    ("trial show 9999999999", "neither the id of a trial nor"),
    ("export", "CAMPAIGN is missing; --list shows the formats"),
    ("export first", "--format is missing; --list shows the formats"),
    ("export --format embedded", "CAMPAIGN is missing; --list shows the formats"),
    ("token create x --role root", "Invalid value for '--role'"),
    ("token create x --role viewer --expires-in soon", "not a duration"),
    (f"token create {'n' * 65} --role viewer", "the name of a token"),
    ("audit --within ever", "ever"),
    ("dance", "dance"),
    ("campaign clone first --set colour=red", "colour"),
    ("token create local --role viewer", "choose another"),
]
REFUSED: list[tuple[str, str]] = [
    ("campaign show nobody", "nobody"),
    ("report nobody", "nobody"),
    ("trial show first/9", "no trial number 9"),
    ("trial show 9", "9"),
    ("model delete tiny", "is a preset"),
]


@pytest.fixture(scope="module")
def api(lasting: TestClient) -> Api:
    api = Api(lasting)
    api.submit()
    return api


@pytest.mark.parametrize(("words", "says"), BAD_USAGE, ids=lambda value: value[:40])
def test_bad_usage_is_refused_in_a_sentence(command: Command, words: str, says: str) -> None:
    refused = command(*words.split())
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert says in refused.stderr


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_the_service_refuses_is_one_line(command: Command, words: str, says: str) -> None:
    line = refused_line(command(*words.split()))
    assert line.startswith("Error: ")
    assert says in line


COMMANDS = {
    "campaign submit": ["campaign", "submit", "FILE", "--url", "http://127.0.0.1:9"],
    "model put": ["model", "put", "mine", "FILE", "--url", "http://127.0.0.1:9"],
    "cluster put": ["cluster", "put", "mine", "FILE", "--url", "http://127.0.0.1:9"],
    "train": ["train", "--config", "FILE"],
    "probe": ["probe", "--model", "FILE"],
    "worker": ["worker", "--cluster", "FILE", "--url", "http://127.0.0.1:9"],
    "estimate": ["estimate", "--model", "FILE", "--num-microbatches", "4"],
    "plan": ["plan", "FILE"],
}
FILES = {
    "empty": (b"", "empty"),
    "binary": (b"\x00\xff\xfe\x9c\n\x80", ""),
    "half": (b"[1, 2", "line 1"),
    "directory": (None, "directory"),
    "missing": (None, ""),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_file_is_one_sentence_that_names_it(
    command: str, kind: str, tmp_path: Path
) -> None:
    content, says = FILES[kind]
    file = tmp_path / "wrong.json"
    if content is not None:
        file.write_bytes(content)
    elif kind == "directory":
        file.mkdir()
    (tmp_path / "token").write_text("lt_some")
    where = ["--token-file", str(tmp_path / "token")] if "--url" in COMMANDS[command] else []
    words = [str(file) if word == "FILE" else word for word in COMMANDS[command]]
    refused = CliRunner(env={"RANK": None}).invoke(main, [*words, *where])
    assert isinstance(refused.exception, SystemExit), refused.exception
    assert refused.exit_code == 2, refused.output
    (sentence,) = [line for line in refused.stderr.splitlines() if line.lower().startswith("error")]
    assert str(file) in sentence
    assert says in sentence
    for raw in ("Errno", "<unicode string>", "codec", "None"):
        assert raw not in sentence
