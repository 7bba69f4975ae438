import pytest

from search_spaces.terminal.plurals import counted


@pytest.mark.parametrize(("number", "words"), [(0, "0 trials"), (1, "1 trial"), (21, "21 trials")])
def test_one_thing_is_no_plural(number: int, words: str) -> None:
    assert counted(number, "trial") == words
