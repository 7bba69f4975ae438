"""Other trainers, each installed beside the project's packages without changing them.

A trainer and what it needs beyond torch lie in `build/trainers/NAME`, in the versions of
`requirements/NAME.txt`. They come first on the path of a process that reads an exported file with
the trainer's own parser. Nothing is installed twice while the versions stay the same.

The first line of such a file is the trainer's own package. `NAME@newest` is the same with the
newest release of it that the package index has, also where that needs a newer Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, TextIO
from zipfile import ZipFile

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
INSTALL_DEADLINE_S: Final = 600
INDEX_DEADLINE_S: Final = 30
PYTHON: Final = ".".join(map(str, sys.version_info[:3]))
NEWEST: Final = "@newest"

Ask = Callable[[Path, int], dict[str, Any]]
"""What a trainer makes of an exported file, for a number of ranks."""


class NewestUnavailableError(Exception):
    """The newest release of a trainer cannot be read here; the message says why."""


def pinned(name: str) -> tuple[str, str]:
    """A trainer's own package and its version."""
    first = (HERE / "requirements" / f"{name}.txt").read_text().splitlines()[0]
    package, _, version = first.partition("==")
    return package, version


@cache
def newest(name: str) -> tuple[str, bool]:
    """The newest release of a trainer's package, and whether it needs a newer Python.

    pip names the newest release for this Python alone, unless it is told to ignore that.

    Raises:
        NewestUnavailableError: the package index does not answer.
    """
    package, _ = pinned(name)
    every = _index_says(package, "--ignore-requires-python")
    return every, every != _index_says(package)


def _index_says(package: str, *options: str) -> str:
    """The newest release that pip finds in the index of its settings."""
    command = [sys.executable, "-m", "pip", "index", "versions", package, *options]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=INDEX_DEADLINE_S
        )
    except subprocess.CalledProcessError as error:
        raise NewestUnavailableError(
            f"the package index does not answer: {error.stderr.strip()}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NewestUnavailableError(f"the package index does not answer: {error}") from error
    return said.stdout.partition("(")[2].partition(")")[0]


def installed(name: str) -> Path:
    """The folder with a trainer's packages, which is filled if need be."""
    base = name.removesuffix(NEWEST)
    package, version = pinned(base)
    wanted, is_for_newer_python = (HERE / "requirements" / f"{base}.txt").read_text(), False
    if name.endswith(NEWEST):
        version, is_for_newer_python = newest(base)
        _, *others = wanted.splitlines()
        wanted = "\n".join((f"{package}=={version}", *others))
    target = ROOT / "build" / "trainers" / name
    stamp = target / ".installed"
    digest = hashlib.sha256(f"{wanted}{sys.version}".encode()).hexdigest()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes of tests one installs
        if not stamp.exists() or stamp.read_text() != digest:
            _install(wanted.split(), target, is_for_newer_python=is_for_newer_python)
            stamp.write_text(digest)
    return target


def _install(packages: Sequence[str], target: Path, *, is_for_newer_python: bool) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    if is_for_newer_python:
        _pip(
            "download",
            "--only-binary=:all:",
            "--python-version=3.12",
            *packages,
            "--dest",
            target,
        )
        for wheel in target.glob("*.whl"):
            with ZipFile(wheel) as files:
                files.extractall(target)
    else:
        options = ("--no-compile", "--no-build-isolation")
        _pip("install", *options, *packages, "--target", target)


def _pip(*words: object) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps")
    command, *others = map(str, words)
    subprocess.run(
        [sys.executable, "-m", "pip", command, *quiet, *others],
        env={**os.environ, "DS_BUILD_OPS": "0"},
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )


@contextmanager
def reading(name: str, reader: str, *, checkout: str = "") -> Iterator[Ask]:
    """A process with a trainer's own parser, which answers as long as it is asked.

    Args:
        name: the trainer's environment.
        reader: a script in `readers/`; `answers.py` has its protocol. It answers with the fields of
            layout and model that it read, or with `refused` and the parser's message.
        checkout: a folder with the trainer's own package, where it is not installed.
    """
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": os.pathsep.join(filter(None, (checkout, str(installed(name))))),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
    }
    log = ROOT / "build" / "trainers" / f"{name}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(HERE / "readers" / reader)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        source, target = process.stdin, process.stdout

        def ask(file: Path, num_devices: int) -> dict[str, Any]:
            try:
                source.write(json.dumps([str(file), num_devices]) + "\n")
                source.flush()
                answer = target.readline()
            except BrokenPipeError:
                answer = ""
            assert answer, _end_of(errors)
            found: dict[str, Any] = json.loads(answer)
            return found

        try:
            yield ask
        finally:
            source.close()


def _end_of(errors: TextIO) -> str:
    errors.seek(0)
    return errors.read()[-4000:]


def read(
    name: str, reader: str, files: Sequence[Path], ranks: Sequence[int], *, checkout: str = ""
) -> list[dict[str, Any]]:
    """What a trainer's own parser makes of exported files, each for a number of ranks."""
    with reading(name, reader, checkout=checkout) as ask:
        return [ask(*each) for each in zip(files, ranks, strict=True)]
