"""A batch script names only a worker's token; commands find the service by the data directory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from search_spaces.connection.service_address import PRIVATE_VARIABLES
from tests.kit.services import ServeProcess, run_command
from tests.workers.slurm.requests import make_request
from workers.commands.commands import worker
from workers.errors import (
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    WorkerError,
)
from workers.slurm.commands import allocation
from workers.slurm.script import render
from workers.slurm.submission import warnings


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    process = ServeProcess(tmp_path_factory.mktemp("served") / "data")
    yield process
    process.end()


def write_token(file: Path, token: str = "lt_some") -> Path:
    file.write_text(token)
    file.chmod(0o600)
    return file


def token_of(serve: ServeProcess, role: str, file: Path) -> Path:
    made = serve.post("/tokens", {"name": f"{role}-{file.parent.name}", "role": role})
    return write_token(file, made["token"])


def submit(*options: str, **environment: str) -> Result:
    words = ["submit", "--cluster=frontier", "--account=ABC123", "--nodes=16", "--time=2:00:00"]
    return CliRunner().invoke(allocation, [*words, "--dry-run", *options], env=environment)


@pytest.mark.parametrize("option", ["--token-file", "--worker-token-file"])
def test_batch_scripts_get_no_admin_token(serve: ServeProcess, option: str, tmp_path: Path) -> None:
    admin = token_of(serve, "admin", tmp_path / "admin's token")
    refused = submit("--url", serve.service["url"], f"{option}={admin}")
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert f"{option}: {admin} holds the token of an admin" in refused.stderr


def test_the_command_in_a_refusal_makes_such_a_token(serve: ServeProcess, tmp_path: Path) -> None:
    admin = token_of(serve, "admin", tmp_path / "admin's token")
    url = serve.service["url"]
    refused = submit("--url", url, "--token-file", str(admin))
    program, *command = shlex.split(refused.stderr.partition("with `")[2].partition("`, and")[0])
    assert program == "layout-tuner"
    made = run_command(*command)
    assert made.returncode == 0, made.stderr
    given = shlex.split(refused.stderr.partition("and give it with ")[2])
    printed = submit("--url", url, *given)
    assert printed.exit_code == 0, printed.stderr
    assert f"token_file={shlex.quote(given[1])}" in printed.stdout


@pytest.mark.parametrize("role", ["viewer", "submitter"])
def test_only_a_workers_token_is_taken_here(serve: ServeProcess, role: str, tmp_path: Path) -> None:
    file = token_of(serve, role, tmp_path / "token")
    refused = submit("--url", serve.service["url"], "--token-file", str(file))
    assert refused.exit_code == 2
    assert f"holds the token of a {role}" in refused.stderr
    assert "an admin of the service makes one with `layout-tuner token create" in refused.stderr


def test_a_workers_token_is_taken_without_a_word(serve: ServeProcess, tmp_path: Path) -> None:
    file = token_of(serve, "worker", tmp_path / "token")
    printed = submit("--url", serve.service["url"], "--token-file", str(file))
    assert printed.exit_code == 0, printed.stderr
    assert "token" not in printed.stderr.replace(str(file), "")


def test_a_token_the_service_does_not_know_is_refused(serve: ServeProcess, tmp_path: Path) -> None:
    file = write_token(tmp_path / "token", "lt_of-another-service")
    refused = submit("--url", serve.service["url"], "--worker-token-file", str(file))
    assert refused.exit_code == 2
    assert "answered 401" in refused.stderr
    assert "lt_of-another-service" not in refused.output


def test_without_the_service_the_user_says_that_a_token_is_a_workers(tmp_path: Path) -> None:
    file = write_token(tmp_path / "token")
    refused = submit("--url=http://127.0.0.1:9", "--token-file", str(file))
    assert refused.exit_code == 2
    assert f"it is not known whether {file} holds a worker's token" in refused.stderr
    assert f"give it with --worker-token-file {file}" in refused.stderr
    printed = submit("--url=http://127.0.0.1:9", "--worker-token-file", str(file))
    assert printed.exit_code == 0
    assert f"whether {file} holds a worker's token was not checked" in printed.stderr


@pytest.mark.parametrize(
    ("error", "is_awaited"),
    [
        (ServiceUnreachableError("it does not answer"), True),
        (ServiceFailedError("it answered 500"), False),
        (RequestRefusedError("it answered 404"), False),
    ],
    ids=str,
)
def test_why_a_role_was_not_checked_is_said_once(error: WorkerError, is_awaited: bool) -> None:
    said = list(warnings(make_request(), error))
    assert len(said) == 2
    assert sum(str(error) in one for one in said) == 1
    assert any("the worker will wait" in one for one in said) == is_awaited


def test_submit_names_the_worker_token_of_the_data_directory(serve: ServeProcess) -> None:
    for where in ({"LAYOUT_TUNER_DATA_DIR": str(serve.data_dir)}, {}):
        options = [] if where else ["--data-dir", str(serve.data_dir)]
        printed = submit(*options, **where)
        assert printed.exit_code == 0, printed.stderr
        assert f"\ntoken_file={serve.data_dir / 'worker-token'}\n" in printed.stdout
        assert f"\nurl={serve.service['url']}\n" in printed.stdout


@pytest.mark.parametrize("words", [["show"], ["list"]])
def test_allocations_are_found_by_the_data_directory(
    serve: ServeProcess, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nothing")  # no Slurm
    body = {"host": "h", "num_nodes": 1, "devices_per_node": 2, "device": "CPU core"}
    serve.post("/workers", {**body, "name": "here-up", "cluster": "local-cpu"})
    variable = {"LAYOUT_TUNER_DATA_DIR": str(serve.data_dir)}
    by_variable = CliRunner().invoke(allocation, words, env=variable)
    assert by_variable.exit_code == 0, by_variable.output
    assert "here-up" in by_variable.stdout
    option = ["--data-dir", str(serve.data_dir), "--json"]
    by_option = CliRunner().invoke(allocation, [*words, *option], env={})
    assert json.loads(by_option.stdout)[0]["name"] == "here-up"


def test_a_named_data_directory_goes_before_the_environments_service(serve: ServeProcess) -> None:
    elsewhere = {
        "LAYOUT_TUNER_URL": "http://127.0.0.1:9",
        "LAYOUT_TUNER_TOKEN_FILE": "/none",
        "LAYOUT_TUNER_CERTIFICATE": "/none",
    }
    for command in (["allocation", "show"], ["campaign", "list"]):
        found = run_command(*command, "--data-dir", str(serve.data_dir), **elsewhere)
        assert found.returncode == 0, found.stderr
        lost = run_command(*command, **elsewhere)
        assert lost.returncode == 1


@pytest.mark.parametrize("command", [allocation, worker], ids=["allocation", "worker"])
def test_where_no_service_runs_a_sentence_says_so(command: object, tmp_path: Path) -> None:
    words = ["show"] if command is allocation else []
    refused = CliRunner().invoke(command, words, env={"LAYOUT_TUNER_DATA_DIR": str(tmp_path)})
    assert refused.exit_code == 1
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith(f"error: no service runs on the data directory {tmp_path}: start")


@pytest.mark.parametrize("token", ["worker-token", "token"])
def test_a_worker_finds_its_service_by_the_data_directory_and_warns_of_an_admins_token(
    serve: ServeProcess, tmp_path: Path, token: str
) -> None:
    options = ["--launcher=local", "--end-when-idle=0.1", f"--spool-dir={tmp_path}", "--name=found"]
    if token == "token":
        options += ["--token-file", str(serve.data_dir / token)]
    ended = run_command("worker", *options, LAYOUT_TUNER_DATA_DIR=str(serve.data_dir))
    assert ended.returncode == 0, ended.stderr
    assert f"at {serve.service['url']}\n" in ended.stderr
    assert "registered as found" in ended.stderr
    is_warned = "WARNING the token has the role admin" in ended.stderr
    assert is_warned is (token == "token")
    assert (serve.data_dir / token).read_text().strip() not in ended.stderr


def test_a_named_token_is_used_with_a_data_directory(serve: ServeProcess, tmp_path: Path) -> None:
    file = token_of(serve, "viewer", tmp_path / "token")
    who = run_command("whoami", "--data-dir", str(serve.data_dir), "--token-file", str(file))
    assert who.stdout.startswith("viewer-"), who.stderr


def test_neither_tokens_nor_passwords_of_the_shell_reach_a_job(tmp_path: Path) -> None:
    """By a script that somebody hands to sbatch, or by our own call of it."""
    private = dict.fromkeys(PRIVATE_VARIABLES, "private")
    script = render(make_request()).partition("# What follows is the same at every site.")[0]
    shown = subprocess.run(
        ["bash"], input=f"{script}\nenv", env=private, text=True, capture_output=True, check=True
    ).stdout
    assert "private" not in shown
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\necho 7\n")
    sbatch.chmod(0o755)
    file = write_token(tmp_path / "token")
    words = ["submit", "--cluster=frontier", "--account=ABC123", "--nodes=1", "--time=1:00:00"]
    options = ["--url=http://127.0.0.1:9", f"--worker-token-file={file}"]
    private["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    submitted = CliRunner().invoke(allocation, [*words, *options], env=private)
    assert submitted.stdout == "job 7 submitted: 1 node of frontier\n", submitted.output
    given = (tmp_path / "environment").read_text()
    assert "PATH=" in given
    assert not [line for line in given.splitlines() if line.endswith("=private")]
