"""Handing an allocation to Slurm, after the checks that Slurm doesn't make."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from search_spaces.pinned_certificate import trusting
from workers.command_input import is_token
from workers.slurm.errors import AllocationInvalidError
from workers.slurm.programs import call
from workers.slurm.request import AllocationRequest

_ANSWER_WITHIN_S: Final = 5.0


def refuse_unusable(request: AllocationRequest, script: str) -> None:
    """Looks at the files that the job will need, and at the script as bash reads it.

    Raises:
        AllocationInvalidError: something is missing, open to others, or no shell.
        CertificateUnreadableError: the certificate is none.
    """
    _refuse_token_file(request.token_file)
    if request.certificate is not None:
        trusting(request.certificate)
    if request.archive is None and not request.python.is_file():
        raise AllocationInvalidError(
            f"{request.python} is not there; give the environment that has layout-tuner",
            field="--environment",
        )
    read = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=60, check=False
    )
    if read.returncode != 0:
        raise AllocationInvalidError(
            f"bash does not understand the script ({read.stderr.strip()[:300]}); look at the lines of "
            "the site's setup and of --setup",
            field="--setup",
        )


def warnings(request: AllocationRequest) -> Iterator[str]:
    """What may be wrong and can't be known from here."""
    host = urlsplit(request.url).hostname or ""
    if host == "localhost" or host.startswith("127."):
        yield (
            f"the nodes reach themselves, not this machine, at {request.url}: give an address of the "
            "service that they can reach"
        )
    elif why := _why_unreachable(request):
        yield f"the service does not answer from here ({why}); the worker will wait for it for a while"
    if request.token_file.is_relative_to("/tmp"):  # noqa: S108
        yield f"{request.token_file} is on this machine's own disk: nodes may not see it"


def submit(script: str) -> str:
    """Hands the script to sbatch; returns the job's id.

    Raises:
        SlurmUnavailableError: there is no Slurm here, or it does not answer.
        SlurmRefusedError: it refuses the job.
    """
    answer = call("sbatch", "--parsable", given=script)
    return answer.strip().splitlines()[-1].partition(";")[0]


def _refuse_token_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AllocationInvalidError(
            f"{path} can't be read: {error}; copy the service's token there", field="--token-file"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AllocationInvalidError(
            f"{path} is open to others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}",
            field="--token-file",
        )
    if not token:
        raise AllocationInvalidError(f"{path} is empty", field="--token-file")
    if not is_token(token):
        raise AllocationInvalidError(
            f"{path} holds no token (one word of ASCII)", field="--token-file"
        )


def _why_unreachable(request: AllocationRequest) -> str | None:
    trusted = True if request.certificate is None else trusting(request.certificate)
    try:
        answer = httpx.get(
            f"{request.url.rstrip('/')}/v1/health", timeout=_ANSWER_WITHIN_S, verify=trusted
        )
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if answer.is_success else f"{answer.status_code} {answer.reason_phrase}"
