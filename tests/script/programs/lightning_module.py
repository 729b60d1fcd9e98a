"""A LightningModule of two encoder layers, on texts of several lengths, with validation."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

lightning.seed_everything(0, verbose=False)


class Tagger(lightning.LightningModule):
    def __init__(self, width=256):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.words = nn.Embedding(512, width)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tags = nn.Linear(width, 512)

    def loss(self, batch):
        words, tags = batch
        return nn.functional.cross_entropy(self.tags(self.layers(self.words(words))).mT, tags)

    def training_step(self, batch, number):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("validation", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def collate(rows):
    pad = nn.utils.rnn.pad_sequence
    return tuple(pad([row[number] for row in rows], batch_first=True) for number in (0, 1))


data = [(torch.arange(count),) * 2 for count in (17, 33, 64, 20, 9, 12, 40, 50) * 8]
options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
options |= {"enable_progress_bar": False, "max_steps": 8}
if __name__ == "__main__":
    trainer = lightning.Trainer(accelerator="auto", devices=1, **options)
    train = DataLoader(
        data, 8, num_workers=2 if torch.cuda.is_available() else 0, collate_fn=collate
    )
    trainer.fit(Tagger(), train, DataLoader(data, 16, collate_fn=collate))
