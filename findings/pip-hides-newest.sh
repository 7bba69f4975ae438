#!/bin/bash
# `pip index versions` names an older release as the newest one, where the newest needs a newer Python.
#
# Version: pip 24 and later, on Python 3.11 or older; megatron-core 0.19.2 needs Python 3.12.
# Behaviour: pip does not say that it leaves out releases for newer Pythons. With
# --ignore-requires-python the same command names the newest of all.
# Seen on Python 3.11 in November 2026: 0.16.1, and with the option 0.19.2.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
newest() { "$folder/venv/bin/pip" index versions megatron-core "$@" 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p'; }
said="$(newest)"
every="$(newest --ignore-requires-python)"
"$folder/venv/bin/python" --version
echo "pip says megatron-core $said; with --ignore-requires-python $every"
[ -n "$said" ] && [ -n "$every" ] && [ "$said" != "$every" ]
