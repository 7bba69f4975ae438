"""`allocation` and `worker` beside a real service, without one, and where there is no Slurm.

Nodes of a worker are played by hand. A batch script names only a worker's token; commands find the
service by the data directory.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layout_tuner.cli.processes.allocation import allocation
from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
from layout_tuner.workers.errors import (
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    WorkerError,
)
from layout_tuner.workers.slurm.batch_script import render
from layout_tuner.workers.slurm.submission import warnings
from tests.kit.api import ends
from tests.kit.services import ServeProcess, run_command, run_here
from tests.workers.slurm.requests import make_request


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    process = ServeProcess(tmp_path_factory.mktemp("served") / "data")
    for cluster in ("ours", "theirs"):
        _register(process, cluster)
    yield process
    process.end()


def _register(process: ServeProcess, cluster: str) -> None:
    names = ["n1", f"{cluster}-2"]
    body = {
        "name": f"{cluster}-4711",
        "host": "n1",
        "cluster": cluster,
        "num_nodes": 2,
        "devices_per_node": 8,
        "device": "AMD MI250X GCD",
        "allocation": {"scheduler": "slurm", "job_id": "4711", "launcher": "ray", "ends_in_s": 4e3},
        "nodes": [{"name": name, "num_devices": 8} for name in names],
    }
    worker = process.post("/workers", body)["worker_id"]
    states: list[dict[str, Any]] = [
        {"name": "n1", "state": "busy", "doing": "trial 3", "free_devices": 6},
        {"name": f"{cluster}-2", "state": "lost", "reason": "its agent ended", "free_devices": 0},
    ]
    process.post(f"/workers/{worker}/heartbeats", {"trials": [], "status": {"nodes": states}})


def call(process: ServeProcess, *arguments: str) -> Result:
    return CliRunner().invoke(allocation, [*arguments, "--data-dir", str(process.data_dir)])


def write_token(file: Path, token: str = "lt_some") -> Path:
    file.write_text(token)
    file.chmod(0o600)
    return file


def token_of(serve: ServeProcess, role: str, file: Path) -> Path:
    made = serve.post("/tokens", {"name": f"{role}-{file.parent.name}", "role": role})
    return write_token(file, made["token"])


WORDS = ["submit", "--cluster=frontier", "--account=ABC123", "--nodes=16", "--time=2:00:00"]
NOWHERE = "--url=http://127.0.0.1:9"


def submit(*options: str, **environment: str) -> Result:
    return CliRunner().invoke(allocation, [*WORDS, "--dry-run", *options], env=environment)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return write_token(tmp_path / "token")


def submit_with(token: Path, *options: str) -> Result:
    """As `submit`, with a worker's token of a service that is not there."""
    return submit(NOWHERE, f"--worker-token-file={token}", *options)


def test_show_tells_of_each_node_and_of_the_time_that_is_left(serve: ServeProcess) -> None:
    shown = call(serve, "show", "ours-4711").stdout
    described = "job 4711, 2 nodes of 8 devices of ours, launcher ray"
    assert f"ours-4711 ({described}): working, 1 h 06" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["n1", "busy", "6/8", "trial", "3"] in lines
    assert ["ours-2", "lost", "0/8", "its", "agent", "ended"] in lines
    assert "node-hours: 0 " in shown
    assert "theirs" not in shown


def test_show_shows_all_allocations_or_that_of_a_name_or_job(serve: ServeProcess) -> None:
    shown = call(serve, "show").stdout
    assert "ours-4711" in shown
    assert "theirs-4711" in shown
    documents = json.loads(call(serve, "show", "--json").stdout)
    assert {document["cluster"] for document in documents} == {"ours", "theirs"}
    assert json.loads(call(serve, "show", "ours-4711", "--json").stdout)["job_id"] == "4711"
    assert "4711" in call(serve, "show", "4711").stdout
    ends(call(serve, "show", "4712"), 1, "knows no allocation '4712'")


def test_a_node_is_set_aside_and_released_by_name_and_cluster(serve: ServeProcess) -> None:
    ends(call(serve, "quarantine", "ours-2", "--reason", "slow link"), 0)
    nodes = {node["name"]: node for node in serve.get("/nodes?cluster=ours")["nodes"]}
    assert nodes["ours-2"]["quarantine"]["reason"] == "slow link"
    session = nodes["ours-2"]["allocation"]
    (worker,) = (each for each in serve.get("/allocations")["allocations"] if each["id"] == session)
    states = [{"name": node["name"], "state": node["state"]} for node in worker["nodes"]]
    states[1] |= {"state": "quarantined", "reason": "slow link"}
    serve.post(f"/workers/{session}/heartbeats", {"trials": [], "status": {"nodes": states}})
    by = nodes["ours-2"]["quarantine"]["reported_by"]
    assert f"slow link (set aside by {by})" in call(serve, "show", "ours-4711").stdout
    ends(call(serve, "release", "ours-2"), 0)
    ends(call(serve, "release", "ours-2"), 1, "not in quarantine")
    ambiguous = "ours and theirs each have a node 'n1': say which with --cluster"
    ends(call(serve, "quarantine", "n1"), 1, ambiguous)
    ends(call(serve, "quarantine", "n1", "--cluster", "theirs"), 0)
    ends(call(serve, "release", "n1", "--cluster", "theirs"), 0)
    ends(call(serve, "release", "n9"), 1, "knows no node 'n9'")


def test_a_service_away_or_refusing_is_one_sentence(serve: ServeProcess, tmp_path: Path) -> None:
    token = write_token(tmp_path / "token", "wrong")
    for url, token_file, says in (
        (serve.url, token, "check the token file"),
        ("http://127.0.0.1:9", token, "does not answer"),
        (serve.url, Path("/none"), "/none"),
    ):
        words = ["show", "--url", url, "--token-file", str(token_file)]
        refused = CliRunner().invoke(allocation, words)
        assert refused.exit_code != 0
        (sentence,) = refused.output.splitlines()
        assert says in sentence


@pytest.mark.parametrize(
    ("option", "role", "says"),
    [
        ("--token-file", "admin", "holds the token of an admin"),
        ("--worker-token-file", "admin", "holds the token of an admin"),
        ("--token-file", "viewer", "holds the token of a viewer"),
        ("--worker-token-file", "of another service", "answered 401"),
    ],
)
def test_a_batch_script_is_not_given_another_token_than_a_workers(
    serve: ServeProcess, option: str, role: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "some token"
    if says == "answered 401":
        write_token(file, "lt_of-another-service")
    else:
        token_of(serve, role, file)
    who = "make one" if role == "admin" else "an admin of the service makes one"
    who += " with `layout-tuner token create"
    refused = ends(submit("--url", serve.url, f"{option}={file}"), 2, says, f"{option}: ", who)
    assert refused.stdout == ""
    assert file.read_text() not in refused.output


def test_the_command_in_a_refusal_makes_a_valid_token(serve: ServeProcess, tmp_path: Path) -> None:
    admin = token_of(serve, "admin", tmp_path / "admin's token")
    refused = submit("--url", serve.url, "--token-file", str(admin))
    program, *command = shlex.split(refused.stderr.partition("with `")[2].partition("`, and")[0])
    assert program == "layout-tuner"
    ends(run_here(*command), 0)
    named, file = shlex.split(refused.stderr.partition("and give it with ")[2])
    for option in (named, "--token-file"):
        printed = submit("--url", serve.url, option, file)
        ends(printed, 0, f"token_file={shlex.quote(file)}")
        assert "token" not in printed.stderr.replace(file, "")


def test_without_the_service_the_user_says_that_a_token_is_a_workers(token: Path) -> None:
    unknown = f"it is not known whether {token} holds a worker's token"
    named = f"give it with --worker-token-file {token}"
    ends(submit(NOWHERE, "--token-file", str(token)), 2, unknown, named)
    unchecked = f"whether {token} holds a worker's token was not checked"
    assert unchecked in ends(submit_with(token), 0).stderr


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
        token = f"\ntoken_file={serve.data_dir / 'worker-token'}\n"
        ends(submit(*options, **where), 0, token, f"\nurl={serve.url}\n")


@pytest.mark.parametrize("words", [["allocation", "show"], ["campaign", "list"]], ids=" ".join)
def test_a_data_directory_goes_before_the_environment(
    serve: ServeProcess, words: list[str]
) -> None:
    elsewhere = {
        "LAYOUT_TUNER_URL": "http://127.0.0.1:9",
        "LAYOUT_TUNER_TOKEN_FILE": "/none",
        "LAYOUT_TUNER_CERTIFICATE": "/none",
    }
    ends(run_here(*words, "--data-dir", str(serve.data_dir), **elsewhere), 0)
    ends(run_here(*words, LAYOUT_TUNER_DATA_DIR=str(serve.data_dir)), 0)
    ends(run_here(*words, **elsewhere), 1)


def test_allocations_of_the_data_directory_are_listed_where_there_is_no_slurm(
    serve: ServeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    listed = call(serve, "list", "--json")
    assert {each["name"] for each in json.loads(listed.stdout)} == {"ours-4711", "theirs-4711"}


@pytest.mark.parametrize("words", [["allocation", "show"], ["worker"]], ids=" ".join)
def test_where_no_service_runs_a_sentence_says_so(words: list[str], tmp_path: Path) -> None:
    refused = ends(run_here(*words, LAYOUT_TUNER_DATA_DIR=str(tmp_path)), 1)
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith(f"Error: no service runs on the data directory {tmp_path}: start")


def test_a_named_token_is_used_with_a_data_directory(serve: ServeProcess, tmp_path: Path) -> None:
    file = token_of(serve, "viewer", tmp_path / "token")
    who = run_here("whoami", "--data-dir", str(serve.data_dir), "--token-file", str(file))
    assert who.stdout.startswith("viewer-"), who.stderr


def test_a_worker_finds_the_service_of_a_data_directory(
    serve: ServeProcess, tmp_path: Path
) -> None:
    words = ["worker", "--launcher=local", "--end-when-idle=0.1", f"--spool-dir={tmp_path}"]
    words += ["--name=found", "--data-dir", str(serve.data_dir)]
    admins = serve.data_dir / "token"
    ended = run_command(*words, f"--token-file={admins}")
    assert ended.returncode == 0, ended.stderr
    assert f"at {serve.url}\n" in ended.stderr
    assert "registered as found" in ended.stderr
    assert "WARNING the token has the role admin" in ended.stderr
    assert admins.read_text().strip() not in ended.stderr
    # Without a name it is the worker's token: one that is wrong is refused.
    (serve.data_dir / "worker-token").write_text("lt_wrong")
    refused = ends(run_here(*words), 1)
    (sentence,) = refused.stderr.splitlines()
    assert sentence.startswith(f"Error: the service at {serve.url} answered 401: ")
    assert sentence.endswith("; check the token file")


def test_neither_tokens_nor_passwords_of_the_shell_reach_a_job(token: Path, tmp_path: Path) -> None:
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
    options = [NOWHERE, f"--worker-token-file={token}", "--nodes=1"]
    private["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    submitted = CliRunner().invoke(allocation, [*WORDS, *options], env=private)
    assert submitted.stdout == "job 7 submitted: 1 node of frontier\n", submitted.output
    given = (tmp_path / "environment").read_text()
    assert "PATH=" in given
    assert not [line for line in given.splitlines() if line.endswith("=private")]


def test_a_dry_run_prints_the_script_and_warns_of_what_cannot_be_known_here(token: Path) -> None:
    printed = submit_with(token, "--end-when-idle=5m", "--setup=echo $HOME")
    ends(printed, 0, "--end-when-idle=300", "\necho $HOME\n")
    assert printed.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=layout-tuner\n")
    assert "lt_some" not in printed.stdout
    assert "is the node itself: give an address" in printed.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--time=3:00:00"], "--time: 03:00:00 is more than 02:00:00"),
        (["--time=120"], "--time: '120' is not a time"),
        (["--nodes=10000"], "--nodes: 10000 is more than 9856"),
        (["--launcher=mpirun"], "--launcher: 'mpirun' is unknown"),
        (["--end-when-idle=soon"], "--end-when-idle: 'soon' is not a duration"),
        (["--environment=/none"], "--environment: /none is neither a directory nor a file"),
        (["--setup=echo '"], "--setup: bash can't read the script"),
    ],
)
def test_what_is_wrong_is_said_before_a_submit(token: Path, options: list[str], says: str) -> None:
    ends(submit_with(token, *options), 2, says)


def test_a_missing_interpreter_and_a_file_of_no_yaml_are_refused(
    token: Path, tmp_path: Path
) -> None:
    missing = f"{tmp_path}/bin/python is not there"
    ends(submit_with(token, f"--environment={tmp_path}"), 2, missing)
    (tmp_path / "ours.yaml").write_text("name: ours\nsite: [\n")
    (sentence,) = submit_with(token, f"--cluster={tmp_path}/ours.yaml").stderr.splitlines()
    assert sentence.startswith(f"Error: {tmp_path}/ours.yaml: malformed YAML at line 3")


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("secret", 0o640, "{token} is open to others (mode 640): chmod 600"),
        ("", 0o600, "holds no token"),
        ("sécret", 0o600, "holds no token"),
        (None, 0, "{token} can't be read"),
    ],
)
def test_a_file_of_no_token_or_that_others_can_read_is_refused(
    token: Path, content: str | None, mode: int, says: str
) -> None:
    if content is None:
        token.unlink()
    else:
        token.write_text(content)
        token.chmod(mode)
    ends(submit_with(token), 2, "--token-file: ", says.format(token=token))


@pytest.mark.parametrize("words", [["list"], ["cancel", "7"]])
def test_a_host_without_slurm_says_so(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    (sentence,) = ends(CliRunner().invoke(allocation, words), 1).stderr.splitlines()
    assert sentence.startswith("Error: there is no Slurm here (squeue is not installed)")


def test_submitting_without_slurm_says_what_to_do(
    token: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    options = [NOWHERE, f"--worker-token-file={token}"]
    refused = CliRunner().invoke(allocation, [*WORDS, *options])
    ends(refused, 1, "use --dry-run and hand the script to sbatch there")
