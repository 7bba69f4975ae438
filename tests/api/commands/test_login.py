"""`layout-tuner login`, against a real service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
from click.testing import CliRunner

from api.commands.login import sign_in_url
from api.commands.token import token
from tests.kit.api import Command
from tests.kit.persons import Person
from tests.kit.services import ServeProcess


def sign_in(service: ServeProcess, address: str) -> httpx.Response:
    url = service.service["url"]
    assert address.startswith(f"{url}/sign-in#code=")
    person = Person(url)
    answer = person.sign_in_with_code(address.rpartition("=")[2])
    if answer.is_success:
        answer = person.http.get("/v1/whoami", headers=person.own)
    person.http.close()
    return answer


def test_the_address_is_printed_alone_and_signs_in_once(
    service: ServeProcess, run: Command
) -> None:
    done = run("login")
    assert done.exit_code == 0, done.output
    (address,) = done.stdout.splitlines()
    assert done.stderr.startswith("until 20")
    secret = (service.data_dir / "token").read_text().strip()
    assert secret not in done.output
    assert sign_in(service, address).json()["name"] == "local"
    assert sign_in(service, address).status_code == 401


def test_login_uses_the_named_token(service: ServeProcess, run: Command, tmp_path: Path) -> None:
    files = {}
    for role in ("viewer", "worker"):
        files[role] = tmp_path / role
        arguments = ["create", f"a-{role}", "--role", role, "--out", str(files[role])]
        made = CliRunner().invoke(token, [*arguments, "--data-dir", str(service.data_dir)])
        assert made.exit_code == 0, made.output
    address = run("login", "--token-file", str(files["viewer"])).stdout.strip()
    assert sign_in(service, address).json()["role"] == "viewer"
    refused = run("login", "--token-file", str(files["worker"]))
    assert refused.exit_code == 1
    assert "'a-worker' has the role worker" in refused.stderr


def test_an_address_below_a_prefix_keeps_it() -> None:
    assert (
        sign_in_url("https://hub.example/tuner/", "c") == "https://hub.example/tuner/sign-in#code=c"
    )


def test_the_code_is_not_among_the_arguments_of_the_browser(
    service: ServeProcess, run: Command, tmp_path: Path
) -> None:
    """All users of a machine can read arguments of processes."""
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    browser.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", "from api.commands.login import login; login()", "--open"],
        env={"LAYOUT_TUNER_DATA_DIR": str(service.data_dir), "BROWSER": f"{browser} %s"},
        capture_output=True,
        text=True,
        check=True,
    )
    (address,) = done.stdout.splitlines()
    code = address.rpartition("=")[2]
    opened = seen.read_text().strip()
    assert opened.startswith("file://")
    assert code not in opened
    file = Path(opened.removeprefix("file://"))
    assert file.stat().st_mode & 0o777 == 0o600
    assert address in file.read_text()
    assert sign_in(service, address).status_code == 200
