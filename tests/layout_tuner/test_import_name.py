"""`from layout_tuner import ...`: what it offers, what it imports, and when."""

import inspect
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

import layout_tuner
from layout_tuner.client.clients import Client
from layout_tuner.version import version
from tests.kit.python_process import printed_by
from tests.layout_tuner.client.samples import IMPORTED_LATE, described

THIRD_PARTY = {"click", "httpx", "httpx_sse", "numpy", "pydantic", "tenacity", "yaml"}
OURS_AT_THE_TOP = {"api", "results_db", "search_spaces", "tuner", "workers"}


HEAVY = {"sqlalchemy", "alembic", "fastapi", "starlette", "uvicorn", "scipy", "torch", "ray"}
PROGRAM = """
import sys, layout_tuner
print(*{name.partition(".")[0] for name in sys.modules})
from layout_tuner import Client, CampaignDetail, TrialFilter
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_importing_it_imports_nothing_and_its_client_what_the_base_install_has() -> None:
    alone, with_client = (set(line.split()) for line in printed_by(PROGRAM).splitlines())
    assert "layout_tuner" in alone
    assert not alone & (THIRD_PARTY | OURS_AT_THE_TOP | {"asyncio"})
    assert {"httpx", "pydantic"} <= with_client
    assert not with_client & HEAVY


PREDICTING = """
import sys, layout_tuner
plan = layout_tuner.plan({"name": "x", "model": "tiny", "cluster": "local-cpu",
    "space": {"global_batch_size": 8}, "budget": {"trials": 3}})
one = layout_tuner.estimate("tiny", {"dp": 2, "global_batch_size": 8})
assert plan.layouts and one.tokens_per_s > 0
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_predictions_need_neither_a_client_nor_more_than_the_base_install() -> None:
    imported = set(printed_by(PREDICTING).split())
    assert {"layout_tuner", "numpy", "yaml"} <= imported
    assert not imported & (HEAVY | {"click", "httpx", "pydantic"})


def test_every_name_is_there_and_is_kept() -> None:
    for name in layout_tuner.__all__:
        assert getattr(layout_tuner, name) is vars(layout_tuner)[name]
    assert set(layout_tuner.__all__) <= set(dir(layout_tuner))
    assert layout_tuner.__version__ == version()
    assert list(layout_tuner.__all__) == sorted(layout_tuner.__all__)


def test_an_unknown_name_is_an_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'layout_tuner' has no attribute 'Clint'"):
        layout_tuner.Clint  # noqa: B018


def documents_of_calls() -> Iterator[type[BaseModel]]:
    """The documents that the client's methods return."""
    for name in described():
        returned = typing.get_type_hints(getattr(Client, name), localns=IMPORTED_LATE)["return"]
        for answer in (returned, *typing.get_args(returned)):
            if inspect.isclass(answer) and issubclass(answer, BaseModel):
                yield answer


def test_every_document_that_the_client_returns_can_be_named() -> None:
    documents = {document.__name__: document for document in documents_of_calls()}
    assert len(documents) > 20
    for name, document in documents.items():
        assert getattr(layout_tuner, name) is document
