"""What stands before the program in a command: launchers, containers, and commands like `time`.

The options of each are those of its manual page or parser: torch 2.13, DeepSpeed 0.19, Accelerate
1.15, Slurm 25.05, Open MPI 5, MPICH 4, Docker 28, Apptainer 1.4. Of a front with `values`, other
options have no value; of one with `switches`, other options have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from layout_tuner.search_spaces.models.foreign_words import words_of

FrontKind = Literal["wrapper", "container", "launcher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """A command that starts another, which follows its options."""

    kind: FrontKind = "wrapper"
    launcher: str = ""
    """Its name in `ProgramCommand.launcher`."""
    values: frozenset[str] | None = None
    """Options with a value in the next word; None: all but `switches`."""
    switches: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()
    """Options with two values."""
    subcommands: tuple[str, ...] = ()
    """Words before its options, at least one of which must follow; empty: none."""
    num_words: int = 0
    """Words between its options and the program: an image, a duration."""
    joins_short_values: bool = False
    """Whether `-N2` is `-N 2`."""

    def num_values(self, option: str) -> int:
        """Words behind an option that are its values."""
        if option in self.pairs:
            return 2
        if self.values is not None:
            return int(option in self.values)
        return int(option not in self.switches)


def _wrapper(values: str = "", num_words: int = 0) -> Front:
    return Front(values=words_of(values), num_words=num_words)


TORCHRUN: Final = Front(
    kind="launcher",
    launcher="torchrun",
    switches=words_of(
        """--standalone --no-python --no_python --run-path --run_path -m --module --use-env --use_env
        --virtual-local-rank --virtual_local_rank -h --help"""
    ),
)
DEEPSPEED: Final = Front(
    kind="launcher",
    launcher="deepspeed",
    switches=words_of(
        """--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid
        --bind_cores_to_rank --elastic_training -q --quiet -h --help"""
    ),
)
ACCELERATE: Final = Front(
    kind="launcher",
    launcher="accelerate",
    subcommands=("launch",),
    switches=words_of(
        """-q --quiet --cpu --multi_gpu --tpu --enable_cpu_affinity --dynamo_use_fullgraph
        --dynamo_use_dynamic --dynamo_use_regional_compilation --use_deepspeed --use_fsdp
        --use_parallelism_config --use_megatron_lm --same_network -m --module --no_python
        --tpu_cluster --no_tpu_cluster --tpu_use_sudo --downcast_bf16 --fp8_use_autocast_during_eval
        --debug --use_xpu --ipex -h --help"""
    ),
)
SRUN: Final = Front(
    kind="launcher",
    launcher="srun",
    joins_short_values=True,
    switches=words_of(
        """-l --label -u --unbuffered -K --kill-on-bad-exit -O --overcommit -s --oversubscribe -E
        --preserve-env -I --immediate -H --hold -k --no-kill -Q --quiet -v -vv -vvv --verbose -X
        --disable-status --exclusive --exact --whole --overlap --pty --multi-prog --spread-job
        --use-min-nodes --reboot --contiguous --nice -Z --no-allocate --test-only --async -W0
        --container-mount-home --no-container-mount-home --container-remap-root
        --no-container-remap-root --container-writable --container-readonly --container-entrypoint
        --no-container-entrypoint --propagate --interactive"""
    ),
)
MPIRUN: Final = Front(
    kind="launcher",
    launcher="mpirun",
    switches=words_of(
        """--allow-run-as-root -allow-run-as-root --tag-output -tag-output --oversubscribe
        -oversubscribe -v -V --verbose --report-bindings -report-bindings --display-map -display-map
        --display-allocation --nooversubscribe --nolocal --timestamp-output -l --bind-to-core
        --bynode --byslot --bycore --enable-recovery -q --quiet --do-not-launch -prepend-rank
        --prepend-rank -genvall --cpu-bind-none"""
    ),
    pairs=words_of("-mca --mca -pmca --pmca -gmca --gmca --prtemca --omca -genv -env"),
)
_DOCKER: Final = Front(
    kind="container",
    subcommands=("run", "exec"),
    num_words=1,
    switches=words_of(
        """-i -t -it -ti -d -dit -itd --rm --privileged --init --interactive --tty --detach --read-only
        -P --publish-all --no-healthcheck --oom-kill-disable --sig-proxy -q --quiet"""
    ),
)
_APPTAINER: Final = Front(
    kind="container",
    subcommands=("exec", "run"),
    num_words=1,
    switches=words_of(
        """--nv --rocm --nvccli -e --cleanenv -c --contain -C --containall --writable-tmpfs -w
        --writable --no-home --fakeroot -f --compat -i --ipc -p --pid -u --userns --uts --unsquash
        --allow-setuid --keep-privs --no-privs --no-init --no-nv --no-rocm --disable-cache --nohttps
        --vm --no-umask --no-eval -s --silent -q --quiet --sharens --underlay --no-https"""
    ),
)

FRONTS: Final[Mapping[str, Front]] = {
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "accelerate-launch": Front(
        kind="launcher", launcher="accelerate", switches=ACCELERATE.switches
    ),
    "srun": SRUN,
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun"), MPIRUN),
    **dict.fromkeys(("docker", "podman", "nvidia-docker", "podman-hpc"), _DOCKER),
    **dict.fromkeys(("apptainer", "singularity"), _APPTAINER),
    "enroot": Front(
        kind="container",
        subcommands=("start",),
        num_words=1,
        values=words_of("-c --conf -e --env -m --mount"),
    ),
    "ray": Front(subcommands=("job", "submit"), switches=words_of("--no-wait --verify")),
    "conda": Front(subcommands=("run",), values=words_of("-n --name -p --prefix")),
    "uv": Front(subcommands=("run",), values=words_of("--with --extra --group -p --python")),
    "exec": _wrapper("-a"),
    "nohup": _wrapper(),
    "command": _wrapper(),
    "setsid": _wrapper(),
    "time": _wrapper("-f --format -o --output"),
    "env": _wrapper("-u --unset -C --chdir"),
    "nice": _wrapper("-n --adjustment"),
    "sudo": _wrapper("-u --user -g --group"),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "timeout": _wrapper("-k --kill-after -s --signal", 1),
    "taskset": _wrapper("", 1),
    "numactl": _wrapper(
        "-N -m -C -i -p --cpunodebind --membind --physcpubind --interleave --preferred"
    ),
    "nsys": Front(subcommands=("profile", "launch")),
    "ncu": Front(switches=words_of("-f --force-overwrite")),
}

MODULES: Final[Mapping[str, Front]] = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
    "torch.distributed.launcher": TORCHRUN,
    "accelerate.commands.launch": FRONTS["accelerate-launch"],
    "deepspeed": DEEPSPEED,
    "deepspeed.launcher.runner": DEEPSPEED,
}
"""Launchers that are started with `python -m`."""

PYTHON_VALUES: Final = frozenset(("-X", "-W", "--check-hash-based-pycs"))
"""Options of Python with a value; `-m` and `-c` end them."""
