"""A plugin for pytest: fp32 products go to the library that this processor would not choose."""

import functools

from layout_tuner.workers.trainer.model import matrix_products


def pytest_configure() -> None:
    other = not matrix_products.prefers_onednn()
    matrix_products.prefers_onednn = functools.cache(lambda: other)
