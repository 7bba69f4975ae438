"""The shell script that starts the ranks of an exported job, under torchrun or inside Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from layout_tuner.documents.limits import visible_line
from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.exports.export_source import ExportSource, RenderedJob
from layout_tuner.trainers.exports.exported import ExportCommandRead, ExportFileRead

HERE: Final = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
"""A line of bash that sets HERE to the folder of the script."""

_TORCHRUN: Final = """\
    exec torchrun --nnodes "$NUM_NODES" --nproc-per-node "$RANKS_PER_NODE" \\
        --node-rank "${{NODE_RANK:-0}}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
        {no_python}"${{PROGRAM[@]}}" "$@"
"""
_IN_SLURM: Final = """\
    # Ranks of a node are neighbours, from the first node on, whatever the job was submitted with.
    unset SLURM_CLUSTERS SLURM_HOSTFILE
    export SLURM_DISTRIBUTION=block
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
"""
_SRUN: Final = (
    _IN_SLURM
    + """\
    export MASTER_ADDR WORLD_SIZE={num_devices} LOCAL_WORLD_SIZE={ranks_per_node}
    # shellcheck disable=SC2016  # the ranks expand it
    exec srun -N "$NUM_NODES" -n {num_devices} --ntasks-per-node "$RANKS_PER_NODE" \\
        bash -c 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"; exec {python}"$@"' rank \\
        "${{PROGRAM[@]}}" "$@"
"""
)
_ACCELERATE: Final = """\
    exec accelerate launch --machine_rank "${{NODE_RANK:-0}}" \\
        --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "${{PROGRAM[@]}}" "$@"
"""
_SRUN_ACCELERATE: Final = (
    _IN_SLURM
    + """\
    # shellcheck disable=SC2016  # each node expands it
    exec srun -N "$NUM_NODES" -n "$NUM_NODES" --ntasks-per-node 1 \\
        bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' node \\
        --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" "${{PROGRAM[@]}}" "$@"
"""
)

Launches = tuple[tuple[str, str], ...]
"""The values of LAUNCH, the first by default, each with the lines of bash that it stands for."""

PYTHON_RANKS: Final[Launches] = (("torchrun", _TORCHRUN), ("srun", _SRUN))
"""PROGRAM is for Python; it is started once a rank."""
PROGRAM_RANKS: Final[Launches] = (*PYTHON_RANKS, ("once", '    exec "${{PROGRAM[@]}}" "$@"\n'))
"""PROGRAM is any; it is started once a rank, or once, if it starts its ranks by itself."""
ACCELERATE_NODES: Final[Launches] = (("accelerate", _ACCELERATE), ("srun", _SRUN_ACCELERATE))
"""PROGRAM is for `accelerate launch`, which is started once a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchScript:
    """The parts of a launch script in which trainers differ."""

    adapter: TrainerAdapter
    program: Sequence[str]
    """Lines of bash that set the array PROGRAM: the Python script or -m MODULE, with all
    arguments."""
    name: str = ""
    """Its file name; empty: the adapter's name."""
    setup: Sequence[str] = ()
    """Lines of bash that set the environment."""
    required: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Variables that the user must set, each with an example and with words for its value."""
    usage: Sequence[str] = ()
    """Further lines of the usage, without "#"."""
    arguments: Sequence[str] = ()
    """Arguments that the script needs, as an example."""
    launches: Launches = PYTHON_RANKS
    """How it can be started."""

    def job(
        self,
        source: ExportSource,
        *before: ExportFileRead,
        after: tuple[ExportFileRead, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> RenderedJob:
        """The script between the other files of a job, with the command line that runs it."""
        files = (*before, self._file(source), *after)
        return RenderedJob(files=files, commands=(self._command(source),), notes=notes)

    @property
    def _name(self) -> str:
        return self.name or f"{self.adapter.name}.sh"

    def _file(self, source: ExportSource) -> ExportFileRead:
        layout = source.job.layout
        cases = "".join(f"{name})\n{body}    ;;\n" for name, body in self.launches).format(
            no_python="--no-python " if self.launches is PROGRAM_RANKS else "",
            python="" if self.launches is PROGRAM_RANKS else "python ",
            num_devices=layout.num_devices,
            ranks_per_node=source.job.ranks_per_node,
        )
        checks = (f': "${{{name}:?set it to {what}}}"' for name, (_, what) in self.required.items())
        examples = self.required.items()
        content = template("launch.sh").format(
            head=commented(source.head),
            target_version=self.adapter.target_version,
            usage="".join(f"{name}={shlex.quote(example)} " for name, (example, _) in examples),
            usage_lines="".join(f"#   {line}\n" for line in self.usage),
            name=self._name,
            setup="\n".join(
                (*checks, *self.setup, *exported(self.adapter.environment(source.job)))
            ),
            program="\n".join(self.program),
            arguments="".join(f" {each}" for each in self.arguments),
            num_nodes=layout.num_nodes,
            ranks_per_node=source.job.ranks_per_node,
            default=self.launches[0][0],
            cases=cases.rstrip("\n"),
            names=" or ".join(name for name, _body in self.launches),
        )
        return ExportFileRead(name=self._name, content=content, executable=True)

    def _command(self, source: ExportSource) -> ExportCommandRead:
        num_nodes = source.job.layout.num_nodes
        when, variables = "here", [f"{name}={value}" for name, (value, _) in self.required.items()]
        if num_nodes > 1:
            when = f"in a Slurm allocation of {num_nodes} nodes"
            variables.append("LAUNCH=srun")
        environment = ["env", *variables] if variables else []
        words = [*environment, "bash", self._name, *self.arguments]
        return ExportCommandRead(when=when, words=words)


def template(name: str) -> str:
    """A file of an export, for `str.format` with what differs between jobs."""
    return (Path(__file__).parent / "templates" / f"{name}.txt").read_text(encoding="utf-8")


def commented(texts: Sequence[str]) -> str:
    """Texts as comments of a shell script, YAML, TOML or Python.

    Workers, programs and tables wrote parts of them. A text is divided at every end of a line that
    one of the languages knows. Other characters that cannot be shown are replaced: Python, YAML and
    TOML refuse control characters in comments.
    """
    divided = (line for text in texts for line in text.splitlines() or [""])
    return "\n".join(f"# {visible_line(line, len(line))}" for line in divided)


def head_of(adapter: TrainerAdapter, source: ExportSource) -> str:
    """The comments at the top of a file for a trainer, beside its script."""
    return commented((*source.head, f"Written for {adapter.target_version}."))


def exported(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Lines of bash that set environment variables."""
    return tuple(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
