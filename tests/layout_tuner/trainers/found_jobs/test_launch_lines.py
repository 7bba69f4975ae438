"""Launchers and containers before a program, heads of batch scripts, and the ranks they state."""

from typing import Any

import pytest

from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand
from layout_tuner.trainers.found_jobs.scripts.shell_script import started_programs


def command(text: str) -> ProgramCommand:
    (found,) = started_programs(JobFile(name="job.sh", text=text))
    return found.command


def ranks(text: str) -> dict[str, Any]:
    return {each.field: each.value for each in command(text).ranks}


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("python -u train.py --tp 4", ""),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=2 torchrun train.py --tp 4", "torchrun"),
        ("torchrun --nnodes=2 --nproc-per-node 8 --tee 3 train.py --tp 4", "torchrun"),
        ("python3 -m torch.distributed.run --nproc_per_node 8 train.py --tp 4", "torchrun"),
        ("python -m torch.distributed.launch --use-env train.py --tp 4", "torchrun"),
        ("torchrun --nproc_per_node 8 -m train.py --tp 4", "torchrun"),
        ("torchrun --no-python --standalone train.py --tp 4", "torchrun"),
        ("srun -N 2 -l --mpi=pmix --container-image a:b python train.py --tp 4", "srun"),
        ("srun -N2 -n16 bash -c 'cd x; python train.py --tp 4'", "srun"),
        ('srun sh -lc "torchrun --nproc_per_node 8 train.py --tp 4"', "torchrun"),
        ("mpirun -np 16 --hostfile h -x A -mca btl tcp,self python train.py --tp 4", "mpirun"),
        ("deepspeed --num_gpus 8 --hostfile=h --no_local_rank train.py --tp 4", "deepspeed"),
        ("accelerate launch --config_file a.yaml --multi_gpu train.py --tp 4", "accelerate"),
        ("nohup torchrun train.py --tp 4 > log 2>&1 &", "torchrun"),
        ("exec torchrun train.py --tp 4", "torchrun"),
        ("time numactl --membind 0 -N 1 python train.py --tp 4", ""),
        ("timeout -k 5 1h torchrun train.py --tp 4 |& tee log", "torchrun"),
        ("nsys profile -t cuda,nvtx -o x python train.py --tp 4", ""),
        ("env -u B A=1 python train.py --tp 4", ""),
        ("apptainer exec --nv -B /a:/b image.sif torchrun train.py --tp 4", "torchrun"),
        (
            "docker run --rm -it --gpus all -v a:b i:1 bash -c 'torchrun train.py --tp 4'",
            "torchrun",
        ),
        ("ray job submit --address=http://h:1 --no-wait -- python3 train.py --tp 4", ""),
        ("L='torchrun --nnodes 2'\n$L train.py --tp 4", "torchrun"),
        ("D=(--nnodes 2 --node_rank $R)\ntorchrun ${D[@]} train.py --tp 4", "torchrun"),
    ],
)
def test_the_program_stands_behind_its_launchers(line: str, launcher: str) -> None:
    found = command(line)

    assert [each.text for each in found.words] == ["train.py", "--tp", "4"]
    assert found.launcher == launcher


@pytest.mark.parametrize("line", ["mkdir -p x", "python -c 'x'", "echo torchrun train.py", "cat x"])
def test_other_commands_start_no_program(line: str) -> None:
    assert started_programs(JobFile(name="job.sh", text=line)) == []


def test_the_container_is_kept() -> None:
    found = command("singularity exec --nv i.sif python train.py")

    assert found.container == ("singularity", "exec", "--nv", "i.sif")


def test_options_of_the_launcher_are_kept() -> None:
    (option,) = command("accelerate launch --config_file a.yaml train.py").launcher_options

    assert option.name == "--config_file"
    assert [each.text for each in option.values] == ["a.yaml"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 8 t.py", {"num_nodes": 2, "devices_per_node": 8}),
        ("torchrun --nnodes=2:2 --nproc-per-node=4 t.py", {"num_nodes": 2, "devices_per_node": 4}),
        ("torchrun --nproc_per_node 8 t.py", {"num_nodes": 1, "devices_per_node": 8}),
        ("srun -N 2 --ntasks-per-node 8 python t.py", {"num_nodes": 2, "devices_per_node": 8}),
        ("srun -n 16 python t.py", {"num_devices": 16}),
        ("#SBATCH --nodes=1\ntorchrun --nproc_per_node 8 t.py", {"num_nodes": 1, "devices_per_node": 8}),
        ("export PET_NNODES=4\ntorchrun --nproc_per_node 8 t.py", {"num_nodes": 4, "devices_per_node": 8}),
        ("mpirun -np 16 python t.py", {"num_devices": 16}),
        ("deepspeed --num_nodes 2 --num_gpus 4 t.py", {"num_nodes": 2, "devices_per_node": 4}),
        ("accelerate launch --num_processes 16 --num_machines 2 t.py", {"num_devices": 16, "num_nodes": 2}),
        (
            "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=h100:8\n"
            "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_PER_NODE t.py",
            {"num_nodes": 2, "devices_per_node": 8},
        ),
        (
            "#!/bin/bash\n#SBATCH -N 4 # four\n##SBATCH --nodes=9\n#SBATCH --gres=gpu:a100:8\n"
            "#SBATCH --ntasks-per-node=8\nsrun python t.py",
            {"num_nodes": 4, "devices_per_node": 8},
        ),
        (
            "#SBATCH -N4 --ntasks-per-node 8\nN=$((SLURM_NTASKS / 8))\n"
            "torchrun --nnodes=$N --nproc_per_node=$SLURM_NTASKS_PER_NODE t.py",
            {"num_nodes": 4, "devices_per_node": 8},
        ),
        ("G=8\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=$G\ntorchrun --nnodes \\$SLURM_NNODES --nproc_per_node $G t.py\nEOF", {"num_nodes": 2, "devices_per_node": 8}),
        ("#SBATCH --nodes=4\nsrun -N 2 --ntasks-per-node=8 python t.py", {"num_nodes": 2, "devices_per_node": 8}),
        ("#SBATCH --nodes=4\necho\n#SBATCH --nodes=9\nsrun python t.py", {"num_nodes": 4}),
        ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\ntorchrun --nnodes $W --nproc_per_node gpu t.py", {"num_nodes": 2, "devices_per_node": 8}),
    ],
)  # fmt: skip
def test_ranks_are_those_of_launcher_and_head(script: str, expected: dict[str, int]) -> None:
    assert ranks(script) == expected


@pytest.mark.parametrize(
    ("line", "field", "said"),
    [
        ("torchrun --nnodes $WORLD_SIZE --nproc_per_node 8 t.py", "num_nodes", "--nnodes $WORLD_SIZE"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 t.py", "num_nodes", "--nnodes 1:4"),
        ("torchrun --nnodes 1 --nproc_per_node gpu t.py", "devices_per_node", "--nproc_per_node gpu"),
        ("#SBATCH --nodes=4\nsrun torchrun --nproc_per_node 8 t.py", "num_nodes", "#SBATCH --nodes=4"),
        ("#SBATCH --gpus-per-node=8\ntorchrun t.py", "devices_per_node", "#SBATCH --gpus-per-node=8"),
        ("D='--nproc_per_node 8 --rdzv_id $I'\n[ $M ] && D=\"$D --nnodes 4\" || D=\"$D --nnodes 1\"\ntorchrun $D t.py", "num_nodes", "--nnodes 1"),
        ("#SBATCH --nodes=<N>\nsrun python t.py", "num_nodes", "#SBATCH --nodes=<N>"),
        ("deepspeed --include=worker-[0-3] t.py", "num_devices", "--include=worker-[0-3]"),
    ],
)  # fmt: skip
def test_ranks_that_are_not_known_are_open(line: str, field: str, said: str) -> None:
    found = command(line)

    assert field not in {each.field for each in found.ranks}
    assert (field, said) in {(each.field, each.said) for each in found.not_understood}


def test_launchers_with_unknown_words_have_no_default_ranks() -> None:
    found = command("torchrun $DISTRIBUTED_ARGS train.py --tp 4")

    assert found.program == "train.py"
    assert found.ranks == ()
    assert [each.said for each in found.not_understood] == ["$DISTRIBUTED_ARGS"]


def test_ranks_have_the_place_of_their_literal() -> None:
    text = "#SBATCH --nodes=2\nG=8\nsrun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=$G t.py"
    places = {each.field: each.place for each in command(text).ranks}

    assert [text[each.start : each.end] for each in places.values() if each] == ["2", "8"]
    assert [each.line for each in places.values() if each] == [1, 2]
