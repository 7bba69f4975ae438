"""Installs layout-tuner, its extras and its development tools; `make install` runs it.

The packages are installed by uv, which takes less time than pip. pip first installs uv itself, at
the version that constraints.txt has. If pip cannot install uv, if uv fails, or if pip has a setting
that uv lacks, pip installs the packages and this program prints the reason.

pip's settings (pip.conf and the variables PIP_...) are read with `pip config list` and passed to uv
by its own names. The flags of the command line are passed to both as they are.

It must be run by the Python of the environment to install into, in the root of the repository.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
WHAT: Final = ("--constraint", "constraints.txt", "--editable", ".[all,dev,bench]")

FLAGS: Final = {
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""Flags of uv for the settings of pip that have a list of values."""

SWITCHES: Final = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
"""Flags of uv for the settings of pip that are true or false."""

VARIABLES: Final = {
    "index-url": ("UV_INDEX_URL",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
"""Variables of uv's environment for the settings of pip that have one value."""

WITHOUT_EFFECT: Final = {
    "cache-dir",
    "compile",
    "config-file",
    "debug",
    "flags",  # PIP_FLAGS of the Makefile, which make exports
    "disable-pip-version-check",
    "log",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-conflicts",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "verbose",
}
"""Settings of pip that do not change which packages are installed."""


class UvUnusableError(Exception):
    """uv cannot install the packages; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--torch-index", metavar="URL", help="an extra index that has torch")
    options, flags = parser.parse_known_args()
    if options.torch_index:
        flags += ["--extra-index-url", options.torch_index]
    try:
        install_with_uv(flags)
    except UvUnusableError as reason:
        sys.stderr.write(f"{reason}: pip installs the packages, which takes longer\n")
        sys.exit(run([*PIP, "install", "--quiet", *flags, *WHAT]))


def install_with_uv(flags: list[str]) -> None:
    """Installs the packages with uv.

    Raises:
        UvUnusableError: pip cannot install uv, uv failed, or uv lacks a setting of pip.
    """
    own_flags, variables = uv_settings(pip_settings())
    if run([*PIP, "install", "--quiet", *flags, "--constraint", "constraints.txt", "uv"]):
        raise UvUnusableError("pip cannot install uv")
    # pip compares the versions of all indexes; uv would take the first index that has a package.
    words = ["--quiet", "--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    command = [sys.executable, "-m", "uv", "pip", "install", *words, *own_flags, *flags, *WHAT]
    if run(command, variables):
        raise UvUnusableError("uv cannot install the packages")


def pip_settings() -> dict[str, str]:
    """Returns the settings of `pip install`, from pip's files and from the environment."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in sections:
            sections[section][key] = ast.literal_eval(value)
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_settings(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Translates settings of pip into flags and environment variables of uv.

    Raises:
        UvUnusableError: A setting that changes what is installed has no name in uv.
    """
    flags: list[str] = []
    variables: dict[str, str] = {}
    for key, value in settings.items():
        if key in FLAGS:
            for word in usable(key, value.split()):
                flags += [FLAGS[key], word]
        elif key in SWITCHES:
            flags += [SWITCHES[key]] if value.lower() in ("1", "true", "yes", "on") else []
        elif key in VARIABLES:
            variables |= dict.fromkeys(VARIABLES[key], value)
        elif key not in WITHOUT_EFFECT:
            raise UvUnusableError(f"uv has no setting like pip's {key}")
    return flags, variables


def usable(key: str, words: list[str]) -> Iterator[str]:
    """Leaves out folders of links that do not exist, which pip ignores and uv refuses."""
    for word in words:
        url = urlsplit(word)
        local = url.scheme in ("", "file")
        if key != "find-links" or not local or Path(unquote(url.path)).expanduser().exists():
            yield word


def run(command: list[str], variables: dict[str, str] | None = None) -> int:
    """Runs a program and returns its exit code."""
    return subprocess.run(command, env=os.environ | (variables or {}), check=False).returncode


if __name__ == "__main__":
    main()
