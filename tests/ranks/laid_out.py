"""Run by test_plan_layout.py as ranks: a rank trains two steps of a small model and is traced."""

import json
import sys

import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.ranks.tiny import whole
from tight_fit.kernels.trace_ops import Recorder
from tight_fit.layouts.experts import experts_of
from tight_fit.layouts.layout import AXES, Layout
from tight_fit.layouts.pipeline_rank import PipelineRank
from tight_fit.layouts.rank import ModelRank, grid_of
from tight_fit.layouts.trace import trace_model_rank
from tight_fit.layouts.trace_pipeline import trace_pipeline_rank
from tight_fit.layouts.wrapping import enable_recomputation
from tight_fit.memory.plan import to_plan
from tight_fit.models.made import make, prepare
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch
from tight_fit.techniques import model_changes
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import train_step

STEPS = 2
GRIDS: dict[tuple[int, ...], dict] = {}
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
TWO = TINY | {"num_key_value_heads": 2}
CONFIGURATIONS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TWO),
    "qwen3": Qwen3Config(**TWO | {"num_hidden_layers": 4}, head_dim=8),
    "tied": Qwen3Config(**TWO, head_dim=8, tie_word_embeddings=True),
    "bert": BertConfig(**TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "mixtral": MixtralConfig(**TWO, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **TWO, head_dim=8, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2
    ),
    "olmoe": OlmoeConfig(**TWO, num_experts=2, num_experts_per_tok=1),
}


def build(step: ModelStep, selective: bool):
    torch.manual_seed(0)
    with model_changes.quiet():
        model = prepare(make(step), step)
    if selective:
        enable_recomputation(model.model, True)
    return model


def batches(step: ModelStep, model, number: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of all data ranks together, the same in every process."""
    torch.manual_seed(number)
    return [batch(model, step) for _ in range(step.accumulation)]


def part(micro_batch: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The examples of one data rank."""
    return {name: value.chunk(ranks)[rank] for name, value in micro_batch.items()}


def reference(step: ModelStep) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a single process after two steps, and its last gradients as they were clipped,
    in fp32 throughout."""
    model = build(step, False)
    optimizer, scaler = make_optimizer(model, step), make_scaler(step, "cpu")
    gradients = kept(optimizer, model)
    for number in range(STEPS):
        every = batches(step, model, number)
        train_step(model, optimizer, every, step.batch_size, step, scaler=scaler)
    return {name: value.detach() for name, value in model.named_parameters()}, gradients


def kept(optimizer: torch.optim.Optimizer, model) -> dict[str, torch.Tensor]:
    """Whole gradients by name, filled in before each update."""
    gradients: dict[str, torch.Tensor] = {}

    def keep(*given) -> None:
        for name, value in model.named_parameters():
            if value.grad is not None:
                gradients[name] = whole(value.grad).detach().clone()

    optimizer.register_step_pre_hook(keep)
    return gradients


def run(fields: dict, layout: Layout, kind: str, selective: bool) -> dict:
    step = ModelStep(CONFIGURATIONS[kind], **fields)
    expected, gradients = reference(step)
    mesh = grid(layout)
    if layout.pipeline > 1:
        return run_stages(step, layout, mesh, selective, expected)
    ranks = layout.data
    mine = dist.get_rank() // (layout.context * layout.tensor)
    rank = wrapped(step, layout, mesh, selective)
    own_gradients = kept(rank.optimizer, rank.module) if layout.expert > 1 else {}
    for number in range(STEPS):
        every = batches(step, build(step, False), number)
        rank.step(rank.part(part(micro_batch, mine, ranks)) for micro_batch in every)
    divided = set(rank.of_experts)
    distance, apart = 0.0, 0.0
    for name, parameter in rank.module.named_parameters():
        experts = parameter in divided
        distance = max(distance, furthest(whole(parameter), expected[name], mesh, experts))
        if own_gradients:
            far = furthest(own_gradients[name], gradients[name], mesh, experts)
            apart = max(apart, far / gradients[name].abs().max().item())
    skipped = None
    if step.precision == "fp16" and layout.strategy != "ddp":
        # Replicas have the same gradients: what overflows on a rank overflows on theirs.
        in_replica = layout.data // layout.replicate * layout.context * layout.tensor
        here = dist.get_rank() % in_replica == 0
        skipped = overflow_on_one_rank(rank, part(every[0], mine, ranks), here)
    del rank, own_gradients, divided, parameter
    rank = wrapped(step, layout, mesh, selective)
    if layout.expert > 1:
        for experts in experts_of(rank.module):
            experts.register_forward_pre_hook(balance)
    micro_batch = batch(rank.module, rank.undivided)
    traced = trace_model_rank(
        rank, lambda: {name: value.clone() for name, value in micro_batch.items()}, Recorder()
    )
    return {"distance": distance, "gradients": apart, "skipped": skipped} | facts(traced, step)


def facts(traced, step: ModelStep) -> dict:
    """What is compared with the plan."""
    trace, sent = traced
    followed = to_plan((trace, 0), step, "cpu")
    return {name: getattr(followed, name) for name in ("peak", "at_peak", "flops")} | {
        "sent": [vars(message) for message in sent]
    }


def overflow_on_one_rank(rank: ModelRank, micro_batch: dict[str, torch.Tensor], here: bool) -> bool:
    """Whether a step in which a gradient of one rank alone (`here`) overflows changes no weight,
    and halves the scale."""

    def overflow(phase: str) -> None:
        if phase == "optimizer" and here:
            trained = (one for one in rank.module.parameters() if one.grad is not None)
            next(trained).grad.to_local()[0] = torch.inf

    def weights() -> list[torch.Tensor]:
        """As bytes: those in 4 bits are no numbers, and may be equal and NaN."""
        return [one.to_local().view(torch.uint8).clone() for one in rank.module.parameters()]

    before, scale = weights(), rank.scaler.get_scale()
    rank.step([rank.part(micro_batch)] * rank.local.accumulation, overflow)
    after = weights()
    return all(map(torch.equal, before, after)) and rank.scaler.get_scale() == scale / 2


def furthest(own: torch.Tensor, expected: torch.Tensor, mesh: dict, experts: bool) -> float:
    """The largest difference, of experts to those that this rank should have."""
    if experts:
        line = mesh["expert"]
        expected = expected.chunk(line.size())[line.get_local_rank()]
    if expected.dtype == torch.uint8:  # weights in 4 bits, packed in bytes or in numbers of 16 bits
        own, expected = own.view(-1).view(torch.uint8).int(), expected.view(-1).int()
    return (own - expected).abs().max().item()


def balance(experts, given: tuple) -> None:
    """Let every expert get as many tokens, in place: nothing is allocated that a step would not."""
    with torch.no_grad():
        chosen = given[1].data  # autograd, which keeps the indices, is not told
        chosen.fill_(1).view(-1).cumsum_(0).remainder_(experts.num_experts)


def run_stages(step: ModelStep, layout: Layout, mesh, selective: bool, expected: dict) -> dict:
    """The same of a rank of a pipeline, which takes all micro-batches at once."""
    mine = dist.get_rank() % layout.data  # stages are the farthest apart

    def batch_of(number: int) -> dict[str, torch.Tensor]:
        micro_batches = batches(step, build(step, False), number)
        whole = {name: torch.cat([one[name] for one in micro_batches]) for name in micro_batches[0]}
        return {name: value.clone() for name, value in part(whole, mine, layout.data).items()}

    def made() -> PipelineRank:
        return PipelineRank(step, layout, build(step, selective), mesh)

    rank = made()
    for number in range(STEPS):
        rank.step(batch_of(number))
    distance, seen = 0.0, set()
    for stage, own in zip(rank.stages, rank.module):
        first = stage.stage_index * len(own.body.layers)
        for name, parameter in own.named_parameters():
            words = f"model.{name}".replace("model.body", "model.model").split(".")
            if "layers" in words:
                words[3] = str(int(words[3]) + first)
            name = ".".join(words)
            distance = max(distance, furthest(whole(parameter), expected[name], mesh, False))
            seen.add(name)
    rank = made()
    traced = trace_pipeline_rank(rank, lambda: batch_of(0), Recorder())
    return {
        "distance": distance, "parameters": sorted(seen),
        "expected": sorted(_of_rank(expected, rank)), "stage": mesh["pipeline"].get_local_rank(),
    } | facts(traced, step)  # fmt: skip


def _of_rank(expected: dict, rank: PipelineRank) -> list[str]:
    """The names of the parameters that a rank of a pipeline should have."""
    names = []
    for stage, own in zip(rank.stages, rank.module):
        each = len(own.body.layers)
        indices = range(stage.stage_index * each, (stage.stage_index + 1) * each)
        begins = [f"model.model.layers.{index}." for index in indices]
        begins += ["model.model.embed_tokens."] if stage.is_first else []
        begins += ["model.model.norm.", "model.lm_head."] if stage.is_last else []
        names += [name for name in expected if name.startswith(tuple(begins))]
    return names


def grid(layout: Layout) -> dict:
    """One grid for all layouts of the same sizes: DTensor caches what it works out for a mesh, and
    takes an equal one of an earlier case for it."""
    sizes = tuple(getattr(layout, axis) for axis in (*AXES, "expert"))
    if sizes not in GRIDS:
        GRIDS[sizes] = grid_of(layout)
    return GRIDS[sizes]


def wrapped(step: ModelStep, layout: Layout, mesh, selective: bool) -> ModelRank:
    return ModelRank(step, layout, build(step, selective), mesh)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, (fields, layout, kind, selective) in enumerate(json.loads(sys.argv[1])):
        found = run(fields, Layout(**layout), kind, selective)
        print("RESULT " + json.dumps({"case": number, "rank": dist.get_rank()} | found), flush=True)
    dist.destroy_process_group()
