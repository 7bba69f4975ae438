"""`allocation submit` and `list` where there is no Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from workers.slurm.commands import allocation

OF_NO_SERVICE = ("--url=http://127.0.0.1:9",)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    return file


def submit(token: Path, *options: str) -> Result:
    words = ["submit", "--nodes=16", "--time=2h", *OF_NO_SERVICE, f"--worker-token-file={token}"]
    return CliRunner().invoke(allocation, [*words, *options])


def frontier(token: Path, *options: str) -> Result:
    return submit(token, "--cluster=frontier", "--account=ABC123", *options)


def test_a_dry_run_prints_the_script_and_warns_of_what_cannot_be_known_here(token: Path) -> None:
    printed = frontier(token, "--dry-run", "--end-when-idle=5m", "--setup=echo $HOME")
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=layout-tuner\n")
    assert "--end-when-idle=300" in printed.stdout
    assert "\necho $HOME\n" in printed.stdout
    assert "secret" not in printed.stdout
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
    refused = frontier(token, *options)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_a_missing_interpreter_and_a_file_of_no_yaml_are_refused(
    token: Path, tmp_path: Path
) -> None:
    refused = frontier(token, f"--environment={tmp_path}", "--dry-run")
    assert refused.exit_code == 2
    assert f"{tmp_path}/bin/python is not there" in refused.stderr
    (tmp_path / "ours.yaml").write_text("name: ours\nsite: [\n")
    (sentence,) = submit(token, f"--cluster={tmp_path}/ours.yaml").stderr.splitlines()
    assert sentence.startswith(f"error: {tmp_path}/ours.yaml is not a readable JSON or YAML file")


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
    refused = frontier(token, "--dry-run")
    assert refused.exit_code == 2
    assert "--token-file: " in refused.stderr
    assert says.format(token=token) in refused.stderr


@pytest.mark.parametrize("words", [["list"], ["cancel", "7"]])
def test_a_host_without_slurm_says_so(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    refused = CliRunner().invoke(allocation, words)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: there is no Slurm here (squeue is not installed)")
    assert len(refused.stderr.splitlines()) == 1


def test_submitting_without_slurm_says_what_to_do(
    token: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    refused = frontier(token)
    assert refused.exit_code == 1
    assert "use --dry-run and hand the script to sbatch there" in refused.stderr
