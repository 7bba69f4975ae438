import pytest

from search_spaces.terminal.plurals import counted


@pytest.mark.parametrize(("number", "words"), [(0, "0 trials"), (1, "1 trial"), (21, "21 trials")])
def test_a_count_of_one_is_singular(number: int, words: str) -> None:
    assert counted(number, "trial") == words
