from __future__ import annotations

import pytest

from api.commands_reference import CHECKED_IN, commands_text


def test_the_checked_in_reference_is_that_of_the_commands() -> None:
    if CHECKED_IN.read_text(encoding="utf-8") != commands_text():
        pytest.fail(
            "the commands are not as docs/reference/commands.md describes them: run `make reference`, "
            "and look at what changes for users"
        )


def test_the_reference_names_commands_options_and_defaults() -> None:
    text = commands_text()
    assert "## layout-tuner campaign submit" in text
    assert "layout-tuner campaign submit [OPTIONS] FILE" in text
    assert "- `--tp INTEGER`: Tensor-parallel ranks. Default: `1`." in text
    assert "`--share-nodes / --no-share-nodes`" in text
