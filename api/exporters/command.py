"""A launch script for any program, which gets the layout in environment and arguments."""

from __future__ import annotations

from typing import Final

from api.exporters.base import ExportFormat, ExportSource, RenderedJob
from api.exporters.launch_script import PROGRAM_RANKS, LaunchScript, exported
from search_spaces.trainers.command import COMMAND
from search_spaces.trainers.placeholders import ENVIRONMENT_PREFIX, environment_values

_FILL: Final = f"""\
# {{tp}} in an argument stands for the value of {ENVIRONMENT_PREFIX}TP, and so on.
PROGRAM=()
for word in "$@"; do
    filled=
    while [[ $word =~ \\{{([a-z_][a-z0-9_]*)\\}} ]]; do
        found="${{BASH_REMATCH[0]}}" variable="{ENVIRONMENT_PREFIX}${{BASH_REMATCH[1]^^}}"
        [[ -v $variable ]] || {{ echo "$found is no placeholder; see this script" >&2; exit 2; }}
        filled+="${{word%%"$found"*}}${{!variable}}"
        word="${{word#*"$found"}}"
    done
    PROGRAM+=("$filled$word")
done
set --
[[ ${{#PROGRAM[@]}} -gt 0 ]] || {{ echo "say which program to start" >&2; exit 2; }}"""


def _render(source: ExportSource) -> RenderedJob:
    script = LaunchScript(
        name="command.sh",
        target_version=COMMAND.target_version,
        arguments=("python", "train.py", "--tp", "{tp}"),
        usage=("a program that starts its ranks by itself: LAUNCH=once",),
        setup=exported(environment_values(source.job)),
        program=(_FILL,),
        launches=PROGRAM_RANKS,
    )
    return RenderedJob(files=(script.file(source),), commands=script.commands(source))


COMMAND_FORMAT: Final = ExportFormat(adapter=COMMAND, render=_render)
