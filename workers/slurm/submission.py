"""Submits an allocation to Slurm, after checks of files, script and token."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from layout_tuner.documents.hosts import is_loopback_host
from layout_tuner.documents.reading import why_unreadable
from layout_tuner.errors import TokenFileUnusableError
from layout_tuner.protocol.connection.bearer_token import token_in
from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
from layout_tuner.protocol.connection.tls import trusting
from layout_tuner.workers.errors import (
    AllocationInvalidError,
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerError,
)
from layout_tuner.workers.service.lease_client import ServiceHttp
from layout_tuner.workers.slurm.jobs import call
from layout_tuner.workers.slurm.request import AllocationRequest, plain_name

_ANSWER_WITHIN_S: Final = 5.0


def refuse_unusable(request: AllocationRequest, script: str) -> None:
    """Checks the files that the job needs, and the syntax of the script.

    Raises:
        AllocationInvalidError: a file is missing or readable by others, or the script is invalid.
        CertificateUnreadableError: the certificate is invalid.
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
            f"bash can't read the script ({read.stderr.strip()[:300]}); check the lines of the site's "
            "setup and of --setup",
            field="--setup",
        )


def warnings(request: AllocationRequest, unchecked: WorkerError | None) -> Iterator[str]:
    """Possible problems that can't be checked on this machine.

    One is why the role of the token could not be checked, if so.
    """
    is_loopback = is_loopback_host(urlsplit(request.url).hostname or "")
    if is_loopback:
        yield (
            f"on a node, {request.url} is the node itself: give an address of the service that the "
            "nodes can reach"
        )
    if unchecked is not None:
        is_awaited = isinstance(unchecked, ServiceUnreachableError) and not is_loopback
        yield f"{unchecked}{'; the worker will wait some time for it' if is_awaited else ''}"
        yield (
            f"whether {request.token_file} holds a worker's token was not checked: the service did not "
            "answer"
        )
    if request.token_file.is_relative_to("/tmp"):  # noqa: S108
        yield f"{request.token_file} is on this machine's own disk: the nodes may not see it"


def submit(script: str) -> str:
    """Submits the script with sbatch; returns the job's id.

    Raises:
        SlurmUnavailableError: Slurm is not installed here, or does not answer.
        SlurmRefusedError: it refuses the job.
    """
    # Slurm copies this environment to the job and into its own files.
    environ = {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}
    answer = call("sbatch", "--parsable", environ=environ, given=script)
    return answer.strip().splitlines()[-1].partition(";")[0]


def _refuse_token_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise AllocationInvalidError(
            f"{path} can't be read ({why_unreadable(error)}); put a worker's token there",
            field="--token-file",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AllocationInvalidError(
            f"{path} is open to others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}",
            field="--token-file",
        )
    try:
        token_in(path)
    except TokenFileUnusableError as error:
        raise AllocationInvalidError(
            f"{error}; put a worker's token there", field="--token-file"
        ) from error


def refuse_other_role(request: AllocationRequest, *, is_stated: bool) -> WorkerError | None:
    """Refuses a token of another role than worker.

    A batch script must not name an admin's token: anyone who can read the file would have its role.

    Args:
        request: the allocation.
        is_stated: whether the user states that the token is a worker's; it is then accepted where
            the service can't be asked.

    Returns:
        Why the role could not be checked; None: it was checked.

    Raises:
        AllocationInvalidError: the token is not a worker's, or that is not known.
    """
    option = "--worker-token-file" if is_stated else "--token-file"
    try:
        token = token_in(request.token_file)
        with ServiceHttp(request.url, token, certificate=request.certificate) as http:
            role = http.role(within_s=_ANSWER_WITHIN_S)
    except TokenFileUnusableError as error:
        raise TokenRefusedError(f"{error}: name another with --token-file") from error
    except TokenRefusedError as error:
        raise AllocationInvalidError(
            f"{error} {request.token_file}; {_how_to_make_one(request, None)}", field=option
        ) from error
    except (ServiceUnreachableError, ServiceFailedError, RequestRefusedError) as error:
        if is_stated:
            return error
        raise AllocationInvalidError(
            f"it is not known whether {request.token_file} holds a worker's token ({error}), and a batch "
            f"script must not name an admin's: if it is a worker's, give it with --worker-token-file "
            f"{shlex.quote(str(request.token_file))}; else {_how_to_make_one(request, None)}",
            field=option,
        ) from error
    if role != "worker":
        raise AllocationInvalidError(
            f"{request.token_file} holds the token of {'an' if role == 'admin' else 'a'} {role}, and a batch "
            f"script may only name a worker's, which can run trials and nothing else; "
            f"{_how_to_make_one(request, role)}",
            field=option,
        )
    return None


def _how_to_make_one(request: AllocationRequest, role: str | None) -> str:
    """The shell command that makes a worker's token; it needs an admin's token."""
    name, file = _free_name(request)
    admin = str(request.token_file) if role == "admin" else "ADMIN_TOKEN_FILE"
    words = ["layout-tuner", "token", "create", name, "--role", "worker", "--url", request.url]
    words += ["--token-file", admin]
    if request.certificate is not None:
        words += ["--certificate", str(request.certificate)]
    command = shlex.join([*words, "--out", str(file)])
    who = "make one" if role == "admin" else "an admin of the service makes one"
    return f"{who} with `{command}`, and give it with --worker-token-file {shlex.quote(str(file))}"


def _free_name(request: AllocationRequest) -> tuple[str, Path]:
    """A name for the token, and a new file in the directory of the given token file."""
    cluster = plain_name(request.cluster.name)
    names = (f"{cluster}-worker{'' if n == 1 else f'-{n}'}" for n in count(1))
    places = ((name, request.token_file.with_name(f"{name}-token")) for name in names)
    return next((name, file) for name, file in places if not file.exists())
