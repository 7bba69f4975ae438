"""A cluster's name that cannot be looked up at the service is one sentence, whatever the reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from search_spaces.spec.presets.clusters import resolve_cluster
from tuner.estimate.commands import estimate
from workers.command_line.command_input import described_cluster
from workers.commands.commands import probe

Answers = Mapping[str, tuple[int, Any]]

COMMANDS = [
    pytest.param(probe, ["--model=tiny"], id="probe"),
    pytest.param(estimate, ["--model=tiny"], id="estimate"),
]


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """A service that gives fixed answers; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, document = answers[self.path]
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def asked(command: click.Command, words: list[str], url: str, token_file: Path) -> Result:
    where = {"LAYOUT_TUNER_URL": url, "LAYOUT_TUNER_TOKEN_FILE": str(token_file)}
    return CliRunner().invoke(command, [*words, "--cluster=mine"], env=where)


def sentence_of(refused: Result) -> str:
    assert refused.exit_code == 2, refused.exception
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith("error: unknown cluster 'mine'")
    return sentence


@pytest.mark.parametrize(("command", "words"), COMMANDS)
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "holds no token (one word of ASCII)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_token_file_without_a_token_is_one_sentence(
    command: click.Command, words: list[str], content: bytes | None, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    said = sentence_of(asked(command, words, "http://127.0.0.1:9", file))
    assert f"no service was asked (the token file {file} {why}" in said


@pytest.mark.parametrize(("command", "words"), COMMANDS)
@pytest.mark.parametrize("listed", [(503, {}), (200, {}), (200, {"clusters": [7]})], ids=str)
def test_a_service_that_cannot_list_its_clusters_has_none_of_that_name_all_the_same(
    command: click.Command, words: list[str], listed: tuple[int, Any], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("lt_some")
    with answering({"/v1/clusters/mine": (404, {}), "/v1/clusters": listed}) as url:
        said = sentence_of(asked(command, words, url, file))
    assert f"the service at {url} has no cluster of that name either" in said


def test_a_similar_name_that_the_service_knows_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("lt_some")
    clusters = [{"name": "mine2", "preset": False}]
    listed = {"/v1/clusters/mine": (404, {}), "/v1/clusters": (200, {"clusters": clusters})}
    with answering(listed) as url:
        said = sentence_of(asked(probe, ["--model=tiny"], url, tmp_path / "token"))
    assert "did you mean" in said
    assert "mine2" in said


def test_no_line_of_shell_comes_from_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("lt_token")
    token_file.chmod(0o600)
    described = {**resolve_cluster("frontier")[0].to_mapping(), "name": "mine"}
    answers = {"/v1/clusters/mine": (200, {"description": {**described, "site": {"setup": ["x"]}}})}
    with answering(answers) as url:
        monkeypatch.setenv("LAYOUT_TUNER_URL", url)
        monkeypatch.setenv("LAYOUT_TUNER_TOKEN_FILE", str(token_file))
        assert described_cluster("mine") == described
