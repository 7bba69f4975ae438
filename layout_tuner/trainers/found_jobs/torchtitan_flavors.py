"""The models that torchtitan has under a name and a flavor.

Sources: torchtitan 0.2.2, `models/*/__init__.py` and `models/*/model/args.py`; those of llama2 are
of `models/llama/__init__.py` until January 2025.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.trainers.found_jobs.known_models import known_model

_Widths = tuple[int, int, int, int, int]
"""Layers, hidden size, width of the feed-forward or of an expert, query heads, key heads."""


def _shape(widths: _Widths, **more: Any) -> dict[str, Any]:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads")
    return {
        "family": "llama",
        "tied_embeddings": False,
        **dict(zip(names, widths, strict=True)),
        **more,
    }


def _published(name: str, **changes: Any) -> dict[str, Any]:
    """The fields of a published model, of which torchtitan's has some otherwise."""
    shape = known_model(name)
    assert shape is not None, "it is known under its name"
    fields = shape.to_mapping() | changes
    return {field: each for field, each in fields.items() if field not in ("name", "seq_length")}


def _same(family: str, *flavors: str) -> dict[str, dict[str, Any]]:
    """Flavors that have the shapes of published models."""
    return {flavor: _published(f"{family}-{flavor}") for flavor in flavors}


_LLAMA_4: Final = {"17bx16e": "llama-4-scout", "17bx128e": "llama-4-maverick"}
_IROPE: Final = "attention in chunks and layers without rotary positions"

FLAVORS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "llama2": _same("llama2", "7B", "13B", "70B"),
    "llama3": {
        "debugmodel": _shape((6, 256, 768, 16, 16), vocab_size=2048, rotary_base=5e5),
        **_same("llama3", "8B", "70B", "405B"),
    },
    "llama4": {
        f"{flavor}{ending}": _published(name, lacks=_IROPE if ending else "")
        for flavor, name in _LLAMA_4.items()
        for ending in ("", "_irope")
    },
    "qwen3": {
        **_same("qwen3", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B"),
        "235B-A22B": _published("qwen3-235B-A22B", rotary_base=5e6),
    },
    "gpt_oss": _same("gpt_oss", "20b", "120b"),
    "deepseek_v3": {
        "16B": _published("deepseek-v2-lite"),
        "236B": _published("deepseek-v2"),
        "671B": _published("deepseek-v3", num_mtp_layers=0),
    },
}
"""Fields of shapes by name and flavor, without name and sequence length."""

SAME_ATTENTION: Final = ("_flex", "_varlen", "_flex_attn", "_varlen_attn")
"""Endings of flavors that have another attention kernel and the same shape."""

OTHER_MODELS: Final[Mapping[str, str]] = {
    "flux": "it is no language model",
    "vlm": "it has a tower for pictures",
}
"""Why flavors of some models that `FLAVORS` leaves out have no shape."""


_ARGUMENTS: Final = {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of"),
    *("ffn_dim_multiplier", "norm_eps", "rope_theta", "max_seq_len", "depth_init", "attn_type"),
    *("attn_mask_type", "eos_id"),
}
"""Of `TransformerModelArgs` of llama3, all that the shape follows from or that it leaves alone."""


def shape_of_flavor(source: str, flavor: str) -> dict[str, Any]:
    """The shape of a flavor that a module adds to llama3, by literal arguments.

    The module has `llama3_args[flavor] = TransformerModelArgs(...)`, or that value in a dictionary.

    Raises:
        KeyError: there is no such flavor, or an argument is missing or not known.
        SyntaxError, ValueError, TypeError, ArithmeticError: it is no Python, or arguments are no
            literals, or none that a model can have.
    """
    found: ast.expr | None = None
    for node in ast.walk(ast.parse(source)):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Assign):
            targets = [each for each in node.targets if isinstance(each, ast.Subscript)]
            pairs = [(each.slice, node.value) for each in targets]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        for key, value in pairs:
            if isinstance(key, ast.Constant) and key.value == flavor:
                found = value
    if (
        not isinstance(found, ast.Call)
        or found.args
        or "TransformerModelArgs" not in (ast.unparse(found.func))
    ):
        raise KeyError(flavor)
    return _shape_of({str(each.arg): ast.literal_eval(each.value) for each in found.keywords})


def _shape_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a shape that `TransformerModelArgs` of llama3 has, with its defaults.

    The feed-forward's width is that of `models/llama3/model/model.py`, FeedForward: 8 h / 3, times
    `ffn_dim_multiplier`, up to a multiple of `multiple_of`, each cut to a whole number.
    """
    if unknown := arguments.keys() - _ARGUMENTS:
        raise KeyError(*unknown)
    values = {"multiple_of": 256, "rope_theta": 10000.0, "vocab_size": 128256, **arguments}
    hidden, heads = values["dim"], values["n_heads"]
    ffn = int(2 * 4 * hidden / 3)
    if values.get("ffn_dim_multiplier") is not None:
        ffn = int(values["ffn_dim_multiplier"] * ffn)
    multiple = values["multiple_of"]
    widths = (
        values["n_layers"],
        hidden,
        -(-ffn // multiple) * multiple,
        heads,
        values.get("n_kv_heads") or heads,
    )
    return _shape(widths, vocab_size=values["vocab_size"], rotary_base=float(values["rope_theta"]))
