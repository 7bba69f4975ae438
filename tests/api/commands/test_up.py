"""`layout-tuner up`: what it refuses to start on, and that nothing outlives it."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Service
from tests.kit.persons import Person
from tests.kit.services import ServeProcess, run_here
from tests.kit.waiting import wait_until
from tests.workers.process_checks import kill


def refused_line(*options: str) -> str:
    """The one line with which `up` refuses to start."""
    refused = run_here("up", *options)
    assert refused.exit_code == 1, refused.stderr
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    return line


def test_a_port_in_use_or_none_at_all_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused_line("--port", str(port), "--data-dir", str(tmp_path))
    assert line.startswith(f"Error: port {port} of 127.0.0.1 is in use by another program")
    assert not (tmp_path / "service.json").exists()
    for invalid in ("99999", "-1", "http"):
        refused = run_here("up", "--port", invalid, "--data-dir", str(tmp_path / "data"))
        assert refused.exit_code == 2
        assert "Invalid value for '--port'" in refused.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_second_up_names_the_first_ones_address_and_process_and_what_to_do(
    service: ServeProcess,
) -> None:
    url, pid, data_dir = service.url, service.service["pid"], service.data_dir
    line = refused_line("--port", "0", "--data-dir", str(data_dir))
    assert f"on the data directory {data_dir} already, at {url} (process {pid})" in line
    assert f"end it with `kill {pid}`" in line
    assert "another --data-dir and --port" in line


@pytest.mark.slow
def test_ending_up_ends_its_service_and_no_token_is_printed(tmp_path: Path) -> None:
    """On a terminal too."""
    data, (ours, theirs) = tmp_path / "data", os.openpty()
    command = [sys.executable, "-m", "api.cli", "up", "--port", "0", "--data-dir", str(data)]
    up = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    try:
        os.close(theirs)
        shown = b""
        while b"ready:" not in shown:
            shown += os.read(ours, 65536)
        line = refused_line("--port", "0", "--data-dir", str(data))
        assert f"end it with `kill {up.pid}`" in line
        address = re.search(r"sign in +(http://\S+)/sign-in#code=(\S+)", shown.decode())
        assert address is not None
        person = Person(address[1])
        assert person.sign_in_with_code(address[2]).status_code == 200
        assert person.open("/").status_code == 200
        person.http.close()
    finally:
        up.terminate()
        assert up.wait(60) == 0
    assert str(data / "token").encode() in shown
    for name in ("token", "worker-token"):
        token = (data / name).read_bytes().strip()
        assert token not in shown
        for log in (data / "logs").iterdir():
            assert token not in log.read_bytes()


@pytest.mark.slow
def test_no_process_outlives_up_when_it_is_killed(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    try:
        wait_until("driver and worker are there", lambda: service.process("worker"))
        wait_until("they are ready", lambda: "ready:" in service.output.read_text(), 60)
        assert len(service.processes()) > 4
        service.up.kill()
        service.up.wait()
        wait_until("every process is gone", lambda: not service.processes(), 60)
    finally:
        service.http.close()
        kill(service.processes())
