"""Run by test_frameworks.py under torchrun: Accelerate with DeepSpeed, against the plain loop."""

import json
import sys

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState

from by_hand import frameworks
from helpers import train
from helpers.recipe import Recipe
from tests.by_hand.test_frameworks import distance, still_models

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
    False  # or it compiles C++ that training never calls
)
stages, recipe = json.loads(sys.argv[1]), Recipe.from_dict(json.loads(sys.argv[2]))
data = train.encoded(recipe)["train"]
still_models()
reference, expected = frameworks.plain(recipe, data)
results = []
for stage in stages:
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # only because this process makes several
    plugin = DeepSpeedPlugin(hf_ds_config=frameworks.zero_config(stage, recipe))
    model, losses = frameworks.accelerate(recipe, data, deepspeed_plugin=plugin)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = Accelerator().state
        results.append(
            {
                "kind": str(state.distributed_type), "stage": state.deepspeed_plugin.zero_stage,
                "losses": losses, "expected": expected, "distance": distance(model, reference),
            }
        )  # fmt: skip
print("RESULT " + json.dumps(results))
torch.distributed.destroy_process_group()
