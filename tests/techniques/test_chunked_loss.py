"""The loss in chunks against torch's own, its gradients too."""

import pytest
import torch
import torch.nn.functional as F
import transformers as library
from torch import nn

from tests.small import configured
from tight_fit.techniques.chunked_loss import (
    IGNORED,
    ChunkedCrossEntropy,
    HeadInChunks,
    put_in_chunks,
    tokens_in_chunk,
)

TOKENS, WIDTH, WORDS = 13, 6, 40


def tensors(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(3)
    shapes = (TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,)
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    labels[4] = labels[12] = IGNORED
    return made[0], made[1], made[2] if bias else None, labels


def both(change=lambda *given: None, bias=True, dtype=torch.float32):
    """[(loss, gradients)] in chunks and by torch, of (3 × the loss)."""
    found = []
    for chunked in (True, False):
        hidden, weight, offset, labels = tensors(dtype, bias)
        change(hidden, weight, offset)
        if chunked:
            loss = ChunkedCrossEntropy.apply(hidden, weight, offset, labels)
        else:
            logits = F.linear(hidden, weight, offset)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        (3 * loss).backward()
        parts = [part for part in (hidden, weight, offset) if part is not None]
        found.append((loss.detach(), [part.grad for part in parts]))
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_torchs(bias):
    (loss, gradients), (expected, others) = both(bias=bias)
    assert torch.allclose(loss, expected, rtol=1e-6)
    for mine, other in zip(gradients, others, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_has_no_gradient_and_none_is_made():
    def freeze(hidden, weight, offset):
        weight.requires_grad_(False)

    (_, gradients), (_, others) = both(freeze, bias=False)
    assert gradients[1] is None and torch.allclose(gradients[0], others[0], rtol=1e-4, atol=1e-5)


def test_in_bf16_the_loss_stays_near():
    (loss, gradients), (expected, others) = both(dtype=torch.bfloat16, bias=False)
    assert loss.dtype == torch.float32 and loss == pytest.approx(expected.item(), rel=1e-2)
    assert gradients[0].dtype == torch.bfloat16
    near = torch.nn.functional.cosine_similarity(
        gradients[1].float().flatten(), others[1].float().flatten(), dim=0
    )
    assert near > 0.999


def test_a_label_that_counts_for_nothing_changes_nothing():
    hidden, weight, _, labels = tensors(torch.float32)
    labels[:] = IGNORED
    loss = ChunkedCrossEntropy.apply(hidden, weight, None, labels)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(
    "tokens, words, width, expected",
    [
        (32768, 128256, 4096, 1024),
        (2048, 100, 200, 2048),
        # A narrow model with a large vocabulary would have chunks of 8 of its 2,048 tokens.
        (2048, 151936, 1024, 256),
        (100, 151936, 1024, 100),
    ],
)
def test_chunks_have_about_as_many_logits_as_hidden_states_but_keep_a_gpu_busy(
    tokens, words, width, expected
):
    chunk = tokens_in_chunk(tokens, words, width)
    assert chunk == expected and (chunk <= 256 or chunk * words <= 2 * tokens * width)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_chunks_has_the_same_parameters_and_gradients(tied):
    torch.manual_seed(1)
    config = configured(library.LlamaConfig, 16, 2, 4, 24, 50, tie_word_embeddings=tied)
    model = library.LlamaForCausalLM(config)
    ids = torch.randint(50, (2, 12))
    names = [name for name, _ in model.named_parameters()]
    F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten(), reduction="sum").backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    head = put_in_chunks(model)
    assert model.get_output_embeddings() is head
    head.loss_sum(model(ids).logits, ids).backward()
    assert [name for name, _ in model.named_parameters()] == names
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, other, rtol=1e-3, atol=1e-5)


def test_logits_that_are_changed_after_the_head_are_refused():
    """Soft caps and slices would silently be left out."""
    config = configured(library.Gemma2Config, 16, 1, 4, 24, 50, num_key_value_heads=2, head_dim=4)
    model, ids = library.Gemma2ForCausalLM(config), torch.randint(50, (2, 12))
    head = put_in_chunks(model)
    with pytest.raises(ValueError, match="use loss='full'"):
        head.loss_sum(model(ids).logits, ids)


def test_a_model_without_a_vocabulary_is_refused():
    config = configured(library.BertConfig, 16, 1, 2, 24, 50)
    model = library.BertForSequenceClassification(config)
    with pytest.raises(ValueError, match="is for language models"):
        put_in_chunks(model)
    assert not any(isinstance(module, HeadInChunks) for module in model.modules())
    assert isinstance(model.classifier, nn.Linear)
