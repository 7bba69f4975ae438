"""Tables show what users wrote as they wrote it."""

from __future__ import annotations

import pytest

from api.commands.display import print_table


@pytest.mark.parametrize("text", ["[/dev/shm full]", "[ecc] errors", "[/x]", "[bold]b", ":smile:"])
def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str], text: str) -> None:
    print_table(["name", ">number"], [[text, "1"]], title=f"of {text}")
    said = capsys.readouterr().out
    assert said.count(text) == 2
