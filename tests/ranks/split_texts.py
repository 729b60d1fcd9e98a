"""Run by test_zigzag.py: lesson 24's `train` on ranks, beside the whole texts on each of them.

A CPU has none of the attention that PyTorch's `context_parallel` sends round: here the ring of
scripts/context_parallel.py stands for it, and the zig-zag of its `positions`.
"""

import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AutoModelForCausalLM

from scripts import context_parallel as cut
from tests.ranks.tiny import end


@contextmanager
def in_zigzag(mesh, buffers, buffer_seq_dims):
    tokens, ranks = buffers[0].shape[1], mesh.size()
    places = [cut.positions(rank, ranks, tokens, zigzag=True) for rank in range(ranks)]
    for buffer in buffers:
        part = buffer[:, places[dist.get_rank()]].clone()
        buffer.resize_(part.shape).copy_(part)

    def attend(query, key, value, attn_mask=None, is_causal=False, **more):
        assert attn_mask is None and is_causal
        return cut.ring(query, key, value, places)

    with patch.object(functional, "scaled_dot_product_attention", attend):
        yield


lesson = {"torch": torch}
exec(sys.argv[1], lesson)
lesson["context_parallel"] = in_zigzag
chosen = torch.Generator().manual_seed(0)  # the same texts on all ranks
texts = [torch.randint(90, (1, tokens), generator=chosen) for tokens in (17, 24)]
split = lesson["train"](sys.argv[2], texts, device="cpu")
whole = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).train()
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-5)
start = torch.nn.utils.parameters_to_vector(whole.parameters()).detach().clone()
for text in texts:
    whole(text, labels=text).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
after = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in (split, whole)]
moved, right = ((one - start).detach() for one in after)
end({"moved": right.norm().item(), "apart": (moved - right).norm().item()})
