"""A small decoder, and the command that is asked about it."""

import json

import pytest
import transformers as library

from tests.small import configured
from tight_fit.command.main import main
from tight_fit.plans import model as plans_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Answers and traces are kept for one test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 128}
    configured(library.LlamaConfig, 64, 2, 4, 128, 500, **sizes).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def ask(folder, capsys):
    """A function: (exit status, what is printed) of `tight-fit MODEL` with these options."""

    def asked(options: str, model=folder) -> tuple[int, str]:
        status = main([*([str(model)] if model else []), *options.split()])
        return status, capsys.readouterr().out

    return asked


@pytest.fixture
def facts(ask):
    """A function: the facts of an answer as JSON."""
    return lambda options, *model: json.loads(ask(f"{options} --json", *model)[1])


@pytest.fixture
def refuses(ask, capsys):
    """A function: asserts that the command ends with status 2 and says these words."""

    def refused(options: str, says: str) -> None:
        with pytest.raises(SystemExit) as ended:
            ask(options)
        assert ended.value.code == 2 and says in capsys.readouterr().err.splitlines()[-1]

    return refused


@pytest.fixture
def no_trace(monkeypatch):
    """A function after whose call a step that is traced fails the test."""
    return lambda: monkeypatch.setattr(
        plans_model, "trace_model_step", lambda *rest: pytest.fail("traced")
    )
