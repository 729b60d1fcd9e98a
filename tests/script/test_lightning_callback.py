"""LightningPlanCallback in real training on the CPU, against plans of the same program."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.script import run
from tests.small import python
from tight_fit import LightningPlanCallback
from tight_fit.gpus import GPU
from tight_fit.units import GIB, MIB

lightning = pytest.importorskip("lightning")
DummyLogger = lightning.pytorch.loggers.logger.DummyLogger
ROOT = Path(__file__).parents[2]

MODULE = """\
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader
lightning.seed_everything(0, verbose=False)
class Tagger(lightning.LightningModule):
    def __init__(self, width=256):
        super().__init__()
        self.words = nn.Embedding(512, width)
        self.layers = nn.Sequential(*(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(2)
        ))
        self.tags = nn.Linear(width, 512)
    def training_step(self, batch, number):
        words, tags = batch
        loss = nn.functional.cross_entropy(self.tags(self.layers(self.words(words))).mT, tags)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
data = [(torch.arange(count),) * 2 for count in (17, 33, 64, 20, 9, 12, 40, 50) * 8]
def collate(rows):
    most = max(len(row[0]) for row in rows)
    pad = lambda ids: torch.nn.functional.pad(ids, (0, most - len(ids)))
    return tuple(torch.stack([pad(row[number]) for row in rows]) for number in (0, 1))
"""
FIT = """\
trainer = lightning.Trainer(
    max_steps=8, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, **OPTIONS
)
trainer.fit(Tagger(), DataLoader(data, batch_size=8, collate_fn=collate))
"""
NUMBERS = 4096  # bytes of losses that Lightning keeps to log them


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(*callbacks, change=None, loader=None, library=lightning, manual=False, **options):
    """The module after training."""
    names = {}
    exec(MODULE.replace("import lightning,", f"import {library.__name__} as lightning,"), names)
    settings = {
        "max_steps": 4, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
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
    [{}, {"precision": "bf16-mixed", "gradient_clip_val": 1.0}, {"precision": "bf16-true"},
     {"precision": "16-mixed"}, {"accumulate_grad_batches": 4}],
    ids=lambda options: " ".join(map(str, options.values())) or "fp32",
)  # fmt: skip
def test_the_plan_is_that_of_the_same_program(options, program):
    """`tight-fit script` runs Lightning's own loop. Gradients live through the next forward."""
    here = options
    if options.get("precision") == "16-mixed":  # which the Trainer makes bf16-mixed on a CPU
        half = lightning.pytorch.plugins.MixedPrecision("16-mixed", device="cpu")
        here = {"plugins": [half]}
    callback, (line,) = told(**here)
    facts = run(program(MODULE + FIT.replace("OPTIONS", repr(options))), gpu="A100", seconds=200.0)
    assert callback.facts["batch"] == facts["batch_longest"] == [8, 64]
    assert json.loads(json.dumps(callback.facts)) == callback.facts
    assert callback.facts["terms"].keys() == facts["terms"].keys()
    assert sum(callback.facts["terms"].values()) == callback.facts["need"]
    assert facts["reserved"] == callback.facts["reserved"]
    assert 0 <= facts["allocated"] - callback.facts["allocated"] <= NUMBERS
    assert callback.facts["seconds"] == pytest.approx(facts["longest_seconds"], rel=0.15)
    assert "(8 × 64)" in line and "it fits. A step takes about" in line


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
    """Two real ones that Lightning starts and gloo connects."""
    options = "accelerator='cpu', devices=2, strategy='ddp', callbacks=[Planned('T4')]"
    path = tmp_path / "two.py"
    program = MODULE + FIT.replace("**OPTIONS", options) + "print('done')\n"
    path.write_text("from tight_fit import LightningPlanCallback as Planned\n" + program)
    done = python(
        str(path), cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2 and done.stdout.count("tight-fit:") == 1
    assert "several processes train it" in done.stdout
