"""A LightningModule with validation, and a loader with workers, as its documentation has it."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 100))

    def training_step(self, batch, index):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.layers(features), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        features, labels = batch
        self.log("validation", nn.functional.cross_entropy(self.layers(features), labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    data = TensorDataset(torch.randn(512, 64), torch.randint(0, 100, (512,)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    workers = 2 if torch.cuda.is_available() else 0
    train = DataLoader(data, batch_size=64, num_workers=workers)
    trainer.fit(Classifier(), train, DataLoader(data, batch_size=128))
