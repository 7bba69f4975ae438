"""torchtitan's configuration, the model's shape as Python, and a launch script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from layout_tuner.trainers.adapter import TrainerAdapter
from layout_tuner.trainers.exports.export_source import ExportSource, RenderedJob
from layout_tuner.trainers.exports.exported import ExportFileRead
from layout_tuner.trainers.exports.launch_script import HERE, LaunchScript, head_of
from layout_tuner.trainers.torchtitan import (
    TORCHTITAN_0_2,
    TORCHTITAN_0_3,
    TORCHTITAN_MAIN,
    model_arguments_of_0_2,
)

_TOML_FILE: Final = "torchtitan.toml"
_MODEL_FILE: Final = "torchtitan_model.py"
_LAYOUT_FILE: Final = "torchtitan_layout.py"

# The comments are below the docstring: Python looks for the encoding in comments of lines 1 and 2.
_MODEL: Final = '''\
"""The model's shape, as a flavor of torchtitan's llama3."""

{head}

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

llama3_args["layout"] = TransformerModelArgs(
{arguments}
)
'''

_LAYOUT: Final = '''\
"""A layout and a model's shape as a configuration of torchtitan's Llama 3 trainer."""

{head}

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

DIM, HEADS, VOCABULARY = {hidden_size}, {num_heads}, {vocab_size}
IS_TIED = {tied_embeddings}


def model() -> llama3.Llama3Model.Config:
    rope = ComplexRoPE.Config(
        dim=DIM // HEADS, {longest}={seq_length}, theta={rotary_base}, scaling="none"
    )
    embedding_init = llama3._EMBEDDING_SKIP_INIT if IS_TIED else llama3._EMBEDDING_INIT
    return llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        enable_weight_tying=IS_TIED,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=embedding_init
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=DIM,
            out_features=VOCABULARY,
            param_init=llama3._output_linear_init(DIM),
        ),
        layers=llama3._build_llama3_layers(
            n_layers={num_layers},
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads={num_kv_heads},
            hidden_dim={ffn_hidden_size},
            rope=rope,
            attn_backend="flex",
        ),
    )


def layout() -> Trainer.Config:
    config = llama3_8b()  # its data, optimizer and schedule
    config.model_spec.flavor = "layout"
    config.model_spec.model = model()
    config.loss = ChunkedLossWrapper.Config(
        loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    )
{settings}
    config.activation_checkpoint = {activation_checkpoint}
    return config
'''


def torchtitan_0_2(source: ExportSource) -> RenderedJob:
    """A TOML file, and the model's shape as Python."""
    arguments = model_arguments_of_0_2(source.job.model)
    model = _MODEL.format(
        head=head_of(TORCHTITAN_0_2, source),
        arguments="\n".join(f"    {name}={value!r}," for name, value in arguments.items()),
    )
    toml = "\n".join(_toml_lines(TORCHTITAN_0_2.values(source.job)))
    return _rendered(
        TORCHTITAN_0_2,
        source,
        f'--job.config_file "$HERE/{_TOML_FILE}" --model.hf_assets_path "$TOKENIZER_DIR"',
        {_TOML_FILE: f"{head_of(TORCHTITAN_0_2, source)}\n{toml}\n", _MODEL_FILE: model},
    )


def _toml_lines(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Sections of strings, numbers and switches.

    TOML writes them as JSON does, but for two things: it has no pairs of surrogates, and refuses
    DEL as it is.
    """
    for section, values in sections.items():
        yield f"\n[{section}]"
        for key, value in values.items():
            written = json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
            yield f"{key} = {written}"


def _python_module(adapter: TrainerAdapter, source: ExportSource, *, longest: str) -> RenderedJob:
    job = source.job
    settings = [
        f"    config.{section}.{key} = {value!r}"
        for section, values in adapter.values(job).items()
        for key, value in values.items()
    ]
    content = _LAYOUT.format(
        head=head_of(adapter, source),
        longest=longest,
        settings="\n".join(settings),
        activation_checkpoint="FullAC.Config()" if job.layout.recompute == "full" else None,
        **job.model.to_mapping(),
    )
    return _rendered(
        adapter,
        source,
        '--module torchtitan_layout --config layout --hf_assets_path "$TOKENIZER_DIR"',
        {_LAYOUT_FILE: content},
    )


torchtitan_0_3 = partial(_python_module, TORCHTITAN_0_3, longest="max_seq_len")
torchtitan_main = partial(_python_module, TORCHTITAN_MAIN, longest="max_context_length")


def _rendered(
    adapter: TrainerAdapter, source: ExportSource, arguments: str, files: Mapping[str, str]
) -> RenderedJob:
    script = LaunchScript(
        adapter=adapter,
        name="torchtitan.sh",
        required={"TOKENIZER_DIR": ("/path/to/tokenizer", "a folder with tokenizer.json")},
        setup=(HERE, 'export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"'),
        program=(f"PROGRAM=(-m torchtitan.train {arguments})",),
    )
    written = (
        ExportFileRead(name=name, content=content, executable=False)
        for name, content in files.items()
    )
    return script.job(source, *written)
