"""Calling Slurm's own programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Final

from workers.slurm.errors import SlurmRefusedError, SlurmUnavailableError

_ANSWER_WITHIN_S: Final = 60.0
_AWAY: Final = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Communication connection failure",
    "Connection refused",
    "Socket timed out",
    "Zero Bytes were transmitted",
)


def call(*command: str, environ: Mapping[str, str] | None = None, given: str | None = None) -> str:
    """What a program of Slurm's prints.

    Args:
        command: the program and its arguments.
        environ: its environment; None: this process's.
        given: its standard input; None: nothing.

    Raises:
        SlurmUnavailableError: it is not installed here, or its controller does not answer.
        SlurmRefusedError: it refuses; the message is its own.
    """
    environment = dict(os.environ if environ is None else environ)
    try:
        done = subprocess.run(
            command,
            env={**environment, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
            input=given or "",
            capture_output=True,
            text=True,
            timeout=_ANSWER_WITHIN_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise SlurmUnavailableError(
            f"there is no Slurm here ({command[0]} is not installed): run this on a login node of the "
            "cluster, or use --dry-run and hand the script to sbatch there"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailableError(
            f"Slurm does not answer: {command[0]} took more than {_ANSWER_WITHIN_S:g} s; try again later"
        ) from error
    if done.returncode == 0:
        return done.stdout
    said = " / ".join(line for line in done.stderr.splitlines() if line.strip())[:1000]
    if any(words in done.stderr for words in _AWAY):
        raise SlurmUnavailableError(f"Slurm does not answer: {said}; try again later")
    raise SlurmRefusedError(f"{command[0]} refuses ({done.returncode}): {said or 'without a word'}")
