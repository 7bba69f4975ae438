"""What a command line answers to a wrong file: a sentence that names it, and bad usage."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import main

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
