"""A cluster's name that cannot be looked up at the service is one sentence, whatever the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from search_spaces.spec.presets.clusters import resolve_cluster
from tests.kit.fake_service import TOKEN, FakeService
from tuner.estimate.commands import estimate
from workers.command_line.command_input import described_cluster
from workers.commands.commands import probe

MISSING = {"v1/clusters/mine": (404, {})}


def answer_with(service: FakeService, answers: dict[str, tuple[int, Any]]) -> None:
    service.answer = lambda _method, path, _body: answers["/".join(path)]  # type: ignore[method-assign]


def sentence_of(url: str, token_file: Path, command: click.Command = probe) -> str:
    where = {"LAYOUT_TUNER_URL": url, "LAYOUT_TUNER_TOKEN_FILE": str(token_file)}
    refused = CliRunner().invoke(command, ["--model=tiny", "--cluster=mine"], env=where)
    assert refused.exit_code == 2, refused.exception
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith("error: unknown cluster 'mine'")
    return sentence


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (file := tmp_path / "token").write_text(TOKEN)
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("command", [probe, estimate])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff\xfe", "holds no token (one word of ASCII)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_token_file_without_a_token_is_one_sentence(
    command: click.Command, content: bytes | None, why: str, token_file: Path
) -> None:
    if content is None:
        token_file.unlink()
    else:
        token_file.write_bytes(content)
    said = sentence_of("http://127.0.0.1:9", token_file, command)
    assert f"no service was asked (the token file {token_file} {why}" in said


@pytest.mark.parametrize("listed", [(503, {}), (200, {}), (200, {"clusters": [7]})], ids=str)
def test_a_service_that_cannot_list_its_clusters_has_none_of_that_name_all_the_same(
    listed: tuple[int, Any], service: FakeService, token_file: Path
) -> None:
    answer_with(service, {**MISSING, "v1/clusters": listed})
    said = sentence_of(service.url, token_file)
    assert f"the service at {service.url} has no cluster of that name either" in said


def test_no_line_of_shell_comes_from_a_service(
    service: FakeService, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {**resolve_cluster("frontier")[0].to_mapping(), "name": "mine"}
    told = {"description": {**described, "site": {"setup": ["x"]}}}
    answer_with(service, {"v1/clusters/mine": (200, told)})
    monkeypatch.setenv("LAYOUT_TUNER_URL", service.url)
    monkeypatch.setenv("LAYOUT_TUNER_TOKEN_FILE", str(token_file))
    assert described_cluster("mine") == described
