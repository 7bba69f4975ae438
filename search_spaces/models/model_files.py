"""Models in files, for clients: our own description, or the config.json of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from layout_tuner.documents.json_and_yaml import described, file_named, read_file, read_json
from layout_tuner.documents.limits import name_problem, text_problem
from layout_tuner.documents.reading import read_mapping, refuse_unknown, shown, why_unreadable
from layout_tuner.errors import DocumentMalformedError, ModelShapeInvalidError, SearchSpaceError
from layout_tuner.search_spaces.models.config_json import is_config_json, shape_of_config

MAX_BYTES: Final = 1 << 20
"""Most bytes of a config.json: most have one or two thousand, and some list quantized layers."""

_CONFIG: Final = ("config", "seq_length", "name")
_HAS_ITS_OWN: Final = "the model {} has its own sequence length: leave the stated {} out"
_NO_CONFIG: Final = (
    "it is no config.json of Hugging Face, which has model_type or architectures; a shape of our own "
    "has its sequence length in it"
)


def described_model(
    named: object, *, seq_length: int | None = None, folder: Path | None = None
) -> Any:
    """The description of a model: that of a file where it is one, or names one as `config`.

    A config.json is described by the fields of its shape. Anything else, such as the name of a
    preset, is returned as it is.

    Args:
        named: a path, or a text that ends as the name of a file does; a mapping; any other value.
        seq_length: tokens per sequence, which a config.json does not say.
        folder: where a relative `config` is looked up; None: where the process runs.

    Raises:
        SearchSpaceError: the file cannot be read, or is refused; the message begins with it.
    """
    if isinstance(named, Mapping) and "config" in named:
        stated = read_mapping(named, ModelShapeInvalidError, "the model")
        refuse_unknown(stated, _CONFIG, ModelShapeInvalidError, "field beside config")
        path, length = stated["config"], stated.get("seq_length", seq_length)
        if not isinstance(path, str | Path) or not str(path):
            raise ModelShapeInvalidError(f"config={shown(path)} is not the path of a file")
        path = (folder or Path()) / path
        document = _read(path)
        if not is_config_json(document):
            raise ModelShapeInvalidError(f"{path}: {_NO_CONFIG}")
        return _shape_of(document, path, length, stated.get("name"))
    file = named if isinstance(named, Path) else file_named(named)
    if file is not None:
        return model_of_file(file, seq_length=seq_length)
    if seq_length is not None:
        raise ModelShapeInvalidError(_HAS_ITS_OWN.format(shown(named), seq_length))
    return described(named)


def is_config(named: object) -> bool:
    """Whether a model is described by a config.json, which does not say the sequence length.

    Raises:
        SearchSpaceError: the file cannot be read, or is refused.
    """
    if isinstance(named, Mapping):
        return "config" in named
    file = file_named(named)
    return file is not None and is_config_json(_read(file))


def with_model(document: Any, folder: Path | None = None) -> Any:
    """A campaign's document with the description of a model in place of a `config` that names it.

    Raises:
        SearchSpaceError: the file cannot be read, or is refused.
    """
    model = document.get("model") if isinstance(document, Mapping) else None
    if not isinstance(model, Mapping) or "config" not in model:
        return document
    try:
        return {**document, "model": described_model(model, folder=folder)}
    except SearchSpaceError as error:
        raise error.within("model") from error


def model_of_file(path: Path, *, seq_length: int | None = None, name: str | None = None) -> Any:
    """The description in a file; that of a config.json is the fields of its shape.

    `name` is that of the shape, instead of one that the file or its folder has.

    Raises:
        SearchSpaceError: as for `described_model`.
    """
    return _description(_read(path), path, seq_length, name)


def model_of_content(content: bytes, path: Path, *, seq_length: int | None = None) -> Any:
    """As `model_of_file`, of a JSON file that was uploaded under this path."""
    return _description(_read_content(content, path), path, seq_length, None)


def _description(document: Any, path: Path, seq_length: int | None, name: str | None) -> Any:
    if is_config_json(document):
        return _shape_of(document, path, seq_length, name)
    if seq_length is not None:
        raise ModelShapeInvalidError(f"{path}: {_NO_CONFIG}; leave the stated {seq_length} out")
    return document


def _read(path: Path) -> Any:
    """The document in a file: of a JSON file as Hugging Face writes it."""
    if path.suffix.lower() != ".json":
        return read_file(path)
    try:
        with path.open("rb") as file:
            return _read_content(file.read(MAX_BYTES + 1), path)
    except (OSError, ValueError) as error:
        if isinstance(error, SearchSpaceError):
            raise
        raise DocumentMalformedError(f"{path}: cannot be read: {why_unreadable(error)}") from error


def _read_content(content: bytes, path: Path) -> Any:
    if len(content) > MAX_BYTES:
        raise ModelShapeInvalidError(
            f"{path}: it has more than 1 MB, and a config.json has some thousand bytes; give the file "
            "with the model's sizes, not that with its weights"
        )
    if not content.strip():
        raise DocumentMalformedError(f"{path}: is empty")
    try:
        document = read_json(content, text_rule=text_problem, constants=_marked)
        return document if is_config_json(document) else read_json(content)
    except DocumentMalformedError as error:
        raise type(error)(f"{path}: {error}") from error


def _marked(constant: str) -> Any:
    """NaN or infinity, as transformers 5 writes them; refused in the fields of a shape."""
    return {"__float__": constant}


def _shape_of(
    document: Mapping[str, Any], path: Path, seq_length: int | None, name: str | None
) -> dict[str, Any]:
    try:
        shape = shape_of_config(
            document, seq_length=seq_length, name=name or model_name(document, path)
        )
    except SearchSpaceError as error:
        raise type(error)(f"{path}: {error}") from error
    return shape.to_mapping()


def model_name(document: Mapping[str, Any], path: Path) -> str:
    """The name of a model: that in the file, or that of its folder or of the file itself."""
    inside = document.get("_name_or_path")
    names = [inside.rstrip("/").rpartition("/")[2] if isinstance(inside, str) else ""]
    names += [path.absolute().parent.name] if path.name == "config.json" else [path.stem]
    return next((each for each in names if name_problem(each) is None), "custom")
