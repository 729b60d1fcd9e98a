"""What to know about a plan beside its figures: sentences that an answer ends with."""

from __future__ import annotations

from dataclasses import replace

from tight_fit.gpus import GPU
from tight_fit.gpus.specs import speed_of
from tight_fit.memory.plan import Plan
from tight_fit.models import config as hf_config
from tight_fit.models import images
from tight_fit.models.evaluation import BATCH, COPIES, logits_bytes
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import KINDS
from tight_fit.units import duration, size

LOADED = 1 << 30  # bytes of the host from which on loading is worth a sentence
LITTLE = 4096  # bytes per example that no evaluation fills a GPU with


def of_plan(step: ModelStep, plan: Plan, gpu: GPU, need: int) -> list[str]:
    """What to know about the plan of a step on a GPU, of which it needs so many bytes."""
    return [
        *of_step(step, gpu),
        *of_loading(step, plan),
        *_of_experts(step),
        *_of_optimizer(step, plan),
        *_of_paging(step, plan, gpu, need),
        *_of_evaluation(step, plan, gpu, need),
        *_of_writing(step, plan, gpu),
    ]


def of_step(step: ModelStep, gpu: GPU | None) -> list[str]:
    """What to know of a step, whatever its plan is, one sentence each."""
    sentences = []
    if gpu and "bf16" in (step.precision, step.weights) and not gpu.bf16:
        instead = "--precision fp16"
        if step.weights == "bf16":
            instead += " --weights " + ("fp32" if step.lora_rank is None else "fp16")
        sentences.append(
            f"the {gpu.name} has no bf16 arithmetic and only emulates it, slowly: use {instead}."
        )
    if gpu and KINDS[step.optimizer].package and gpu.capability < (6, 0):
        sentences.append("bitsandbytes asks for compute capability 6.0.")
    if step.compile:
        sentences.append(
            "planned with each layer compiled by itself (layer.compile()); a model that is "
            "compiled whole keeps somewhat more, or less. Two published runs of FSDP on H100s "
            "took 5 and 8 % more time than so planned, and the memory that was planned."
        )
    else:
        sentences.append("planned without torch.compile, which --compile plans.")
    if step.float8 and step.compile:
        sentences.append(
            "inductor joins the casts to FP8 with the kernels beside them. Three published runs of "
            "FSDP on H100s had the memory that is so planned, and took 7, 24 and 10 % more time: "
            "take the seconds for a lower bound."
        )
    elif step.float8:
        sentences.append(
            "each layer's numbers are cast to FP8 by kernels of their own; torch.compile, without "
            "which torchao's float8 is slower than this, joins them with what is before, and a "
            "compiled step may take less time. No published step on one GPU is known to compare "
            "with."
        )
    if step.image:
        sentences.append(
            "convolutions also take a workspace that cuDNN chooses when it runs; no plan knows it."
        )
    if "mamba" in step.config.model_type:
        sentences.append(
            "planned without the fused kernels of mamba_ssm, with which it takes less."
        )
    if step.reads == "images":
        beside = images.tokens_of(step.config, step.side)
        _, side, _ = step.image or (0, 0, 0)
        sentences.append(
            f"each example is one image of {side} x {side} pixels, which stands for {beside:,} of "
            f"its {step.tokens:,} tokens."
        )
    if step.reads == "speech":
        sentences.append(
            f"each example is {2 * step.config.max_source_positions:,} frames of sound, to which "
            f"the model's processor fills up, and {step.tokens:,} tokens of text."
        )
    if step.reads in ("text", "texts"):
        each = "each answer of a pair with its prompt" if step.task == "dpo" else "each"
        sentences.append(
            f"examples are full, {step.tokens} tokens {each}; a batch with padding adds a mask in "
            "decoders."
        )
    return sentences


def _of_experts(step: ModelStep) -> list[str]:
    """Why a mixture of experts in 4 bits is not small."""
    if step.base != "nf4" or not any("expert" in name for name in vars(step.config)):
        return []
    from tight_fit.models.made import on_meta  # imports PyTorch, which other answers do without

    named = on_meta(replace(step, config=hf_config.read(step.config))).named_parameters()
    weights = sum(each.numel() for name, each in named if each.ndim == 3 and ".experts." in name)
    bits = 32 if step.kbit or step.weights == "fp32" else 16
    left = size(weights * bits // 8)
    return [
        f"{left} of experts stay in {bits} bits: transformers holds those of a layer as one "
        "tensor, and bitsandbytes puts linear layers alone into 4 bits."
    ] * bool(weights)


def _of_optimizer(step: ModelStep, plan: Plan) -> list[str]:
    if step.optimizer != "adamw" or step.offload == "optimizer":
        return []
    copy = plan.highest["optimizer states"] // 2
    return [
        "AdamW is planned with fused=True; torch.optim.AdamW as it comes is foreach on a GPU, and "
        f"holds {size(copy)} more in step(): --optimizer adamw_foreach plans that."
    ]


def _of_paging(step: ModelStep, plan: Plan, gpu: GPU, need: int) -> list[str]:
    """Where paged states lie on a GPU that holds the rest, and what moving them takes.

    bitsandbytes asks for a parameter's states before each update and waits for the update before
    the next, so that nothing hides the copies. The driver puts those out that were used longest
    ago: of states that are used in turn and find no room together, it may move all.
    """
    if not KINDS[step.optimizer].paged or step.offload or need > gpu.memory:
        return []
    room = gpu.memory - need
    if plan.host <= room:
        return [
            f"the driver keeps the {size(plan.host)} of paged states on the {gpu.name}, beside "
            "what is needed, as long as they find room there: nothing is moved."
        ]
    moved = f"of {size(plan.host)} of paged states {size(room)} find room on the {gpu.name}"
    specs = speed_of(gpu.name)
    from tight_fit.kernels.host_memory import link_rate  # imports numpy

    if specs is None:
        return [f"{moved}: in each step the driver moves the others there and back."]
    least, most = (2 * count / link_rate(specs) for count in (plan.host - room, plan.host))
    return [
        f"{moved}: in each step the driver moves the others there and back, or all of them, which "
        f"takes {duration(least)} to {duration(most)} more than is planned."
    ]


def _of_evaluation(step: ModelStep, plan: Plan, gpu: GPU, need: int) -> list[str]:
    each = logits_bytes(step)
    if each is None:
        return []
    if each <= LITTLE:
        return [
            "evaluation is not planned: a batch takes less than in training, and with "
            f"compute_metrics Trainer keeps no more than {size(each)} of logits per example."
        ]
    held = plan.highest["parameters"] + plan.highest["optimizer states"] + need - plan.peak
    room = max(0, gpu.memory - held) // (COPIES * each)
    return [
        f"evaluation is not planned: with compute_metrics Trainer keeps {size(each)} of logits per "
        f"example on the GPU ({size(BATCH * each)} for its batch of {BATCH}), so that beside the "
        f"weights at most {room:,} examples can be evaluated; with more, set "
        "eval_accumulation_steps, or take what is needed by preprocess_logits_for_metrics."
    ]


def _of_writing(step: ModelStep, plan: Plan, gpu: GPU) -> list[str]:
    """What to know of the completions that grpo writes, and of an engine that writes them."""
    if step.task != "grpo":
        return []
    weights = plan.parameters * (4 if step.weights == "fp32" else 2)
    return [
        f"the {step.batch_size} completions of a step are written by transformers' generate, all "
        "at once: their keys and values are planned, the time that it takes is not.",
        "a generation engine on the same GPU (vLLM, colocated) is not planned: it reserves a share "
        "of its own (vllm_gpu_memory_utilization in TRL; 0.3 of it is "
        f"{size(int(0.3 * gpu.memory))} here), in which its copy of the weights "
        f"({size(weights)}) and its cache must fit, beside the rest of this plan.",
    ]


def of_loading(step: ModelStep, plan: Plan) -> list[str]:
    """What from_pretrained takes of the host: files in the dtype that is asked for are mapped."""
    stored = hf_config.weights_of(step.config)
    taken = plan.parameters * (4 if step.weights == "fp32" else 2)
    if step.base == "nf4" or stored == step.weights or taken < LOADED:
        return []
    return [
        f"from_pretrained makes {step.weights} of {stored} weights on the host first, which takes "
        f"{size(taken)} of its memory in each process."
    ]
