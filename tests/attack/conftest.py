"""Counts the cases of each section when pytest has collected them, before any are left out."""

import pytest

from tests.attack import collected, counted, sections

CASES = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[CASES] = counted(items)


@pytest.fixture
def cases(request):
    """{file name: cases} of all sections, also where this run has but some of them."""
    known = request.config.stash[CASES]
    some = any("::" in str(argument) for argument in request.config.args)
    return collected() if some or sections().keys() - known.keys() else known
