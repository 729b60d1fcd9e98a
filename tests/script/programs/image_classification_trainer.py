"""Fine-tune a vision transformer with Trainer: images decoded and changed when they are read."""

import sys

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageClassification, Trainer, TrainingArguments

folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder, num_labels=4)
model = AutoModelForImageClassification.from_pretrained(folder, config=config)
side = config.image_size


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count, self.random = count, np.random.default_rng(0)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        pixels = np.full((40, 48, 3), index % 255, dtype=np.uint8)
        image = Image.fromarray(pixels)
        left, top = self.random.integers(0, 8, 2)
        image = image.crop((left, top, left + 32, top + 32)).resize((side, side))
        if self.random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
        return {"pixel_values": (tensor - 0.5) / 0.5, "labels": index % 4}


def collate(rows):
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "pictures", per_device_train_batch_size=8, remove_unused_columns=False,
        num_train_epochs=2, report_to="none", label_smoothing_factor=0.1, bf16=False,
    ),
    train_dataset=Pictures(64),
    eval_dataset=Pictures(16),
    data_collator=collate,
)  # fmt: skip
trainer.train()
