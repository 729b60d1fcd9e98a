"""The settings of one optimizer step of any Hugging Face model, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tight_fit.checks import check_step, make_plain, one_of, shown, true_or_false, whole
from tight_fit.models import bounds as config_bounds
from tight_fit.models import config as hf_config
from tight_fit.models import images
from tight_fit.models.config import LANGUAGE_MODELS, TASKS, Config, Task
from tight_fit.techniques import references, targets
from tight_fit.techniques.rules import check_techniques
from tight_fit.techniques.targets import QUERY_VALUE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SPEECH = ("whisper",)
SEES = ("image", "pair")
POSITIONS = "max_position_embeddings"
LENGTH = 512  # tokens per example, where nothing is said and the model takes that many


@dataclass(frozen=True)
class ModelStep:
    """One optimizer step of a model given by its configuration, as `Recipe` is for a course model.

    >>> from tight_fit import ModelStep
    >>> step = ModelStep.of("roberta-large", batch_size=32, accumulation=4, precision="bf16")
    >>> step.task, step.micro_batch
    ('sequence-classification', 8)

    The fields of `Recipe` mean what they mean there; the others are:

    config   transformers' configuration; the quantization that it asks for is left aside
    weights  dtype of the weights, "fp32", "bf16" or "fp16"; None takes the configuration's, or fp32
             where that is fp16 and all weights train. Adapters of LoRA are fp32, as peft makes them
    base     "nf4" keeps the linear layers in 4 bits with double quantization, frozen beside
             adapters (`techniques.four_bits`), and the rest in the dtype of `weights`, by default
             bf16, or fp16 with fp16's autocast; "fp32" and "bf16" are another word for `weights`
    kbit     with base="nf4": after peft's `prepare_model_for_kbit_training`, so that what is not
             quantized is fp32, the embeddings' output has a gradient, and layers are checkpointed
    lora_targets  layers that get adapters: "query-value", "all-linear", or names with commas
    lora_alpha, lora_scale  adapters are scaled by α / r or, with "alpha/sqrt(r)", by α / √r; α is
             2 r where it is None
    attention  "eager" or "sdpa"; None takes the library's own choice
    flash    whether the GPU has FlashAttention's kernel (from Ampere on); without it attention in
             bf16, and that of grouped queries before PyTorch 2.14, is written out
    loss     "chunked": cross entropy a chunk of tokens at a time (`techniques.chunked_loss`)
    float8   "tensorwise" or "rowwise": the layers' products in 8 bits (`techniques.eight_bits`)
    compile  each layer is compiled by itself (`trace.compiled_layers`), and the rest is not
    offload, optimizer_in_backward, max_grad_norm  as in `Recipe`
    precision  autocast, as in `Recipe`; with "fp32" operations run in the dtype of the weights
    task     a key of `TASKS`; None takes the usual one (`hf_config.task_of`)
    length   tokens per example (text; of encoder and decoder alike; with those that an image stands
             for); None takes 512 of text, or fewer if the model takes fewer
    side     height and width of an image in pixels; None takes the configuration's, or 224
    classes  of a classifier; None takes the configuration's
    frozen   only for models with one stack of layers
    reference  of task="dpo" or "grpo": how the reference is had, one of `references.REFERENCES`;
             None takes "adapters-off" with LoRA, else a "model" in memory, and "none" with grpo
    completion  of task="grpo": how many of an example's tokens the model writes; None takes half

    With task="dpo" an example is a pair, whose two answers are each `length` tokens with their
    prompt; with "grpo" it is a completion.

    Raises ValueError or TypeError, in one sentence (CannotPlan is a ValueError).
    """

    config: Config = field(compare=False)
    batch_size: int = 16
    length: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: bool = False
    accumulation: int = 1
    frozen: int | None = None
    lora_rank: int | None = None
    task: str | None = None
    reference: str | None = None
    completion: int | None = None
    classes: int | None = None
    side: int | None = None
    weights: str | None = None
    base: str | None = None
    kbit: bool = False
    lora_targets: str = QUERY_VALUE
    lora_alpha: float | None = None
    lora_scale: str = "alpha/r"
    attention: str | None = None
    flash: bool = True
    loss: str = "full"
    float8: str | None = None
    compile: bool = False
    offload: str | None = None
    optimizer_in_backward: bool = False
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    peak_learning_rate: float = 2e-5

    def __post_init__(self):
        make_plain(self)
        true_or_false("kbit", self.kbit)
        if self.kbit:
            if self.base != "nf4":
                raise ValueError(
                    "kbit=True prepares weights in 4 bits for training: use base='nf4', or leave "
                    "kbit out."
                )
            object.__setattr__(self, "checkpointing", True)
        check_step(self)
        check_techniques(self)
        if self.compile and "mamba" in self.config.model_type:
            raise hf_config.CannotPlan(
                "What torch.compile makes of the loops of mamba is not known: leave compile out."
            )
        for name in ("classes", "side"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        config_bounds.check_sizes(self.config, self.classes)
        object.__setattr__(self, "task", hf_config.task_of(self.config, self.task))
        targets.check_targets(self.lora_targets)
        object.__setattr__(self, "weights", self._weights())
        if self.loss == "chunked" and self.task not in LANGUAGE_MODELS:
            raise ValueError(
                f"loss='chunked' is for the next token ({', '.join(LANGUAGE_MODELS)}), and the "
                f"task is {self.task}: use loss='full'."
            )
        if self.classes is not None and not self.kind.classifies:
            raise ValueError(
                f"classes={self.classes} is for a classifier, and the task is {self.task}: leave "
                "classes out, or name such a task."
            )
        self._check_adapters()
        self._check_preferences()
        self._check_what_is_read()
        if self.length is not None and self.reads == "image":
            raise ValueError(
                f"length={self.length} is for text; an image's size is side: leave length out."
            )
        if self.side is not None and self.image is None:
            raise ValueError(
                f"side={self.side} is for images; a text's size is length: leave side out."
            )

    def _check_what_is_read(self) -> None:
        """CannotPlan for a model whose images or sounds are not known, ValueError for sizes."""
        read = {"images": images.READ, "speech": SPEECH}.get(self.reads, ())
        if read and self.config.model_type not in read:
            raise hf_config.CannotPlan(
                f"What {self.config.model_type} reads beside text is not known here, which differs "
                f"from model to model: {self.task} is planned for {', '.join(read)}."
            )
        if self.reads == "images":
            count = images.tokens_of(self.config, self.side)
            if self.length is not None and self.length <= count:
                raise ValueError(
                    f"length={self.length} leaves no token for text beside the {count} of an "
                    f"image: use more than {count}, or a smaller side."
                )

    def _check_adapters(self) -> None:
        """Raises ValueError for a rank above the width, and where all layers are frozen."""
        text = hf_config.text_config(self.config)
        width = getattr(text, "hidden_size", None)
        if self.lora_rank is None or not isinstance(width, int):
            return
        if self.lora_rank > width:
            raise ValueError(
                f"lora_rank={self.lora_rank} is more than the {width} columns of the matrices it "
                "adapts: choose a rank far below."
            )
        if self.frozen is not None and self.frozen == getattr(text, "num_hidden_layers", None):
            raise ValueError(
                f"lora_rank={self.lora_rank} has nothing to adapt with frozen={self.frozen}: all "
                "layers are frozen; lower frozen, or leave lora_rank out."
            )

    def _check_preferences(self) -> None:
        """Raises ValueError for fields of a preference that do not go with the step, and sets the
        tokens that are written."""
        if self.task not in references.TASKS:
            for name in ("reference", "completion"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={shown(getattr(self, name))} is for the tasks dpo and grpo, and "
                        f"the task is {self.task}: leave it out."
                    )
            return
        if self.reference is not None:
            one_of("reference", self.reference, references.REFERENCES)
            if self.reference not in references.OF_TASK[self.task]:
                able = ", ".join(references.OF_TASK[self.task])
                raise ValueError(
                    f"reference={self.reference!r} makes no step of {self.task}: use one of {able}."
                )
            if self.reference == references.ADAPTERS_OFF and self.lora_rank is None:
                raise ValueError(
                    "reference='adapters-off' takes the base under adapters, and there are none: "
                    "give lora_rank, or use reference='model'."
                )
        if self.task == "dpo" and self.completion is not None:
            raise ValueError(
                f"completion={shown(self.completion)} is for grpo, where the model writes; the "
                "answers of dpo are part of length: leave it out."
            )
        if self.task == "grpo":
            tokens = self.tokens or 1
            if tokens < 2:
                raise ValueError(
                    f"length={tokens} has no room for a prompt and a completion: use 2 or more."
                )
            if self.completion is None:
                object.__setattr__(self, "completion", tokens // 2)
            whole("completion", self.completion, 1, tokens - 1)

    @property
    def compared_with(self) -> str:
        """How the reference is had, one of `references.REFERENCES`; "none" for other tasks."""
        if self.reference is not None or self.task not in references.TASKS:
            return self.reference or references.NONE
        if self.task == "grpo":
            return references.NONE
        return references.MODEL if self.lora_rank is None else references.ADAPTERS_OFF

    @property
    def sequences(self) -> int:
        """Texts of an example: the two answers of a pair, else one."""
        return 2 if self.task == "dpo" else 1

    def _weights(self) -> str:
        """The dtype of the weights. Raises ValueError for fp16 weights that train."""
        trained = self.lora_rank is None
        if self.base == "nf4" and self.weights is None:
            return "fp16" if self.precision == "fp16" else "bf16"
        if self.base in hf_config.WEIGHTS:
            if self.weights not in (None, self.base):
                raise ValueError(
                    f"base={self.base!r} and weights={self.weights!r} are two dtypes for the same "
                    "weights: leave one out."
                )
            return self.base
        if self.weights is None:
            stored = hf_config.stored_weights(self.config)
            return "fp32" if stored == "fp16" and trained else stored
        one_of("weights", self.weights, hf_config.WEIGHTS)
        if self.weights == "fp16" and trained:
            raise ValueError(
                "weights='fp16' cannot be trained, since their gradients overflow or vanish: use "
                "fp32 weights with precision fp16, bf16 weights, or LoRA beside fp16 weights."
            )
        return self.weights

    @property
    def grouped(self) -> bool:
        """Whether several heads of the queries share one of the keys and values."""
        text = hf_config.text_config(self.config)
        heads = getattr(text, "num_attention_heads", None)
        return getattr(text, "num_key_value_heads", None) not in (None, heads)

    def on(self, capability: tuple[int, int]) -> ModelStep:
        """The step with the attention kernels of a GPU of that compute capability, (0, 0) for none.

        It differs from this one only where that changes something.
        """
        older = (0, 0) < capability < (8, 0)
        flash = not (older and (self.grouped or "bf16" in (self.precision, self.weights)))
        return self if flash == self.flash else replace(self, flash=flash)

    @classmethod
    def of(cls, model: PretrainedConfig | str | Path, **fields: Any) -> ModelStep:
        """The step of a model given in any way that `models.config.read` knows, such as its name.

        Raises what it and `ModelStep` raise.
        """
        return cls(hf_config.read(model), **fields)

    @property
    def kind(self) -> Task:
        """What the task is, from `TASKS`."""
        assert self.task is not None, "set when the step was made"
        return TASKS[self.task]

    @property
    def reads(self) -> str:
        """What the model reads: "text", "texts", "image", "pair", "images" or "speech"."""
        return self.kind.reads

    @property
    def image(self) -> tuple[int, int, int] | None:
        """(channels, height, width) of an image, None where none is read."""
        if self.reads == "images":
            return images.shape_of(self.config, self.side)
        return hf_config.image_shape(self.config, self.side) if self.reads in SEES else None

    @property
    def micro_batch(self) -> int:
        """Examples per forward pass."""
        return self.batch_size // self.accumulation

    @property
    def tokens(self) -> int | None:
        """Tokens per example (text), None for images."""
        if self.reads == "image":
            return None
        text = hf_config.text_config(self.config)
        most = getattr(text, "max_target_positions" if self.reads == "speech" else POSITIONS, None)
        beside = images.tokens_of(self.config, self.side) if self.reads == "images" else 0
        wanted = LENGTH + beside
        return self.length or (min(wanted, most) if isinstance(most, int) and most > 0 else wanted)
