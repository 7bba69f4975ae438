"""The size of the vocabulary: the tokenizer's, padded as Megatron pads it.

Sizes of tokenizers by name: GPT-2's vocab.json has 50,257 entries; of the others they are the
lengths of the tokenizers that Hugging Face publishes under these names, special tokens included
(tokenizer.json and tokenizer_config.json, 2026): Llama 1 and 2 and Mistral 7B v0.1 32,000, Llama 3
128,256, Qwen2 151,646, Qwen2.5 151,665, Qwen3 151,669, GPT-NeoX 50,277. Megatron's tiktoken takes
2^17 entries (megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from layout_tuner.trainers.found_jobs.megatron.megatron_options import Arguments

_NAME: Final = "model.vocab_size"
_DIVISIBLE: Final = 128
"""--make-vocab-size-divisible-by, where it is not stated; the product with tp counts."""

_DEGREES: Final = (1, 2, 4, 8)
"""Those of tp that are tried where it is not known: the size may be the same with all."""
_PATHS: Final = ("--tokenizer-model", "--tokenizer-name-or-path", "--vocab-file")

_TAKING_SIZES: Final = ("", "NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer")
"""Types of tokenizers whose size --vocab-size is; others have that of their files."""

_OF_TYPES: Final[Mapping[str, int]] = {
    "GPT2BPETokenizer": 50_257,
    "Llama2Tokenizer": 32_000,
    "TikTokenizer": 1 << 17,
}
_OF_NAMES: Final[Mapping[str, int]] = {
    r"(meta-)?llama-?(1-|2-?)?(7|13|30|33|65|70)b": 32_000,
    r"(meta-)?llama-?2": 32_000,
    r"(meta-)?llama-?3(\.[0-3])?": 128_256,
    r"mistral-7b-v0\.1|mistral-7b-instruct-v0\.[12]|mixtral-8x7b": 32_000,
    r"qwen-?2\.5": 151_665,
    r"qwen-?2": 151_646,
    r"qwen-?3": 151_669,
    r"gpt-?2": 50_257,
    r"gpt-neox": 50_277,
}
"""By the beginning of a part of the path or of the published name; the first that fits counts."""
_NAME_ENDS: Final = (
    r"(?![\w.]|-(?!(?:hf|chat|instruct|base|tokenizer|v\d[\d.]*|[\d.]+b)(?![^\W\d]|\.model)))"
)
"""What may follow: other words tell of a vocabulary that was changed."""


def read_vocabulary(arguments: Arguments) -> None:
    """Notes `model.vocab_size`, after `tp`; it is open where no option or known name says it."""
    arguments.is_given(
        "--vocab-size", "--make-vocab-size-divisible-by", "--tokenizer-type", *_PATHS
    )
    if arguments.whole(_NAME, "--padded-vocab-size") is not None:
        return
    kind = arguments.text(_NAME, "--tokenizer-type") or ""
    multiple = arguments.whole(_NAME, "--make-vocab-size-divisible-by", notes=False) or _DIVISIBLE
    if arguments.is_given("--disable-pad-vocab-size", "--no-pad-vocab-size"):
        multiple = 0
    if arguments.findings.is_open(_NAME):
        return
    size = arguments.whole(_NAME, "--vocab-size", notes=False)
    if arguments.findings.is_open(_NAME):
        return
    option = arguments.options.get("--vocab-size")
    if option is not None and size is not None and kind in _TAKING_SIZES:
        if kind == "NullTokenizer" and arguments.trainer == "Megatron-DeepSpeed":
            size += 1  # a token of its own
        if (padded := _padded(arguments, size, multiple)) is not None:
            arguments.note(_NAME, padded, option, option.values[0] if padded == size else None)
        return
    if not kind and (not arguments.program or arguments.program.startswith("pretrain_")):
        kind = "GPT2BPETokenizer"  # pretrain_gpt.py and its relatives take it
    given = (arguments.options[each].values for each in _PATHS if each in arguments.options)
    path = next((each[0].text or "" for each in given if each), "")
    known, why = _known_size(kind, path)
    if known is None and size is not None:
        known, why = size, f"--vocab-size, which a {kind} does not read,"
    if known is None:
        said = f"--tokenizer-type {kind}" if kind else "no --tokenizer-type"
        said += f" --tokenizer-model {path}" if path else ""
        arguments.findings.miss(said, "the size of its vocabulary is not in the file", name=_NAME)
    elif (padded := _padded(arguments, known, multiple)) is not None:
        product = multiple * (arguments.findings.value("tp") or 1)
        pads = f", padded to a multiple of {product}" if padded != known else ""
        arguments.findings.assume(_NAME, padded, f"{why} has {known} tokens{pads}")


def _padded(arguments: Arguments, size: int, multiple: int) -> int | None:
    """The size up to a multiple; None: it depends on tp, which is not known, and is open now.

    A `multiple` of 0 pads nothing.
    """
    if not multiple:
        return size
    arguments.findings.vocabulary = size, multiple
    tp = arguments.findings.value("tp")
    multiples = [multiple * each for each in ((tp,) if tp else _DEGREES)]
    sizes = {-(-size // each) * each for each in multiples}
    if len(sizes) == 1:
        return sizes.pop()
    arguments.findings.miss("no tp", "the vocabulary is padded to a multiple of it", name=_NAME)
    return None


def _known_size(kind: str, path: str) -> tuple[int | None, str]:
    path = path.lower().replace("_", "-")
    is_other = bool(path) and kind == "Llama2Tokenizer"
    if kind == "GPT2BPETokenizer":
        is_other = bool(path) and re.search(r"gpt-?2(?!\d)", path) is None
    else:
        for pattern, size in _OF_NAMES.items():
            for part in path.split("/"):
                if re.match(rf"({pattern}){_NAME_ENDS}", part):
                    return size, f"the tokenizer of {part}"
    return None if is_other else _OF_TYPES.get(kind), f"a {kind}"
