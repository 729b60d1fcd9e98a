"""Small steps for the search of a layout, plans of single trials, and searches made by hand."""

from transformers import LlamaConfig, MixtralConfig, OlmoeConfig

from tests.small import configured
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep
from tight_fit.search.layouts import PlannedTrial, Searched

LLAMA = configured(LlamaConfig, 64, 3, 4, 176, 512, num_key_value_heads=2)
EIGHT = Cluster("H100", 8, inside="NVLink 4")
TWO = Cluster("A100-40GB", 2, 2, "NVLink 3", "InfiniBand 200 Gbit", cards=2)
SLOW = Cluster("A100-40GB", 2, 2, "PCIe 3 x16", "Ethernet 1 Gbit")


def llama(width: int, layers: int = 2, heads: int = 4, **more) -> LlamaConfig:
    """Of more weights."""
    sizes = width, layers, heads, 11 * width // 4, 512
    return configured(LlamaConfig, *sizes, **{"num_key_value_heads": 2, **more})


def mixtral(width: int) -> MixtralConfig:
    return configured(
        MixtralConfig, width, 2, 4, 2 * width, 512,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def olmoe(width: int) -> OlmoeConfig:
    return configured(
        OlmoeConfig, width, 2, 4, width // 2, 512,
        num_key_value_heads=2, num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip


def job(config=LLAMA, **fields) -> ModelStep:
    usual = {"batch_size": 16, "length": 64, "weights": "fp32", "precision": "bf16"}
    return ModelStep(config, **usual | fields)


def planned(trial, of, reduce="fp32"):
    selective = trial.recompute == "selective"
    return plan_step(trial.step(of), trial.layout, selective=selective, reduce=reduce)


def found_of(*trials):
    """A search in which these were planned: (trial, seconds, bytes over the GPU's memory)."""
    memory = 100
    usual = {"card_memory": memory, "seconds_of_bubble": 0.0, "seconds_waiting": {}}
    usual |= {"tokens_per_second": None, "limit": "compute"}
    made = [
        PlannedTrial(
            trial,
            usual
            | {"fits": over <= 0, "need": memory + over}
            | {"seconds": seconds, "seconds_of_work": seconds},
        )
        for trial, seconds, over in trials
    ]
    return Searched(job(), TWO, made)
