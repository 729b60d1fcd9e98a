"""Conversations: what the model reads, what its loss counts, and how answers are judged."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from helpers import chat, data, models, train
from helpers.recipe import Recipe, replace
from tight_fit.checks import IGNORE
from tight_fit.techniques.step import loss_sum

RECIPE = Recipe("decoder", weights="random", length=48, batch_size=4, train_size=40, test_size=16)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(models.MINI / "decoder")


@pytest.fixture(scope="module")
def split():
    return train.encoded(RECIPE)["train"]


@pytest.fixture(scope="module")
def model():
    return models.build(RECIPE).eval()


def test_a_conversation_is_the_chat_template_and_its_loss_counts_the_answer(tokenizer):
    """As transformers renders the same messages, without the space after the last turn."""
    columns, (length,) = chat.encode_conversations(["oil prices rose"], ["crude"], 64, tokenizer)
    ids, labels = columns["input_ids"][0], columns["labels"][0]
    messages = [
        {"role": "user", "content": f"{chat.QUESTION}\n\noil prices rose"},
        {"role": "assistant", "content": "crude oil"},
    ]
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    assert ids[:length].tolist() == whole[:length] and len(whole) == length
    assert (ids[length:] == tokenizer.pad_token_id).all()
    counted = labels != IGNORE
    assert tokenizer.decode(labels[counted]).strip() == "crude oil<|im_end|>"
    assert torch.equal(labels[counted], ids[counted])


def test_only_the_text_of_a_long_conversation_is_cut(tokenizer):
    long = "net profit rose sharply " * 50
    for length in (32, 48, 64):
        columns, (used,) = chat.encode_conversations([long], ["acq"], length, tokenizer)
        said = tokenizer.decode(columns["input_ids"][0])
        assert used <= length < used + 4, "the room is used but for a token or two"
        assert said.count("net profit") > 1 and "acquisitions<|im_end|>" in said
        assert "which topic" in said and (columns["labels"][0] != IGNORE).sum() == 3
    texts = data.load("r8", 64)["train"]["text"][:]
    columns, _ = chat.encode_conversations(texts, ["earn"] * 64, 40, tokenizer)
    for text, ids in zip(texts, columns["input_ids"]):
        said = tokenizer.decode(ids).split("?", 1)[1].split("<|im_end|>")[0]
        kept = tokenizer.decode(tokenizer(text)["input_ids"])
        assert "".join(kept.split()).startswith("".join(said.split()))


def test_what_cannot_be_a_conversation_is_refused(split):
    with pytest.raises(ValueError, match="length=12 leaves no room"):
        train.encoded(replace(RECIPE, length=12))
    plain = AutoTokenizer.from_pretrained(models.MINI / "deberta")
    with pytest.raises(ValueError, match="no chat template"):
        chat.encode_conversations(["a text"], ["earn"], 64, plain)
    image = Recipe("vit", train_size=16, test_size=8)
    for wrong, asked in ((split, image), (train.encoded(image)["train"], RECIPE)):
        with pytest.raises(ValueError, match="encode a split for this recipe"):
            wrong.check_suits(asked)


def test_the_loss_is_transformers_own(model, split):
    batch = split.batch(range(6))
    counted = split.counted(range(6))
    assert counted == (split.columns["labels"][:6] != IGNORE).sum()
    mean, total = model(**batch).loss.item(), loss_sum(model, batch, RECIPE).item()
    assert total / counted == pytest.approx(mean, rel=1e-6)


def test_padding_changes_neither_loss_nor_gradient(model, split):
    """No attention mask is given: what comes before a token never sees what comes after it."""
    examples = split.lengths.argsort()[:4].tolist()
    results = []
    for part in (split, replace(split, trim=True)):
        batch = part.batch(examples)
        model.zero_grad()
        loss = loss_sum(model, batch, RECIPE)
        loss.backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad.clone()
        results.append((batch["input_ids"].shape[1], loss.item(), gradient))
    (long, one, first), (cut, other, second) = results
    assert cut < long and one == pytest.approx(other, rel=1e-6)
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-6)


def test_answers_are_split_off_and_prompts_padded_on_the_left(tokenizer):
    texts = ["oil prices rose", "it will buy the company and all of its shares"]
    columns, lengths = chat.encode_conversations(texts, ["crude", "acq"], 64, tokenizer)
    prompts, answers = chat.split_off_answers(columns)
    for row, name in enumerate(("crude oil", "acquisitions")):
        mask = prompts["attention_mask"][row].bool()
        size = int(mask.sum())
        assert not mask[:-size].any()
        assert torch.equal(prompts["input_ids"][row][mask], columns["input_ids"][row, :size])
        said = answers[row][answers[row] != IGNORE]
        assert tokenizer.decode(said).strip() == f"{name}<|im_end|>"
        assert size + len(said) == lengths[row]


def test_greedy_generation_in_a_batch_is_that_of_each_example_alone(model, split):
    prompts, _ = chat.split_off_answers(split.batch(range(8)))
    together = model.generate(**prompts, max_new_tokens=3, do_sample=False, use_cache=True)
    for example in range(8):
        ids = prompts["input_ids"][example][prompts["attention_mask"][example].bool()]
        for _ in range(3):  # token by token, without a cache
            ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
        assert torch.equal(ids[-3:], together[example, -3:])


def test_an_answer_is_right_only_word_for_word(split):
    batch = split.batch(range(8))
    _, answers = chat.split_off_answers(batch)
    stop = answers[0][answers[0] != IGNORE][-1]
    perfect = answers.where(answers != IGNORE, stop)
    wrong, endless = perfect.clone(), perfect.clone()
    wrong[3, 0] += 1
    endless[5, (answers[5] == stop).int().argmax()] = 7  # goes on where the turn should end
    for said, mistaken in ((perfect, []), (wrong, [[3]]), (endless, [[5]])):

        def generate(input_ids, said=said, **settings):
            return torch.cat([input_ids, said], dim=1)

        right = chat.right_answers(SimpleNamespace(generate=generate), batch)
        assert (~right).nonzero().tolist() == mistaken
