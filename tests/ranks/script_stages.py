"""Run by test_pipeline_script.py: steps of scripts/pipeline.py's stages, clipped over all of them,
beside those of the whole model in one process, clipped by PyTorch.
"""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import ViTConfig, ViTForImageClassification

from scripts.pipeline import Stage, clip

MOST = 0.05  # less than the norms of all steps
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
loss_fn = nn.functional.cross_entropy
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "image_size": 8}
told = {}
for bf16 in (False, True):
    torch.manual_seed(0)
    config = ViTConfig(**SIZES, num_attention_heads=2, patch_size=4, num_labels=10)
    model = ViTForImageClassification(config)
    whole = copy.deepcopy(model)
    mine = Stage(model, rank, ranks, bf16)
    stage = PipelineStage(mine, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in (mine, whole)]
    norms, losses = [], []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 8, 8, generator=generator)
        labels = torch.randint(10, (8,), generator=generator)
        given, found = [images] if rank == 0 else [], []
        last = {"target": labels, "losses": found} if rank == ranks - 1 else {}
        schedule.step(*given, **last, return_outputs=False)
        norm = clip(mine, MOST)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = whole(images).logits
        loss = loss_fn(logits.float(), labels)
        loss.backward()
        right = nn.utils.clip_grad_norm_(whole.parameters(), MOST)
        norms.append((norm.item(), right.item()))
        if found:
            losses.append((torch.stack(found).mean().item(), loss.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own, right = {id(weight) for weight in mine.parameters()}, dict(whole.named_parameters())
    pairs = [(one, right[name]) for name, one in model.named_parameters() if id(one) in own]
    apart = max(float((one - other).detach().abs().max()) for one, other in pairs)
    told["bf16" if bf16 else "fp32"] = {
        "norms": norms, "losses": losses, "apart": apart, "weights": len(pairs),
        "all": len(right),
    }  # fmt: skip
print("RESULT", json.dumps(told))
dist.destroy_process_group()
