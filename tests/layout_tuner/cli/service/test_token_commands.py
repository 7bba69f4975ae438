"""`layout-tuner token`, `whoami`, `audit` and `login`, against a real service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from layout_tuner.cli.service.login import sign_in_url
from tests.kit.api import Command, ends
from tests.kit.persons import Person
from tests.kit.python_process import printed_by
from tests.kit.services import ServeProcess


def test_a_token_is_printed_alone_or_goes_to_a_new_file_of_its_owners_alone(
    service: ServeProcess, run: Command, tmp_path: Path
) -> None:
    made = ends(run("token", "create", "physics", "--role", "submitter", "--expires-in", "90d"), 0)
    (printed,) = made.stdout.splitlines()
    assert made.stderr.startswith("token ")
    assert "of physics: submitter until 20" in made.stderr
    file = tmp_path / "token"
    file.write_text(printed)
    options = ["--url", service.service["url"], "--token-file", str(file)]
    who = run("whoami", *options)
    assert who.stdout.startswith("physics: submitter until 20")
    why = "'physics' has the role submitter, and list_tokens takes admin"
    ends(run("token", "list", *options), 1, why)

    out = tmp_path / "worker-token"
    made = ends(run("token", "create", "frontier", "--role", "worker", "--out", str(out)), 0)
    assert made.stdout == ""
    assert f"it is in {out}" in made.stderr
    assert out.stat().st_mode & 0o777 == 0o600
    assert out.read_text().strip() not in made.output
    another = ("token", "create", "another", "--role", "worker", "--out")
    ends(run(*another, out), 2, f"{out} exists")
    ends(run(*another, "/none/x"), 2)
    assert "another" not in run("token", "list", "--json").stdout


def test_tokens_are_listed_and_revoked_by_name_or_id(run: Command) -> None:
    run("token", "create", "ci", "--role", "viewer")
    tokens = json.loads(run("token", "list", "--json").stdout)["tokens"]
    (listed,) = [each for each in tokens if each["name"] == "ci"]
    assert listed["is_valid"]
    assert "token" not in listed
    shown = run("token", "list").stdout
    assert "ci" in shown
    assert "valid" in shown
    revoked = run("token", "revoke", "ci")
    assert revoked.stdout == f"token {listed['id']} of ci is revoked\n"
    assert run("token", "revoke", str(listed["id"])).exit_code == 0  # twice is once
    ends(run("token", "revoke", "ci"), 1, "there is no token named 'ci' that is not revoked")
    assert "revoked 20" in run("token", "list", "--all").stdout


def test_the_audit_is_filtered_by_what_was_changed_when_and_by_whom(run: Command) -> None:
    run("token", "create", "chemistry", "--role", "viewer")
    within = run("audit", "--of", "chemistry", "--within", "1h")
    ends(within, 0, "token.create", "role=viewer", "127.0.0.1")
    (entry,) = json.loads(run("audit", "--of", "chemistry", "--json").stdout)
    assert (entry["actor"], entry["action"]) == ("local", "token.create")
    assert json.loads(run("audit", "--by", "nobody", "--json").stdout) == []


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks lives five hours and three quarters ahead of UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "THERE-5:45")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_east")
def test_times_are_printed_in_utc_and_say_so(run: Command) -> None:
    made = run("token", "create", "dated", "--role", "viewer", "--expires-in", "7d", "--json")
    until, since = (
        f"{datetime.fromisoformat(json.loads(made.stdout)[name]):%Y-%m-%d %H:%M:%S} UTC"
        for name in ("expires_at", "created_at")
    )
    (row,) = [line for line in run("token", "list").stdout.splitlines() if " dated " in line]
    assert f"until {until}" in row
    assert since in row
    assert since in run("audit", "--of", "dated").stdout


def test_the_token_of_this_machine_is_sent_to_any_of_its_addresses_and_to_no_other(
    run: Command,
) -> None:
    elsewhere = run("whoami", "--url", "https://service.invalid:8080")
    ends(elsewhere, 1, "is on another machine", "--token-file")
    for host in ("localhost", "[::1]"):
        ends(run("whoami", "--url", f"http://{host}:9"), 1, "is it running?")


def sign_in(service: ServeProcess, address: str) -> httpx.Response:
    url = service.service["url"]
    assert address.startswith(f"{url}/sign-in#code=")
    person = Person(url)
    answer = person.sign_in_with_code(address.rpartition("=")[2])
    if answer.is_success:
        answer = person.http.get("/v1/whoami", headers=person.own)
    person.http.close()
    return answer


def test_the_address_of_a_sign_in_is_printed_alone_and_of_the_named_token(
    service: ServeProcess, run: Command, tmp_path: Path
) -> None:
    done = ends(run("login"), 0)
    (address,) = done.stdout.splitlines()
    assert done.stderr.startswith("until 20")
    secret = (service.data_dir / "token").read_text().strip()
    assert secret not in done.output
    assert sign_in(service, address).json()["name"] == "local"
    assert sign_in(service, address).status_code == 401

    for role in ("viewer", "worker"):
        ends(run("token", "create", f"a-{role}", "--role", role, "--out", tmp_path / role), 0)
    address = run("login", "--token-file", tmp_path / "viewer").stdout.strip()
    assert sign_in(service, address).json()["role"] == "viewer"
    ends(run("login", "--token-file", tmp_path / "worker"), 1, "'a-worker' has the role worker")

    url = sign_in_url("https://hub.example/tuner/", "c")
    assert url == "https://hub.example/tuner/sign-in#code=c"


def test_the_code_is_not_among_the_arguments_of_the_browser(
    service: ServeProcess, run: Command, tmp_path: Path
) -> None:
    """All users of a machine can read arguments of processes."""
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    browser.chmod(0o700)
    where = {"LAYOUT_TUNER_DATA_DIR": str(service.data_dir), "BROWSER": f"{browser} %s"}
    program = "from layout_tuner.cli.service.login import login; login()"
    (address,) = printed_by(program, "--open", **where).splitlines()
    code = address.rpartition("=")[2]
    opened = seen.read_text().strip()
    assert opened.startswith("file://")
    assert code not in opened
    file = Path(opened.removeprefix("file://"))
    assert file.stat().st_mode & 0o777 == 0o600
    assert address in file.read_text()
    assert sign_in(service, address).status_code == 200
