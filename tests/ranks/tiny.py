"""What programs of ranks share: a tiny decoder, whole tensors, and how they tell what they saw."""

import json

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def qwen3(tied=True, **more):
    """The same on every rank."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | HEADS | more, tie_word_embeddings=tied))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(found, wanted):
    """The norm of the difference, as a share of what is wanted."""
    return float((whole(found) - wanted).norm() / wanted.norm())


def furthest(pairs):
    """The largest difference of any two numbers in pairs of tensors."""
    return max(float((whole(one) - other).detach().abs().max()) for one, other in pairs)


def end(told):
    print(f"RESULT {json.dumps(told)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
