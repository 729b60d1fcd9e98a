"""The losses of DPO and GRPO: against their formulas, TRL's own trainers, and finite numbers."""

import pytest
import torch
import torch.nn.functional as F
import transformers as library
from torch import nn

from tests.small import configured
from tight_fit.models.made import FlatLogits
from tight_fit.plans.model import ModelStep
from tight_fit.techniques import preferences
from tight_fit.techniques.chunked_loss import put_in_chunks
from tight_fit.techniques.log_probs import ChunkedLogProbs
from tight_fit.techniques.step import loss_sum

TOKENS, WIDTH, WORDS = 700, 24, 97
CONFIG = configured(library.LlamaConfig, 32, 2, 4, 64, WORDS, num_key_value_heads=2, pad_token_id=0)
IGNORE = -100


def head(bias: bool = True, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, dtype=dtype, requires_grad=True)
    shift = torch.randn(WORDS, dtype=dtype, requires_grad=True) if bias else None
    labels = torch.randint(WORDS, (TOKENS,))
    labels[::5] = IGNORE
    return hidden, weight, shift, labels


def direct(hidden, weight, bias, labels):
    logits = F.linear(hidden, weight, bias).float()
    return -F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)


@pytest.mark.parametrize("bias", [True, False])
def test_chunks_give_the_log_probabilities_and_their_gradients(bias):
    *tensors, labels = head(bias)
    trained = [part for part in tensors if part is not None]
    scale = torch.randn(TOKENS)
    found = [way(*tensors, labels) for way in (direct, ChunkedLogProbs.apply)]
    gradients = [torch.autograd.grad((part * scale).sum(), trained) for part in found]
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-5)
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_under_autocast_products_are_in_16_bits():
    *tensors, labels = head(False)
    with torch.autocast("cpu", torch.bfloat16):
        found = ChunkedLogProbs.apply(*tensors, labels)
    assert found.dtype == torch.float32
    near, exact = direct(*tensors, labels), found
    assert not torch.equal(near, exact) and (near - exact).abs().mean() < 0.1
    found.sum().backward()
    assert tensors[0].grad.isfinite().all()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return library.LlamaForCausalLM(CONFIG)


def pairs(count: int = 3, tokens: int = 20) -> dict[str, torch.Tensor]:
    """Chosen and rejected answers of unlike lengths, with prompts and padding."""
    torch.manual_seed(1)
    ids = torch.randint(1, WORDS, (2 * count, tokens))
    prompt = torch.arange(tokens)[None] < torch.tensor([4, 6, 5] * 2)[:, None]
    there = torch.arange(tokens)[None] < torch.tensor([20, 11, 15, 9, 20, 13])[:, None]
    ids = ids.where(there, 0)
    return {
        "input_ids": ids,
        "attention_mask": there.long(),
        "labels": ids.masked_fill(prompt | ~there, IGNORE),
    }


def step(task: str, loss: str = "full") -> ModelStep:
    return ModelStep(CONFIG, batch_size=3, length=20, task=task, loss=loss)


def ours(model: nn.Module, reference: nn.Module, batch, loss: str) -> torch.Tensor:
    made = FlatLogits(model, "dpo").train()
    made.reference = FlatLogits(reference, "dpo").eval()
    if loss == "chunked":
        put_in_chunks(model)
        put_in_chunks(reference, always=True)
    return loss_sum(made, batch, step("dpo", loss)) / 3


def by_formula(model, reference, batch) -> torch.Tensor:
    """The equation of the paper, a pair and a token at a time."""
    total = torch.zeros(())
    for pair in range(3):
        sums = {}
        for which, row in (("chosen", pair), ("rejected", pair + 3)):
            for name, net in (("own", model), ("reference", reference)):
                ids, mask = batch["input_ids"][row, None], batch["attention_mask"][row, None]
                words = net(input_ids=ids, attention_mask=mask).logits[0].log_softmax(-1)
                labels = batch["labels"][row]
                sums[which, name] = sum(
                    words[place - 1, labels[place]]
                    for place in range(1, len(labels))
                    if labels[place] != IGNORE
                )
        margin = sums["chosen", "own"] - sums["chosen", "reference"]
        margin = margin - sums["rejected", "own"] + sums["rejected", "reference"]
        total = total - torch.log(1 / (1 + torch.exp(-0.1 * margin)))
    return total / 3


def gradients(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in found])


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_the_loss_of_dpo_is_the_papers(loss):
    batch, expected = pairs(), by_formula(model_of(0), model_of(1), pairs())
    model = model_of(0)
    found = ours(model, model_of(1), batch, loss)
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-5)
    other = model_of(0)
    wanted = gradients(by_formula(other, model_of(1), batch), other)
    torch.testing.assert_close(gradients(found, model), wanted, atol=1e-5, rtol=1e-4)


def words():
    """A tokenizer that nothing is asked of but its padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    known = {"[PAD]": 0, "[EOS]": 1, "a": 2}
    made = Tokenizer(WordLevel(known, unk_token="a"))
    return library.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="a"
    )


@pytest.mark.parametrize("loss, beta", [("full", 0.04), ("chunked", 0.0), ("chunked", 0.04)])
def test_the_loss_and_gradient_of_grpo_are_trls(loss, beta, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    torch.manual_seed(2)
    ids, written = torch.randint(1, WORDS, (6, 20)), 12
    there = torch.arange(written)[None] < torch.tensor([12, 5, 9, 3, 12, 7])[:, None]
    mask = torch.cat([torch.ones(6, 8, dtype=torch.long), there.long()], 1)
    advantages, reference = torch.randn(6), -2 * torch.rand(6, written)
    args = trl.GRPOConfig(
        str(tmp_path),
        report_to="none",
        bf16=False,
        loss_type="grpo",
        use_bias_correction_kl=False,  # the estimator of GRPO's paper
        use_cpu=True,
        per_device_train_batch_size=6,
        num_generations=3,
    )
    args.gradient_checkpointing = False
    model = model_of(0)
    data = Dataset.from_list([{"prompt": "a"}])
    options = {"train_dataset": data, "processing_class": words()}
    trainer = trl.GRPOTrainer(model, lambda **all: [0.0], args=args, **options)
    trainer.beta = beta  # after it was made: it would look for the reference on the hub
    trainer.current_gradient_accumulation_steps = 1
    theirs = trainer._compute_loss(
        model.train(),
        {
            "prompt_ids": ids[:, :8], "prompt_mask": mask[:, :8], "completion_ids": ids[:, 8:],
            "completion_mask": mask[:, 8:], "advantages": advantages,
            "ref_per_token_logps": reference, "num_items_in_batch": there.sum(),
        },
    )  # fmt: skip
    other = model_of(0)
    made = FlatLogits(other, "grpo").train()
    if loss == "chunked":
        put_in_chunks(other)
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORE)[:, -written - 1 :],
        "advantages": advantages,
    }
    if beta:
        batch["reference"] = F.pad(reference, (0, 1))
    found = loss_sum(made, batch, step("grpo", loss)) / 6
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        gradients(found, other), gradients(theirs, model), atol=1e-5, rtol=1e-3
    )


def test_advantages_are_those_of_the_group():
    found = preferences.group_advantages(torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0]), 3)
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_a_ratio_that_has_moved_too_far_has_no_gradient():
    old = torch.zeros(2, 3)
    far = torch.full((2, 3), 0.5, requires_grad=True)  # a ratio of 1.65
    counts = torch.ones(2, 3, dtype=torch.bool)
    loss = preferences.grpo_loss_sum(far, counts, torch.tensor([1.0, -1.0]), old)
    (gradient,) = torch.autograd.grad(loss, far)
    assert (gradient[0] == 0).all() and (gradient[1] > 0).all()
