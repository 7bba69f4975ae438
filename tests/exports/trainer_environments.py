"""Other trainers, each installed beside the project's packages without changing them.

A trainer and what it needs beyond torch lie in `build/trainers/NAME`, in the versions of
`requirements/NAME.txt`. They come first on the path of a process that reads an exported file with
the trainer's own parser. Nothing is installed twice while the versions stay the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
INSTALL_DEADLINE_S: Final = 600
READ_DEADLINE_S: Final = 110


def installed(name: str) -> Path:
    """The folder with a trainer's packages, which is filled if need be."""
    requirements = HERE / "requirements" / f"{name}.txt"
    target = ROOT / "build" / "trainers" / name
    stamp = target / ".installed"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return target
    shutil.rmtree(target, ignore_errors=True)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    where = ("--no-compile", "--target", str(target), "--requirement", str(requirements))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *where],
        env={**os.environ, "DS_BUILD_OPS": "0"},
        check=True,
        timeout=INSTALL_DEADLINE_S,
    )
    stamp.write_text(wanted)
    return target


def read(
    name: str, reader: str, files: Sequence[Path], *, checkout: str = "", **about: object
) -> list[dict[str, Any]]:
    """What a trainer's own parser makes of exported files.

    Args:
        name: the trainer's environment.
        reader: a script in `readers/`, which prints a JSON list with a mapping for each file: the
            fields of layout and model that it read, or `refused` and the parser's message.
        files: the exported files.
        checkout: a folder with the trainer's own package, where it is not installed.
        about: what the parser is told besides, as environment variables.
    """
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": os.pathsep.join(filter(None, (checkout, str(installed(name))))),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        **{key: str(value) for key, value in about.items()},
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "readers" / reader), *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=READ_DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
