"""Counts the cases of each section when pytest has collected them, before any are left out."""

import pytest

from tests.attack import counted

CASES = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[CASES] = counted(items)


@pytest.fixture
def cases(request):
    """{file name: cases} of the sections that were collected whole."""
    if any("::" in str(argument) for argument in request.config.args):
        pytest.skip("single tests were asked for, so nothing can be counted")
    return request.config.stash[CASES]
