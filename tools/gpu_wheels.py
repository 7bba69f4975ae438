"""The packages of `make gpu-check`: downloads them, and installs them where no network is.

`python -m tools.gpu_wheels` downloads, in the development environment, the wheels that a machine
with Python 3.12, torch, numpy and scipy lacks. `python tools/gpu_wheels.py --install VENV` runs
there with the standard library alone: it makes an environment on top of its own Python's packages,
and installs the wheels and the project in it.
"""

from __future__ import annotations

import argparse
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

WHEELS: Final = Path("build/gpu-wheels")
MOST_BYTES: Final = 45_000_000
"""Of all wheels together."""

PRESENT: Final = frozenset({"torch", "numpy", "scipy"})
"""Packages that the machine with the GPU has."""
LEFT_OUT: Final = frozenset({"ray", "deephyper", "pyarrow", "psycopg"})
"""Packages without which a launcher, two strategies, a table format and PostgreSQL are missing."""
WANTED: Final = (
    "layout-tuner[service,driver,worker]",
    *("pytest", "pytest-timeout", "hypothesis", "psutil"),
)
BUILDS: Final = ("hatchling", "editables", "pathspec", "pluggy", "packaging", "trove-classifiers")
"""Packages that install the project itself; the development environment may lack them."""

_PYTHON: Final = "3.12"
_MACHINE: Final = {
    "python_version": _PYTHON,
    "python_full_version": f"{_PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
"""The machine with the GPU, as markers of requirements name it."""
_PLATFORMS: Final = tuple(
    f"manylinux{version}_x86_64"
    for version in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")
)


class WheelsUnusableError(Exception):
    """The wheels cannot be downloaded or used; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu-wheels", description=__doc__.splitlines()[0])
    parser.add_argument("--install", metavar="VENV", type=Path, help="install them in VENV")
    target = parser.parse_args().install
    try:
        if target is not None:
            install(target)
        else:
            download()
    except WheelsUnusableError as error:
        sys.exit(f"gpu-wheels: {error}")


def download(folder: Path = WHEELS) -> None:
    """Downloads the wheels into an empty folder, at the versions of the development environment."""
    shutil.rmtree(folder, ignore_errors=True)
    names = [*(f"{name}=={version}" for name, version in sorted(closure(WANTED))), *BUILDS]
    _pip(
        *("download", "--no-deps", "--only-binary=:all:", "--implementation=cp"),
        *(f"--python-version={_PYTHON}", *(f"--platform={each}" for each in _PLATFORMS)),
        *(f"--dest={folder}", *dict.fromkeys(names)),
    )
    size = f"{len(list(folder.iterdir()))} wheels, {checked_bytes(folder) / 1e6:.1f} MB"
    sys.stdout.write(f"{size} in {folder}\n")


def checked_bytes(folder: Path) -> int:
    """The size of all wheels; WheelsUnusableError if there are none, too many, or other files."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if not files:
        raise WheelsUnusableError(
            f"{folder} has no wheels; run `make gpu-wheels` where there is a network, and copy the "
            "folder here"
        )
    if others := [file.name for file in files if file.suffix != ".whl"]:
        raise WheelsUnusableError(f"{folder} has files that are no wheels: {', '.join(others)}")
    total = sum(file.stat().st_size for file in files)
    if total > MOST_BYTES:
        largest = max(files, key=lambda file: file.stat().st_size)
        raise WheelsUnusableError(
            f"the wheels in {folder} take {total / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}; the "
            f"largest is {largest.name}: leave packages out in tools/gpu_wheels.py"
        )
    return total


def closure(wanted: tuple[str, ...]) -> set[tuple[str, str]]:
    """Name and version of each installed package that these requirements need on that machine."""
    found: dict[tuple[str, frozenset[str]], str] = {}
    waiting = list(wanted)
    while waiting:
        for name, extras in _applicable(waiting.pop(), {"extra": ""}):
            if name in PRESENT | LEFT_OUT or (name, extras) in found:
                continue
            package = metadata.distribution(name)
            found[name, extras] = package.version
            for requirement in package.requires or ():
                for extra in ("", *sorted(extras)):
                    waiting += [each for each in _named(requirement, extra) if each not in waiting]
    return {(name, version) for (name, _), version in found.items() if name != "layout-tuner"}


def _named(requirement: str, extra: str) -> Iterator[str]:
    """The requirement without its marker, if it applies with this extra."""
    for name, extras in _applicable(requirement, {"extra": extra}):
        yield f"{name}[{','.join(sorted(extras))}]"


def _applicable(requirement: str, extra: Mapping[str, str]) -> Iterator[tuple[str, frozenset[str]]]:
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    if parsed.marker is None or parsed.marker.evaluate({**_MACHINE, **extra}):
        yield parsed.name.lower().replace("_", "-"), frozenset(parsed.extras)


def install(target: Path, folder: Path = WHEELS) -> None:
    """Makes an environment with the packages of this Python, the wheels and the project."""
    checked_bytes(folder)
    if missing := sorted(name for name in PRESENT if not _is_installed(name)):
        raise WheelsUnusableError(
            f"{sys.executable} lacks {', '.join(missing)}; name the Python that has torch: "
            "make gpu-check PYTHON=..."
        )
    venv.create(target, clear=True, with_pip=False, symlinks=True)
    python = target / "bin" / "python"
    # --system-site-packages would show the packages of the Python below, if this one is itself in
    # an environment. What is installed in the new one comes first.
    packages = (*site.getsitepackages(), site.getusersitepackages())
    lines = [f"import site; site.addsitedir({path!r})" for path in packages if Path(path).is_dir()]
    (own,) = target.glob("lib/python*/site-packages")
    (own / "packages-below.pth").write_text("\n".join(lines) + "\n")
    quietly = (
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-compile",
        "--no-index",
        "--no-deps",
    )
    _pip(*quietly, "--ignore-installed", *map(str, sorted(folder.iterdir())))
    _pip(*quietly, "--no-build-isolation", "--editable", ".")


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _pip(*words: str) -> None:
    """Runs pip without the constraints of the machine; WheelsUnusableError where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    if code := subprocess.run(command, check=False).returncode:
        raise WheelsUnusableError(f"pip ended with exit code {code}: {' '.join(command[:8])} ...")


if __name__ == "__main__":
    main()
