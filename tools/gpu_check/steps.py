"""The steps of `make gpu-check`: each has a time limit, and the others run if it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any, Final

from layout_tuner.client.errors import ServiceError

_TAIL: Final = 1500
"""Characters of the output of a program that failed."""
_ENDS_WITHIN_S: Final = 5.0


class StepFailedError(Exception):
    """The step did not do what it should; the message says why."""


class StepCutError(Exception):
    """The time of the step was over."""


class StepSkippedError(Exception):
    """The step cannot run on this machine; the message says why."""


@dataclass(kw_only=True)
class Clock:
    """The time of one step."""

    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the programs that it runs, beyond this process's."""

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    @property
    def ends_at(self) -> float:
        """On the monotonic clock."""
        return self.started + self.limit_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def run(self, words: Sequence[str], *, accepts: Sequence[int] = (0,)) -> str:
        """What a program prints; it and all that it started in its session end with the step.

        Raises:
            StepCutError: it ran longer than the step may.
            StepFailedError: its exit code is not an accepted one.
        """
        with TemporaryFile() as out, TemporaryFile() as err:
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=err,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )
            try:
                code = process.wait(max(self.left_s, 0.1))
            except subprocess.TimeoutExpired:
                raise StepCutError(f"{_shown(words)} had not ended") from None
            finally:
                _end(process)
            printed, said = (_text(stream) for stream in (out, err))
        if code not in accepts:
            tail = f"{printed[-_TAIL:]}\n{said[-_TAIL:]}".strip()
            raise StepFailedError(f"{_shown(words)} ended with exit code {code}: {tail}")
        return printed


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the program and all processes of its group, first with SIGTERM."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_WITHIN_S)
    with suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shown(words: Sequence[str]) -> str:
    return " ".join(["python" if word == sys.executable else word for word in words[:6]])


def layout_tuner(*words: str) -> list[str]:
    """A command of the product, in this environment."""
    return [sys.executable, "-P", "-m", "layout_tuner", *words]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step: what it does, and how long it may take."""

    name: str
    limit_s: float
    run: Callable[[Clock], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """How a step ended."""

    name: str
    status: str
    """passed, failed, cut (its time was over) or skipped (this machine lacks something)."""
    seconds: float
    limit_s: float
    message: str = ""


def run_step(step: Step, *, left_s: float, variables: Mapping[str, str]) -> StepResult:
    """Runs a step for its limit, or for the time that is left if that is less."""
    clock = Clock(limit_s=min(step.limit_s, left_s), variables=variables)
    status, message = "passed", ""
    try:
        if left_s <= 0:
            raise StepCutError("the time of the whole check was over")
        step.run(clock)
    except StepCutError as error:
        status, message = "cut", f"{error} after {clock.limit_s:.0f} s"
    except StepSkippedError as error:
        status, message = "skipped", str(error)
    except (StepFailedError, ServiceError) as error:
        status, message = "failed", str(error)
    except Exception as error:  # a fault of one step must not cost the results of the others
        status, message = "failed", f"{type(error).__name__}: {error}"
    return StepResult(
        name=step.name,
        status=status,
        seconds=round(clock.elapsed_s, 1),
        limit_s=clock.limit_s,
        message=message,
    )
