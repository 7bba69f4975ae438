"""The product's outside is as the golden files have it."""

from __future__ import annotations

import difflib

import pytest

from tests.golden.documents import DOCUMENTS, EXPECTED, REWRITE, file_of, text_of


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_document_is_as_its_golden_file(name: str) -> None:
    expected = file_of(name).read_text(encoding="utf-8")
    found = text_of(name)
    if found != expected:
        lines = expected.splitlines(), found.splitlines()
        difference = difflib.unified_diff(*lines, "expected", "found", n=1, lineterm="")
        kind = "users notice a change here" if name.startswith("structure") else "wording"
        pytest.fail(
            f"{name} differs ({kind}); if the change is wanted, run `{REWRITE}` and commit the "
            "files:\n" + "\n".join(difference),
            pytrace=False,
        )


def test_every_golden_file_belongs_to_a_document() -> None:
    assert set(EXPECTED.rglob("*.*")) == {file_of(name) for name in DOCUMENTS}
