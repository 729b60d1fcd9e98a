"""One fine-tune in four hands: bare PyTorch, Lightning Fabric, Accelerate (with DeepSpeed or without) and Trainer.

Each function is a whole training loop over the same micro-batches, with the recipe's optimizer, schedule and clipping,
and returns (model, losses), the mean loss of each optimizer step. They run on the CPU, or where their library puts them.
They are for fp32 and bf16: with Fabric's precision="16-mixed" the gradients are still scaled where `fabric` clips them.
Notebooks 11 and 12 teach them; the tests hold them to the same weights.
"""

from __future__ import annotations

import math
import operator
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from helpers import models
from helpers.data import Encoded
from helpers.optimizers import make_optimizer
from helpers.recipe import Recipe
from helpers.step import learning_rate, loss_sum
from helpers.train import rows_of_step


class Order(Sampler):
    """A batch sampler: [(row numbers of a micro-batch, rows of its optimizer step)]. Each pass is the next epoch."""

    def __init__(self, recipe: Recipe, data: Encoded):
        self.recipe, self.rows, self.epoch = recipe, len(data), 0
        self.lengths = data.lengths.tolist() if recipe.padding == "uniform" else None
        self.steps = math.ceil(len(data) / recipe.batch_size)

    def __len__(self) -> int:
        return math.ceil(self.rows / self.recipe.micro_batch)

    def __iter__(self) -> Iterator[list[tuple[list[int], int]]]:
        first, self.epoch = self.epoch * self.steps, self.epoch + 1
        for step in range(first, first + self.steps):
            parts = rows_of_step(self.recipe, self.rows, step, self.lengths)
            yield from ([(part, sum(map(len, parts)))] for part in parts)


class Batches(Dataset):
    """Micro-batches as `Encoded.batch` makes them, with "rows": how many rows the whole optimizer step has."""

    def __init__(self, data: Encoded):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: tuple[list[int], int]) -> dict[str, torch.Tensor]:
        return self.data.batch(part[0]) | {"rows": torch.tensor(part[1])}


def loader_of(recipe: Recipe, data: Encoded) -> DataLoader:
    """A DataLoader of micro-batches: iterate over it again for the next epoch. It draws from a generator of its own, or
    it would take numbers from dropout's."""
    return DataLoader(
        Batches(data),
        batch_sampler=Order(recipe, data),
        collate_fn=operator.itemgetter(0),
        generator=torch.Generator(),
    )


def set_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """Give every group of the optimizer the schedule's learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step)


def zero(stage: int, recipe: Recipe, offload: bool = False) -> dict:
    """DeepSpeed's configuration for ZeRO (Rajbhandari et al. 2020), with the recipe's own optimizer.

    stage    0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the parameters
    offload  keep optimizer states (and in stage 3 parameters) in CPU memory
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
    loader = loader_of(recipe, data)
    torch.manual_seed(recipe.seed)
    losses, total = [], 0.0
    while len(losses) < recipe.steps:
        for place, batch in enumerate(loader, start=1):
            rows = batch.pop("rows")
            loss = loss_sum(model, batch, recipe) / rows
            loss.backward()
            total += loss.item()
            if place % recipe.accumulation == 0 or place == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                set_rate(optimizer, recipe, len(losses))
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
    loader = fabric.setup_dataloaders(loader_of(recipe, data))
    torch.manual_seed(recipe.seed)
    losses, total = [], 0.0
    while len(losses) < recipe.steps:
        for place, batch in enumerate(loader, start=1):
            rows = batch.pop("rows")
            loss = loss_sum(model, batch, recipe) / rows
            fabric.backward(loss)
            total += loss.item()
            if place % recipe.accumulation == 0 or place == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                set_rate(optimizer, recipe, len(losses))
                optimizer.step()
                optimizer.zero_grad()
                losses, total = [*losses, total], 0.0
                if len(losses) == recipe.steps:
                    break
    return model, losses


def accelerate(recipe: Recipe, data: Encoded, **settings) -> tuple[nn.Module, list[float]]:
    """Hugging Face Accelerate. `settings` go to Accelerator: cpu, mixed_precision, deepspeed_plugin.

    With cpu=True Accelerate ignores a DeepSpeed plugin without a word: here it is set only where there is none.
    """
    from accelerate import Accelerator

    settings.setdefault("cpu", "deepspeed_plugin" not in settings)
    accelerator = Accelerator(gradient_accumulation_steps=recipe.accumulation, **settings)
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(recipe, data))
    torch.manual_seed(recipe.seed)
    losses, total = [], 0.0
    while len(losses) < recipe.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                rows = batch.pop("rows")
                set_rate(optimizer, recipe, len(losses))
                loss = loss_sum(model, batch, recipe) / rows
                accelerator.backward(
                    loss * recipe.accumulation
                )  # it divides by the number of micro-batches
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


def trainer(recipe: Recipe, data: Encoded, cured: bool = True) -> tuple[nn.Module, list[float]]:
    """transformers' Trainer. cured=False leaves its own loss, which is wrong for DeBERTa with accumulation: its
    gradient is multiplied by the number of micro-batches (huggingface/transformers#47688)."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    if not cured:
        del model.accepts_loss_kwargs  # which models.prepare sets
    losses: list[float] = []

    class Look(TrainerCallback):
        def on_log(self, arguments, state, control, logs=None, **rest):
            if "loss" in logs:
                losses.append(logs["loss"])

    class Ours(Trainer):
        def get_train_dataloader(self):
            return loader_of(recipe, data)

    def mean_loss(outputs, labels, num_items_in_batch):
        return F.cross_entropy(outputs.logits.float(), labels, reduction="sum") / num_items_in_batch

    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(recipe, step) / recipe.peak_learning_rate
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=recipe.steps,
            gradient_accumulation_steps=recipe.accumulation,
            seed=recipe.seed,
            max_grad_norm=recipe.max_grad_norm,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            bf16=recipe.precision == "bf16",
        )
        ours = Ours(
            model,
            arguments,
            train_dataset=Batches(data),
            optimizers=(optimizer, schedule),
            callbacks=[Look()],
            compute_loss_func=mean_loss if cured else None,
        )
        ours.remove_callback(PrinterCallback)
        ours.train()
    return model, losses
