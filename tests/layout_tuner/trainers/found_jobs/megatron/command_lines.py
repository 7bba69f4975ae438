"""Commands of Megatron's family for tests."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.found_jobs.found_job import FoundJob
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.megatron.megatron_jobs import read_command
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand, Word
from layout_tuner.trainers.shapes import core_fields

LLAMA: Final = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 128256"
)


GPT: Final = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048"
)


PLACED: Final = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--global-batch-size 64 --bf16"
)


MOE: Final = (
    f"{LLAMA} {PLACED} --sequence-parallel --num-experts 64 --moe-router-topk 6 "
    "--moe-ffn-hidden-size 1408 --moe-grouped-gemm"
)


def layout_in_file(job: TrainerJob) -> Layout:
    """The layout as a file of the job states it.

    The pattern of a hybrid has the layers of each stage alone. A split that counts embedding and
    head, but divides the layers as an even one, is read as that one.
    """
    layout, model = job.layout, job.model
    even = replace(layout, pipeline_split="layers")
    if not core_fields.is_hybrid(model) or model.num_layers % (layout.pp * layout.vpp):
        return layout
    patterns = [core_fields.hybrid_pattern(each, model) for each in (layout, even)]
    return even if patterns[0] == patterns[1] and not layout.is_written_out else layout


def words_of(text: str) -> tuple[Word, ...]:
    """The words of a command line; `?NAME` stands for a variable that is not known."""
    return tuple(
        Word(text=None, said=f"${word[1:]}", line=3, why=f"{word[1:]} is not assigned")
        if word.startswith("?")
        else Word(text=word, said=word, line=3)
        for word in shlex.split(text)
    )


def found(options: str, program: str = "pretrain_gpt.py", **more: Any) -> FoundJob:
    command = ProgramCommand(words=words_of(f"{program} {options}"), **more)
    job = read_command(command, JobFile(name="job.sh", text=options))
    assert job is not None
    return job


def open_of(job: FoundJob) -> set[str]:
    return {each.field for each in job.not_understood}
