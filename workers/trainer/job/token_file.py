"""Tokens from a flat file that is mapped into memory. Nothing here needs torch.

S is the sequence length. Sample i of the file is the S + 1 tokens from token i S on: samples
share one token, so that each token but the first is a target once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from search_spaces.model_shape import ModelShape
from search_spaces.reading import shown, whole_number_problem
from workers.trainer.errors import TokenFileInvalidError
from workers.trainer.fields import refuse_unknown_fields
from workers.trainer.shuffle import shuffled

DTYPES: Final = ("uint16", "uint32", "int32", "int64")
"""Types of token ids, little-endian."""

_LONGEST_HEADER: Final = 1 << 30
_LLM_C_HEADERS: Final = (20240520, 20240801)
"""First word of the token files of llm.c, which begin with 256 words that are no tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFileSettings:
    """Which file, and how it is read.

    Raises:
        TokenFileInvalidError: at construction, when a field is out of range.
    """

    tokens: str
    """The file's path."""
    dtype: str | None = None
    """Type of a token id; None: as the .npy file says."""
    skip_bytes: int = 0
    """Length of a header before the first token."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, str) or not self.tokens or "\0" in self.tokens:
            raise TokenFileInvalidError(f"tokens={shown(self.tokens)} is not a file's path")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise TokenFileInvalidError(
                f"dtype={shown(self.dtype)} is not one of {', '.join(DTYPES)}"
            )
        if problem := whole_number_problem(self.skip_bytes, low=0, high=_LONGEST_HEADER):
            raise TokenFileInvalidError(f"skip_bytes={problem}")
        if self.is_npy and self.skip_bytes:
            raise TokenFileInvalidError(
                f"skip_bytes={self.skip_bytes} is for flat files; {self.tokens} says where its "
                "tokens begin"
            )
        if self.dtype is None and not self.is_npy:
            raise TokenFileInvalidError(
                f"dtype is missing: {self.tokens} does not say what its tokens are; "
                f"give one of {', '.join(DTYPES)}"
            )

    @property
    def is_npy(self) -> bool:
        return self.tokens.endswith(".npy")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the settings from their fields by name.

        Raises:
            TokenFileInvalidError: a field is missing, unknown, or out of range.
        """
        refuse_unknown_fields(mapping, cls, TokenFileInvalidError, "field")
        if "tokens" not in mapping:
            raise TokenFileInvalidError("tokens, the path of the file, is missing")
        return cls(**mapping)


class TokenFile:
    """Samples of a token file in a seeded order, epoch after epoch.

    What a step trains on follows from the seed, the number of samples before it and the file.

    Args:
        settings: which file.
        shape: the model that is trained; its seq_length and vocab_size count.
        seed: the order of samples follows from it, another one in every epoch.
        global_batch_size: samples a step.
        first_step: the step that the next argument is about.
        first_sample: samples that were taken before that step.

    Raises:
        TokenFileInvalidError: the file can't be read, or holds less than one sample.
    """

    def __init__(
        self,
        settings: TokenFileSettings,
        shape: ModelShape,
        *,
        seed: int,
        global_batch_size: int,
        first_step: int = 0,
        first_sample: int = 0,
    ) -> None:
        self.path = settings.tokens
        self.tokens = _mapped(settings)
        self._seq_length, self._vocab_size, self._seed = shape.seq_length, shape.vocab_size, seed
        self._global_batch_size = global_batch_size
        self._first_step, self._first_sample = first_step, first_sample
        if len(self.tokens) <= shape.seq_length:
            raise TokenFileInvalidError(
                f"{self.path} holds {len(self.tokens)} tokens, and one sample takes "
                f"seq_length + 1 = {shape.seq_length + 1}; name a longer file, or check its dtype "
                f"({self.tokens.dtype}) and skip_bytes ({settings.skip_bytes})"
            )
        self.num_samples = (len(self.tokens) - 1) // shape.seq_length

    def samples(self, step: int, indices: range) -> NDArray[np.int64]:
        """Samples of a step's global batch by their index in it: seq_length + 1 tokens each.

        Raises:
            TokenFileInvalidError: a token's id is not below the model's vocab_size.
        """
        before = self._first_sample + (step - self._first_step) * self._global_batch_size
        starts = self._order(before + np.arange(indices.start, indices.stop)) * self._seq_length
        positions = starts[:, None] + np.arange(self._seq_length + 1)
        ids: NDArray[np.int64] = self.tokens[positions].astype(np.int64)
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            self._refuse(int(positions[outside][0]), int(ids[outside][0]))
        return ids

    def describe(self) -> dict[str, Any]:
        """What tells this file from another: the number of its tokens, and their type."""
        return {"number": len(self.tokens), "dtype": self.tokens.dtype.name}

    def _order(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which samples of the file are drawn as number so and so, counted over all epochs."""
        epochs, places = np.divmod(drawn, self.num_samples)
        order = np.empty_like(drawn)
        for epoch in np.unique(epochs):
            key = f"{self._seed}/{epoch}"
            chosen = epochs == epoch
            order[chosen] = shuffled(places[chosen], size=self.num_samples, key=key)
        return order

    def _refuse(self, position: int, token: int) -> None:
        raise TokenFileInvalidError(
            f"token {position} of {self.path} is {token}, outside the model's vocabulary of "
            f"vocab_size={self._vocab_size}; train a model with a larger one, or check the file's "
            f"dtype ({self.tokens.dtype})"
        )


def _mapped(settings: TokenFileSettings) -> NDArray[Any]:
    path = Path(settings.tokens)
    try:
        if settings.is_npy:
            return _mapped_npy(path, settings.dtype)
        return _mapped_flat(path, np.dtype(settings.dtype).newbyteorder("<"), settings.skip_bytes)
    except (OSError, ValueError, EOFError) as error:
        raise TokenFileInvalidError(f"the token file {path} can't be read: {error}") from error


def _mapped_npy(path: Path, dtype: str | None) -> NDArray[Any]:
    tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
        raise TokenFileInvalidError(
            f"{path} holds an array of {tokens.dtype} and shape {tokens.shape}; tokens are one "
            f"dimension of {', '.join(DTYPES)}"
        )
    if dtype is not None and dtype != tokens.dtype.name:
        raise TokenFileInvalidError(
            f"dtype={dtype!r}, and {path} holds {tokens.dtype.name}; leave dtype out"
        )
    return tokens


def _mapped_flat(path: Path, dtype: np.dtype[Any], skip_bytes: int) -> NDArray[Any]:
    with path.open("rb") as stream:
        first_word = int.from_bytes(stream.read(4), "little")
        num_bytes = stream.seek(0, 2) - skip_bytes
    if first_word in _LLM_C_HEADERS and skip_bytes == 0:
        raise TokenFileInvalidError(
            f"{path} begins with the header of llm.c's token files; say skip_bytes=1024"
        )
    if num_bytes < dtype.itemsize:  # numpy maps no empty file
        return np.empty(0, dtype)
    if num_bytes % dtype.itemsize:
        raise TokenFileInvalidError(
            f"{path} holds {num_bytes} bytes after skip_bytes={skip_bytes}, which are no whole "
            f"number of {dtype.name} tokens ({dtype.itemsize} bytes each); is that its dtype?"
        )
    return np.memmap(path, dtype, mode="r", offset=skip_bytes)
