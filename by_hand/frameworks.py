"""One fine-tune in four training loops: PyTorch alone, Lightning Fabric, Accelerate, and Trainer.

Each function is a whole training loop over the same micro-batches, with the optimizer, the learning
rate schedule and the clipping of the recipe. It returns (model, losses), with the mean loss of each
optimizer step. The loops run on the CPU, or on the device that their library chooses; Accelerate
runs with DeepSpeed if asked to. They are for fp32 and bf16: with Fabric's precision="16-mixed" the
gradients would still be scaled where `fabric` clips them.
"""

from __future__ import annotations

import math
import operator
import tempfile
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from helpers import models
from helpers.data import Encoded
from helpers.recipe import Recipe
from helpers.train import rows_of_step
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import cross_entropy_sum, learning_rate, loss_sum


class MicroBatchSampler(Sampler):
    """The micro-batches of a recipe, as a DataLoader's batch_sampler; each pass is the next epoch.

    Each item is a list of one pair, (indices of the examples of a micro-batch, number of labels of
    its optimizer step that count), which `MicroBatches` takes.
    """

    def __init__(self, recipe: Recipe, data: Encoded):
        self.recipe, self.data, self.examples, self.epoch = recipe, data, len(data), 0
        self.lengths = data.lengths.tolist() if recipe.padding == "uniform" else None
        self.steps = math.ceil(len(data) / recipe.batch_size)

    def __len__(self) -> int:
        return math.ceil(self.examples / self.recipe.micro_batch)

    def __iter__(self) -> Iterator[list[tuple[list[int], int]]]:
        first, self.epoch = self.epoch * self.steps, self.epoch + 1
        for step in range(first, first + self.steps):
            parts = rows_of_step(self.recipe, self.examples, step, self.lengths)
            labels = sum(map(getattr(self.data, "counted", len), parts))
            yield from ([(part, labels)] for part in parts)


class MicroBatches(Dataset):
    """Micro-batches as `Encoded.batch` makes them, with one more tensor.

    "examples" is the number of examples of the whole optimizer step, int64, (); for a language
    model that of the labels that count.
    """

    def __init__(self, data: Encoded):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: tuple[list[int], int]) -> dict[str, torch.Tensor]:
        return self.data.batch(part[0]) | {"examples": torch.tensor(part[1])}


def check_ordinary(recipe: Recipe) -> None:
    """Raises ValueError for what only the course's own step on one GPU does."""
    for name, usual in (
        ("loss", "full"),
        ("compile", False),
        ("offload", None),
        ("float8", None),
        ("optimizer_in_backward", False),
    ):
        if getattr(recipe, name) != usual:
            raise ValueError(
                f"These loops cannot take {name}={getattr(recipe, name)!r}, which is for the "
                "course's own step on one GPU: leave it out."
            )
    if recipe.max_grad_norm is None:
        raise ValueError("These loops cannot take max_grad_norm=None: give the norm to clip to.")


def make_loader(recipe: Recipe, data: Encoded) -> DataLoader:
    """A DataLoader of micro-batches; iterate over it again for the next epoch.

    It has a random number generator of its own: without one it would draw from torch's, and so
    change the numbers that dropout draws. Raises ValueError for fields that these loops do not
    know, gradients that are not clipped among them.
    """
    check_ordinary(recipe)
    return DataLoader(
        MicroBatches(data),
        batch_sampler=MicroBatchSampler(recipe, data),
        collate_fn=operator.itemgetter(0),
        generator=torch.Generator(),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """Give every parameter group of the optimizer the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step)


def zero_config(stage: int, recipe: Recipe, offload: bool = False) -> dict:
    """The configuration of DeepSpeed for ZeRO, with the optimizer of the recipe.

    stage    0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the parameters
    offload  keep the optimizer states (in stage 3 also the parameters) in CPU memory

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054;
    https://www.deepspeed.ai/docs/config-json/.
    """
    sharding: dict = {"stage": stage}
    if offload:
        sharding["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            sharding["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.max_grad_norm,
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def plain(recipe: Recipe, data: Encoded) -> tuple[nn.Module, list[float]]:
    """Bare PyTorch."""
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    loader = make_loader(recipe, data)
    torch.manual_seed(recipe.seed)
    losses: list[float] = []
    total = 0.0
    while len(losses) < recipe.steps:
        for count, batch in enumerate(loader, start=1):
            examples = batch.pop("examples")
            loss = loss_sum(model, batch, recipe) / examples
            loss.backward()
            total += loss.item()
            if count % recipe.accumulation == 0 or count == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                set_learning_rate(optimizer, recipe, len(losses))
                optimizer.step()
                optimizer.zero_grad()
                losses, total = [*losses, total], 0.0
                if len(losses) == recipe.steps:
                    break
    return model, losses


def fabric(recipe: Recipe, data: Encoded, **settings) -> tuple[nn.Module, list[float]]:
    """Lightning Fabric. `settings` go to Fabric: accelerator, devices, strategy, precision."""
    from lightning_fabric import Fabric

    fabric = Fabric(**{"accelerator": "cpu", "devices": 1, **settings})
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(make_loader(recipe, data))
    torch.manual_seed(recipe.seed)
    losses: list[float] = []
    total = 0.0
    while len(losses) < recipe.steps:
        for count, batch in enumerate(loader, start=1):
            examples = batch.pop("examples")
            loss = loss_sum(model, batch, recipe) / examples
            fabric.backward(loss)
            total += loss.item()
            if count % recipe.accumulation == 0 or count == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                set_learning_rate(optimizer, recipe, len(losses))
                optimizer.step()
                optimizer.zero_grad()
                losses, total = [*losses, total], 0.0
                if len(losses) == recipe.steps:
                    break
    return model, losses


def accelerate(recipe: Recipe, data: Encoded, **settings) -> tuple[nn.Module, list[float]]:
    """Accelerate. `settings` go to Accelerator: cpu, mixed_precision, deepspeed_plugin.

    With cpu=True Accelerate silently ignores a DeepSpeed plugin, so cpu is set only without one.
    """
    from accelerate import Accelerator

    settings.setdefault("cpu", "deepspeed_plugin" not in settings)
    accelerator = Accelerator(gradient_accumulation_steps=recipe.accumulation, **settings)
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(recipe, data))
    torch.manual_seed(recipe.seed)
    losses: list[float] = []
    total = 0.0
    while len(losses) < recipe.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                examples = batch.pop("examples")
                set_learning_rate(optimizer, recipe, len(losses))
                loss = loss_sum(model, batch, recipe) / examples
                # It divides by the number of micro-batches.
                accelerator.backward(loss * recipe.accumulation)
                total += loss.item()
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses, total = [*losses, total], 0.0
                if len(losses) == recipe.steps:
                    break
    return accelerator.unwrap_model(model), losses


def trainer(recipe: Recipe, data: Encoded, corrected: bool = True) -> tuple[nn.Module, list[float]]:
    """transformers' Trainer.

    corrected  False leaves Trainer's own loss, which with accumulation is wrong for DeBERTa, as
               for most classifiers: the gradient is multiplied by the number of micro-batches
               (huggingface/transformers#47688)
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    if not corrected:
        del model.accepts_loss_kwargs  # which models.prepare sets
    losses: list[float] = []

    class LossRecorder(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    class TrainerOnMicroBatches(Trainer):
        def get_train_dataloader(self):
            return make_loader(recipe, data)

    def mean_loss(outputs, labels, num_items_in_batch):
        return cross_entropy_sum(outputs.logits.float(), labels) / num_items_in_batch

    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(recipe, step) / recipe.peak_learning_rate
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=recipe.steps,
            gradient_accumulation_steps=recipe.accumulation,
            seed=recipe.seed,
            max_grad_norm=recipe.max_grad_norm or 0.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            bf16=recipe.precision == "bf16",
        )
        loop = TrainerOnMicroBatches(
            model,
            arguments,
            train_dataset=MicroBatches(data),
            optimizers=(optimizer, schedule),
            callbacks=[LossRecorder()],
            compute_loss_func=mean_loss if corrected else None,
        )
        loop.remove_callback(PrinterCallback)
        loop.train()
    return model, losses
