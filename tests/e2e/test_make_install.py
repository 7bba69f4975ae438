"""`make install` with uv and with pip, from package indexes on loopback."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
(UV,) = re.findall(r"^uv==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
NO_INDEX = ("No matching distribution found", "NewConnectionError", "Could not fetch URL")
"""What pip prints where it reaches no package index."""

PROJECT = """\
[build-system]
requires = []
build-backend = "copied_wheel"
backend-path = ["."]

[project]
name = "layout-tuner"
version = "0.1.0"
dependencies = ["small"]

[project.optional-dependencies]
all = ["torch>=2.6"]
dev = []
bench = []
"""
OWN_WHEEL = "layout_tuner-0.1.0-py3-none-any.whl"
BACKEND = f"""\
import pathlib, shutil
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    shutil.copy(pathlib.Path(__file__).with_name("{OWN_WHEEL}"), wheel_directory)
    return "{OWN_WHEEL}"
"""
"""A build backend that needs no package of an index."""


class Index:
    """A package index on loopback, which records who fetched which wheel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.fetched: dict[str, str] = {}
        """The program that fetched each wheel."""
        handler = functools.partial(_Handler, self.fetched, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def add(self, name: str, version: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        write_wheel(self.folder / name, name, version)

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, fetched: dict[str, str], *arguments: Any, **options: Any) -> None:
        self.fetched = fetched
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.suffix == ".whl":
            self.fetched[path.name] = self.headers["User-Agent"].partition("/")[0]
        super().do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Prints nothing."""


def write_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Writes a wheel with one empty module and the extras of this project."""
    described = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in ("all", "dev", "bench"))
    files = {
        f"{name}.py": "",
        f"{described}/METADATA": metadata,
        f"{described}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{described}/RECORD"] = "".join(f"{path},,\n" for path in files) + (
        f"{described}/RECORD,,\n"
    )
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def uv_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uv")
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), UV)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    printed = done.stdout + done.stderr
    if done.returncode and any(sentence in printed for sentence in NO_INDEX):
        pytest.skip(f"pip reaches no package index: {printed.strip().splitlines()[-1]}")
    assert done.returncode == 0, printed
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """An index that has every package but uv; its torch is 2.13.0, of no particular build."""
    index = Index(tmp_path / "index")
    try:
        index.add("small", "1.0")
        index.add("small", "2.0")
        index.add("torch", "2.13.0")
        yield index
    finally:
        index.stop()


@pytest.fixture
def torch_index(tmp_path: Path) -> Iterator[Index]:
    """An index that has torch alone, built for CPUs."""
    index = Index(tmp_path / "torch-index")
    try:
        index.add("torch", "2.13.0+cpu")
        yield index
    finally:
        index.stop()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small project with this repository's Makefile and installation."""
    folder = tmp_path / "clone"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "tools/install.py", folder / "tools")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "constraints.txt").write_text(f"small==1.0\ntorch==2.13.0\n{UV}\n")
    (folder / "copied_wheel.py").write_text(BACKEND)
    write_wheel(folder, "layout_tuner", "0.1.0", ("small", 'torch>=2.6; extra == "all"'))
    return folder


def make_install(clone: Path, *words: str, **variables: str) -> str:
    """What `make install` prints, with pip's settings in variables and in no file."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "MAKE", "MFLAGS", "PYTHONPATH"))
    }
    environment |= {
        "NO_PROXY": "127.0.0.1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        **variables,
    }
    done = subprocess.run(
        ("make", "install", f"PYTHON={sys.executable}", *words),
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed


def versions(clone: Path) -> dict[str, str]:
    """The version of each package of the environment that `make install` created."""
    program = (
        "import json; from importlib.metadata import distributions\n"
        "print(json.dumps({each.name: each.version for each in distributions()}))"
    )
    python = str(clone / ".venv/bin/python")
    listed = subprocess.run((python, "-c", program), capture_output=True, text=True, check=True)
    installed: dict[str, str] = json.loads(listed.stdout)
    return installed


def test_uv_installs_from_the_indexes_that_pip_and_make_were_given(
    clone: Path, index: Index, torch_index: Index, uv_wheel: Path
) -> None:
    (index.folder / "uv").mkdir()
    shutil.copy(uv_wheel, index.folder / "uv")
    (clone.parent / "empty-index").mkdir()
    printed = make_install(
        clone,
        f"TORCH_INDEX={torch_index.url}",
        PIP_INDEX_URL=index.url,
        PIP_EXTRA_INDEX_URL=(clone.parent / "empty-index").as_uri(),
        PIP_FIND_LINKS=f"{clone.parent}/no-such-folder",
    )
    installed = versions(clone)
    assert "pip installs the packages" not in printed
    assert (installed["small"], installed["torch"]) == ("1.0", "2.13.0+cpu")
    assert "layout_tuner" in {name.replace("-", "_") for name in installed}
    assert index.fetched == {uv_wheel.name: "pip", "small-1.0-py3-none-any.whl": "uv"}
    assert torch_index.fetched == {"torch-2.13.0+cpu-py3-none-any.whl": "uv"}


def test_uv_reads_the_settings_of_pips_file(clone: Path, index: Index, uv_wheel: Path) -> None:
    """Folders of wheels and a constraint stand in pip.conf, and no index is allowed."""
    wheels = clone.parent / "wheels of a site"
    wheels.mkdir()
    for wheel in (uv_wheel, *index.folder.rglob("*.whl")):
        shutil.copy(wheel, wheels)
    (clone.parent / "site-constraints.txt").write_text("torch<2.14\n")
    settings = clone.parent / "pip.conf"
    settings.write_text(
        "[global]\nno-index = true\n"
        f"[install]\nfind-links = {wheels.as_uri()}\n"
        f"constraint = {clone.parent}/site-constraints.txt\n"
    )
    printed = make_install(clone, PIP_CONFIG_FILE=str(settings))
    assert "pip installs the packages" not in printed
    assert {"small": "1.0", "torch": "2.13.0"}.items() <= versions(clone).items()
    assert index.fetched == {}


def test_pip_goes_on_where_it_cannot_install_uv(
    clone: Path, index: Index, torch_index: Index
) -> None:
    printed = make_install(clone, f"TORCH_INDEX={torch_index.url}", PIP_INDEX_URL=index.url)
    assert "pip cannot install uv: pip installs the packages" in printed
    installed = versions(clone)
    assert (installed["small"], installed["torch"]) == ("1.0", "2.13.0+cpu")
    assert "uv" not in installed
    assert set(index.fetched.values()) | set(torch_index.fetched.values()) == {"pip"}


def test_pip_goes_on_where_uv_fails(clone: Path, index: Index, uv_wheel: Path) -> None:
    """pip knows a flag that uv refuses."""
    (index.folder / "uv").mkdir()
    shutil.copy(uv_wheel, index.folder / "uv")
    printed = make_install(clone, "PIP_FLAGS=--no-warn-conflicts", PIP_INDEX_URL=index.url)
    assert "uv cannot install the packages: pip installs the packages" in printed
    assert index.fetched["torch-2.13.0-py3-none-any.whl"] == "pip"
    assert versions(clone)["torch"] == "2.13.0"


def test_pip_installs_where_uv_has_no_setting_like_one_of_pips(clone: Path, index: Index) -> None:
    printed = make_install(clone, PIP_INDEX_URL=index.url, PIP_PREFER_BINARY="1")
    assert "uv has no setting like pip's prefer-binary: pip installs the packages" in printed
    assert versions(clone)["torch"] == "2.13.0"
