"""The public names of tight_fit: few, imported when asked for, each with an example that runs."""

import doctest
from importlib import import_module

import pytest

import tight_fit
from tests.small import python


def test_there_are_few_and_none_is_imported_before_it_is_asked_for():
    assert len(tight_fit.__all__) <= 15
    assert sorted(tight_fit._HOMES) == sorted(tight_fit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'plan_modle'"):
        tight_fit.plan_modle  # noqa: B018
    asked = "import sys, tight_fit; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert python("-c", asked, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", tight_fit.__all__)
def test_its_example_gives_what_it_says(name):
    thing = getattr(tight_fit, name)
    home = import_module(thing.__module__)
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=home, globs={})
    assert found.examples, f"{name} has no example: write one into its docstring, after >>>."
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(found, out=told.append)
    assert not told, "".join(told)
