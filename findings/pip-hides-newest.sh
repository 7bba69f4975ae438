#!/bin/bash
# `pip index versions` names an older release as the newest one, where the newest needs a newer Python.
#
# Version: pip 24 and later, on Python 3.11 or older; megatron-core 0.19.2 needs Python 3.12.
# Behaviour: pip does not say that it leaves out releases for newer Pythons. The index does say which
# release is the newest, in info.version of its JSON.
# Seen on Python 3.11 in November 2026: pip says 0.16.1, the index 0.19.2.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
said="$("$folder/venv/bin/pip" index versions megatron-core)"
"$folder/venv/bin/python" - "$said" <<'PROGRAM'
import json
import sys
import urllib.request

said = sys.argv[1].split("(")[1].split(")")[0]
with urllib.request.urlopen("https://pypi.org/pypi/megatron-core/json", timeout=60) as answer:
    info = json.load(answer)["info"]
print(f"Python {sys.version.split()[0]}: pip says megatron-core {said}")
print(f"the index says {info['version']}, which needs Python {info['requires_python']}")
sys.exit(said == info["version"])
PROGRAM
