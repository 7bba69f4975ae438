"""Options of Megatron-Bridge's programs that may change a job are listed, or leave fields open."""

from __future__ import annotations

import pytest

from layout_tuner.trainers.found_jobs.found_job import FoundJob
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.found_jobs.recipes.bridge_command import read_command
from tests.layout_tuner.trainers.found_jobs.recipes.test_bridge import SAVED, read


def command(*words: str) -> FoundJob:
    text = ("/bridge/scripts/training/run_recipe.py", *words)
    found = tuple(Word(text=each, said=each, line=1) for each in text)
    job = read_command(ProgramCommand(words=found), JobFile(name="job.sh", text=" ".join(text)))
    assert job is not None
    return job


@pytest.mark.parametrize(
    "words",
    [("--optimizer_type", "muon"), ("optimizer.optimizer=dist_muon",)],
)
def test_another_optimizer_than_adam_is_named(words: tuple[str, ...]) -> None:
    job = command("--recipe", "llama3_8b_pretrain_config", *words)
    missed = [each.said for each in job.not_understood if "those of Adam" in each.why]
    assert missed == [" ".join(words)]
    known = command("--recipe", "llama3_8b_pretrain_config", "optimizer.optimizer=adam")
    assert not any("Adam" in each.why for each in known.not_understood)


@pytest.mark.parametrize(
    "words", ["-cv v2", "--config_variant v2", "-xy 3", "--nccl_ub true", "--tokendrop 1"]
)
def test_options_that_may_change_a_job_are_listed(words: str) -> None:
    job = command("-mr", "deepseek_v3", "-ng", "1024", "-g", "h100", *words.split())
    said = "-xy" if "-xy" in words else words  # its value may be a secret
    assert said in {each.said for each in job.not_understood}


def test_another_number_of_dense_layers_leaves_the_model_open() -> None:
    job = command("-mr", "qwen3_30b_a3b", "--first_k_dense_replace", "1")
    assert job.open_fields["model.num_dense_layers"].said == "--first_k_dense_replace 1"


def test_a_size_that_the_tokenizer_decides_is_named_without_spaces() -> None:
    job = command("--recipe", "llama3_8b_pretrain_config")
    assert job.open_fields["model.vocab_size"].said == "vocab_size"


@pytest.mark.parametrize(
    ("stated", "read_as", "listed"),
    [
        ("cpu_offloading: true\n  cpu_offloading_num_layers: 14", {"offload": "activations"}, []),
        (
            "cpu_offloading: true\n  cpu_offloading_num_layers: 4",
            {},
            ["model.cpu_offloading_num_layers: 4"],
        ),
        (
            "cpu_offloading: false\noptimizer:\n  optimizer_cpu_offload: true\n"
            "  optimizer_offload_fraction: 1.0\n  exp_avg_dtype: torch.bfloat16\n"
            "  exp_avg_sq_dtype: torch.bfloat16",
            {"offload": "optimizer", "optimizer_states": "bf16"},
            [],
        ),
        (
            "cpu_offloading: false\noptimizer:\n  exp_avg_dtype: torch.float8",
            {},
            ["optimizer.exp_avg_dtype: torch.float8"],
        ),
    ],
)
def test_levers_of_memory_are_read(stated: str, read_as: dict[str, str], listed: list[str]) -> None:
    key, *sections = stated.split("\noptimizer:")
    text = SAVED.replace("cpu_offloading: false", key)
    job = read(text + "".join(f"\noptimizer:{each}\n" for each in sections))
    levers = ("offload", "optimizer_states")
    assert {name: job.values[name] for name in levers if job.values.get(name)} == read_as
    assert [each.said for each in job.not_understood] == listed
