"""Conversations about texts: a question with a text, and an answer that a language model learns.

The user asks for the topic of a text, the assistant answers with its name. The loss counts the
answer alone, with the token that ends the turn: every other label is IGNORE. A conversation is
padded on the right. A token of a causal model sees only those before it, so real tokens never see
the padding and the batch needs no attention mask. For generation prompts are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tight_fit.checks import IGNORE, of_type, whole

QUESTION = "Which topic is this text about?"
ANSWERS = {  # of Reuters' labels; the labels of other data sets are answers themselves
    "acq": "acquisitions",
    "crude": "crude oil",
    "earn": "earnings",
    "grain": "grain",
    "interest": "interest rates",
    "money-fx": "foreign exchange",
    "ship": "shipping",
    "trade": "trade",
}


def prompt(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The question about a text in the tokenizer's chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": f"{QUESTION}\n\n{text}"}]
    # Qwen3's template then leaves its thinking empty; other templates do not look at the name.
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert isinstance(rendered, str), "what is not tokenized is a string"
    return rendered


def encode_conversations(
    texts: Sequence[str], labels: Sequence[str], length: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Tensor], Tensor]:
    """({"input_ids", "labels"}, int64 (examples, length); tokens per example, int64 (examples,)).

    labels  the name of each text's class: the answer, or a key of ANSWERS
    length  tokens of a conversation; a text that is too long for it loses its end

    A special token that stands in a text or an answer is taken out of it, so that no text can end
    its own turn and answer itself.

    Raises TypeError or ValueError, in one sentence, for texts and labels that are no lists of
    strings of the same number, a tokenizer without a chat template, and a length that leaves no
    room for any text.
    """
    for name, values in (("texts", texts), ("labels", labels)):
        if isinstance(values, str) or not all(isinstance(value, str) for value in values):
            raise TypeError(f"{name} must be a list of strings, one per example.")
    if not texts or len(texts) != len(labels):
        raise ValueError(
            f"There are {len(texts)} texts and {len(labels)} labels: give one label per text, and "
            "at least one."
        )
    length = whole("length", length, 1)
    of_type("tokenizer", tokenizer, PreTrainedTokenizerBase)
    if tokenizer.chat_template is None or tokenizer.eos_token is None:
        raise ValueError(
            f"The tokenizer {type(tokenizer).__name__} has no chat template or no token that ends "
            "a turn: take the tokenizer of a model that answers instructions."
        )
    texts = [_without_special_tokens(text, tokenizer) for text in texts]
    said_of = {
        label: _without_special_tokens(ANSWERS.get(label, label), tokenizer)
        for label in set(labels)
    }
    if not all(answer.strip() for answer in said_of.values()):
        raise ValueError("A label is empty, and the answer with it: give each class a name.")
    answers = [said_of[label] + tokenizer.eos_token for label in labels]
    known = sorted(set(answers))
    answer_ids = dict(zip(known, _tokens(known, tokenizer)))
    around = len(_tokens([prompt("", tokenizer)], tokenizer)[0])
    room = length - around - max(map(len, answer_ids.values()))
    if room < 1:
        raise ValueError(
            f"length={length} leaves no room for a text: the question and the longest answer take "
            f"{length - room} tokens; use length={length - room + 16} or more."
        )
    prompts = _prompts(texts, room, around + room, tokenizer)
    ids = torch.full((len(texts), length), tokenizer.pad_token_id, dtype=torch.int64)
    marked = torch.full_like(ids, IGNORE)
    lengths = torch.zeros(len(texts), dtype=torch.int64)
    for example, (asked, answer) in enumerate(zip(prompts, answers)):
        said = answer_ids[answer]
        end = len(asked) + len(said)
        ids[example, :end] = torch.tensor(asked + said)
        marked[example, len(asked) : end] = torch.tensor(said)
        lengths[example] = end
    return {"input_ids": ids, "labels": marked}, lengths


def _without_special_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, with a space for each of the tokenizer's special tokens."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, " ")
    return text


def _prompts(
    texts: Sequence[str], room: int, most: int, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """The token ids of each prompt, its text cut to about `room` tokens, `most` in all."""
    out = tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=True,
        max_length=room,
        return_offsets_mapping=True,
    )
    ends = [offsets[-1][1] if offsets else 0 for offsets in out["offset_mapping"]]
    prompts = _tokens([prompt(text[:end], tokenizer) for text, end in zip(texts, ends)], tokenizer)
    for example, tokens in enumerate(prompts):
        cut = ends[example]
        while len(tokens) > most:  # a cut word may take more tokens than in its whole
            cut -= 2 * (len(tokens) - most)
            tokens = _tokens([prompt(texts[example][:cut], tokenizer)], tokenizer)[0]
        prompts[example] = tokens
    return prompts


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def split_off_answers(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """(prompts to generate from, answers) of a batch of conversations.

    Prompts are input_ids and attention_mask, int64 (examples, tokens), padded on the left. Answers
    are int64 (examples, tokens of the longest), padded with IGNORE. Raises ValueError for a batch
    that is none of conversations.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.ndim != 2 or ids.shape != labels.shape:
        raise ValueError(
            "These are no conversations: input_ids and labels must both be of shape (examples, "
            "tokens)."
        )
    answered = labels != IGNORE
    if not answered.any(1).all():
        raise ValueError("A conversation has no answer: every label of it is ignored.")
    starts = answered.int().argmax(1)
    longest = int(starts.max())
    columns = torch.arange(longest, device=ids.device) - (longest - starts)[:, None]
    mask = columns >= 0
    prompts = {
        "input_ids": ids.gather(1, columns.clamp(min=0)) * mask,
        "attention_mask": mask.long(),
    }
    places = starts[:, None] + torch.arange(int(answered.sum(1).max()), device=ids.device)
    places = places.clamp(max=ids.shape[1] - 1)
    answers = labels.gather(1, places)
    # Beyond the end of the batch the last column would come again and again.
    inside = torch.arange(answers.shape[1], device=ids.device) < answered.sum(1)[:, None]
    return prompts, answers.where(inside, IGNORE)


def right_answers(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """bool (examples,): whether greedy generation gives the answer, and ends the turn after it.

    batch  input_ids and labels of conversations, int64 (examples, tokens)
    """
    prompts, answers = split_off_answers(batch)
    stop = int(answers[0][answers[0] != IGNORE][-1])
    said = model.generate(  # type: ignore[operator]  # of a class that transformers mixes in
        **prompts,
        max_new_tokens=answers.shape[1],
        do_sample=False,
        use_cache=True,
        eos_token_id=stop,
        pad_token_id=stop,
    )[:, prompts["input_ids"].shape[1] :]
    said = torch.nn.functional.pad(said, (0, answers.shape[1] - said.shape[1]), value=stop)
    return ((said == answers) | (answers == IGNORE)).all(1)
