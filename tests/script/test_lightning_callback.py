"""LightningPlanCallback in real training on the CPU, against plans of the same program."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.forked import forked
from tests.script import run, same_plan
from tight_fit import LightningPlanCallback
from tight_fit.gpus import GPU
from tight_fit.units import GIB, MIB

lightning = pytest.importorskip("lightning")
DummyLogger = lightning.pytorch.loggers.logger.DummyLogger

MODULE, _, _ = (
    (Path(__file__).parent / "programs" / "lightning_module.py")
    .read_text(encoding="utf8")
    .partition("if __name__")
)
FIT = """\
trainer = lightning.Trainer(**options | dict(OPTIONS))
trainer.fit(Tagger(), DataLoader(data, batch_size=8, collate_fn=collate))
"""
NUMBERS = 4096  # bytes of losses that Lightning keeps to log them


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(*callbacks, change=None, loader=None, library=lightning, manual=False, **options):
    """The module after training."""
    names = {}
    exec(MODULE.replace("import lightning\n", f"import {library.__name__} as lightning\n"), names)
    settings = names["options"] | {"max_steps": 4, "accelerator": "cpu"}
    module = names["Tagger"]()
    module.automatic_optimization = not manual
    if change:
        module.training_step = change.__get__(module)
    if loader is None:
        loader = DataLoader(names["data"], batch_size=8, collate_fn=names["collate"])
    trainer = library.Trainer(callbacks=[*callbacks], **{**settings, **options})
    trainer.fit(module, loader)
    return module


def told(gpu="A100", **options):
    """(the callback, the lines it said) of a training."""
    lines: list[str] = []
    callback = LightningPlanCallback(gpu, say=lines.append)
    fit(callback, **options)
    return callback, lines


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed", "gradient_clip_val": 1.0}, {"precision": "bf16-true"},
     {"precision": "16-mixed", "accumulate_grad_batches": 2}],
    ids=lambda options: " ".join(map(str, options.values())),
)  # fmt: skip
def test_the_plan_is_that_of_the_same_program(options, program):
    """`tight-fit script` runs Lightning's own loop. Gradients live through the next forward."""
    here = {**options}
    if options["precision"] == "16-mixed":  # which the Trainer makes bf16-mixed on a CPU
        del here["precision"]
        here["plugins"] = [lightning.pytorch.plugins.MixedPrecision("16-mixed", device="cpu")]
    callback, lines = told(**here)
    facts = run(program(MODULE + FIT.replace("OPTIONS", repr(options))), gpu="A100", seconds=200.0)
    same_plan(callback, lines, facts, 0, NUMBERS)


class Kept(DummyLogger):
    """A logger that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.metrics, self.images = [], []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics["loss"]))

    @property
    def experiment(self):
        return self.images


def test_training_is_what_it_is_without(capsys):
    """The same weights to the bit; what the copy logs and prints reaches nobody."""

    def step(module, batch, number):
        module.logger.experiment.append(number)
        print("a step")
        return type(module).training_step(module, batch, number)

    def trained(*callbacks):
        logger = Kept()
        module = fit(*callbacks, change=step, logger=logger, log_every_n_steps=1)
        return list(module.state_dict().values()), logger.metrics, logger.images

    planned = trained(LightningPlanCallback("T4"))
    said = capsys.readouterr().out
    assert said.count("a step\n") == 4 and "tight-fit: with the longest batch" in said
    plain = trained()
    assert planned[1:] == plain[1:] and planned[2] == [0, 1, 2, 3]
    assert all(torch.equal(*pair) for pair in zip(planned[0], plain[0], strict=True))


def test_where_it_does_not_fit_what_it_advises_fits():
    need = told()[0].facts["need"]
    small = GPU("a small GPU", need - 6 * MIB, (8, 0))
    callback, (verdict, advice) = told(small)
    assert "it will run out of memory" in verdict and not callback.facts["fits"]
    assert "it fits with batch_size=4 in the DataLoader and accumulate_grad_batches=2" in advice
    names = {}
    exec(MODULE, names)
    halved = DataLoader(names["data"], batch_size=4, collate_fn=names["collate"])
    callback, _ = told(small, loader=halved, accumulate_grad_batches=2)
    assert callback.facts["fits"] and callback.facts["batch"] == [4, 64]
    _, (_, advice) = told(GPU("a tiny GPU", GIB // 2, (8, 0)))
    assert advice.endswith("no batch of a half, a quarter or an eighth of the size makes it fit.")


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.arange(8), torch.arange(8)


def on_the_copy_alone(module, batch, number):
    if module.device.type == "cuda":
        raise KeyError("it is on a GPU")
    return type(module).training_step(module, batch, number)


def by_hand(module, batch, number):
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(type(module).training_step(module, batch, number))
    optimizer.step()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"loader": DataLoader(Stream(), batch_size=8)}, "the data set has no length"),
        ({"gpu": None}, 'there is no GPU here; LightningPlanCallback(gpu="T4") names one.'),
        ({"precision": "64-true"}, "precision '64-true' is not planned"),
        ({"change": on_the_copy_alone}, "training_step ends in KeyError: 'it is on a GPU'"),
        ({"change": by_hand, "manual": True}, "its optimization is manual"),
    ],
    ids=["stream", "no GPU", "64 bits", "fails", "manual"],
)
def test_what_is_not_planned_is_said_and_training_goes_on(options, words):
    callback, (line,) = told(**options)
    assert line.startswith("tight-fit: this training is not planned: ") and words in line
    assert not callback.facts


def test_a_trainer_of_the_other_name_takes_it():
    library = pytest.importorskip("pytorch_lightning")
    callback, _ = told(library=library)
    assert callback.facts == told()[0].facts != {}


def test_of_several_processes_one_says_once_that_they_are_not_planned(tmp_path):
    """Two real ones that gloo connects, as torchrun starts them."""
    options = "accelerator='cpu', devices=2, strategy='ddp', callbacks=[Planned('T4')]"
    path = tmp_path / "two.py"
    program = MODULE + FIT.replace("OPTIONS", options) + "print('done')\n"
    path.write_text("from tight_fit import LightningPlanCallback as Planned\n" + program)
    said = forked(path, ranks=2)
    assert [text.count("done") for text in said] == [1, 1]
    assert [text.count("tight-fit:") for text in said] == [1, 0]
    assert "several processes train it" in said[0]
