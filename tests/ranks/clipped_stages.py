"""Run by test_pipelines.py: steps of lesson 15's pasted stages beside those of the whole model,
and what its `save` leaves for `from_pretrained`.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

from tests.ranks.tiny import SIZES, end, furthest

lesson = {"nn": nn, "torch": torch}
exec(sys.argv[1], lesson)
loss_fn = lesson["loss_fn"]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
ends = dist.new_group([0, ranks - 1])
told = {}
for tied in (True, False):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=2, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    whole = copy.deepcopy(model)
    mine = lesson["Stage"](model, rank, ranks)
    stage = PipelineStage(mine, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in (mine, whole)]
    norms = []
    for step in range(3):
        tokens = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(step))
        given = [tokens] if rank == 0 else []
        schedule.step(*given, **({"target": tokens} if rank == ranks - 1 else {}))
        norm = lesson["clip"](mine, 0.5, ends if tied else None)
        loss_fn(whole(tokens).logits, tokens).backward()
        right = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        norms.append((norm.item(), right.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own, right = {id(weight) for weight in mine.parameters()}, dict(whole.named_parameters())
    pairs = [(one, right[name]) for name, one in model.named_parameters() if id(one) in own]
    folder = f"{sys.argv[2]}/{tied}"
    lesson["save"](model, mine, folder)
    dist.barrier()  # rank 0 has written the configuration
    again, found = LlamaForCausalLM.from_pretrained(folder).state_dict(), whole.state_dict()
    assert again.keys() == found.keys()
    read = furthest((again[name], found[name]) for name in found)
    told[str(tied)] = {
        "norms": norms, "apart": furthest(pairs), "weights": len(pairs), "read": read
    }  # fmt: skip
end(told)
