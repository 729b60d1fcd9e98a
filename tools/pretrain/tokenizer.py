"""The tokenizers of the mini DeBERTa and the mini decoder: Unigram, trained on the corpus.

As for DeBERTa-v3, SentencePiece trains it (Kudo, "Subword Regularization", 2018; Kudo and
Richardson, 2018), because its trainer gives the same vocabulary on every run with one thread. The
trainer in `tokenizers` walks through hash maps in an order that changes from one process to the
next, and the vocabulary changes with it. The result is kept in the format of `tokenizers`, so that
loading needs neither SentencePiece nor a conversion.
"""

from __future__ import annotations

import io
import string
from collections.abc import Iterable

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Ids 0 to 4; the first four are those of DeBERTa-v3.
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
VOCABULARY = 8192
LENGTH = 512  # tokens of the longest example that the tokenizer promises to a model
# Ids 0 to 3 of the decoder's: end of a document and padding, begin and end of a turn, unknown.
CHAT_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
# ChatML, as Qwen's models have it: each message between the two tokens of a turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCORE_DIGITS = 4  # log-probabilities are rounded, as their last bits depend on the machine


def pieces(
    texts: Iterable[str],
    size: int = VOCABULARY,
    special: tuple[str, ...] = SPECIAL,
    lower: bool = False,
) -> list[tuple[str, float]]:
    """The `size` pieces with their log-probabilities, the `special` tokens first.

    special  of padding, begin, end and unknown, and any others
    lower    of the texts in lower case
    Every printable ASCII character is a piece, though the corpus, all letters, hardly has digits.
    """
    out = io.BytesIO()
    letters = string.ascii_lowercase if lower else string.ascii_letters
    pad, cls, sep, unk, *others = special
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=out, model_type="unigram", vocab_size=size,
        normalization_rule_name="nfkc_cf" if lower else "nfkc", character_coverage=0.9999,
        max_sentence_length=1 << 16, num_threads=1, minloglevel=2,
        required_chars=letters + string.digits + string.punctuation,
        pad_id=0, pad_piece=pad, bos_id=1, bos_piece=cls, eos_id=2, eos_piece=sep,
        unk_id=3, unk_piece=unk, control_symbols=others,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    return [
        (model.id_to_piece(i), round(model.get_score(i), SCORE_DIGITS)) for i in range(len(model))
    ]


def _core(vocabulary: list[tuple[str, float]], special: tuple[str, ...]) -> Tokenizer:
    """NFKC, single spaces, Metaspace, Unigram; the fourth special token is the unknown one."""
    core = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    core.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    core.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    core.add_special_tokens(list(special))
    return core


def build(vocabulary: list[tuple[str, float]]) -> PreTrainedTokenizerFast:
    """DeBERTa's fast tokenizer around a vocabulary, with [CLS] text [SEP]."""
    core = _core(vocabulary, SPECIAL)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "cls_token", "sep_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=LENGTH,
        padding_side="right",
        **dict(zip(names, SPECIAL)),
    )


def train(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of the mini DeBERTa from its corpus; same texts, same tokenizer."""
    return build(pieces(texts))


def train_chat(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of the mini decoder from its corpus, with a chat template.

    Upper case becomes lower case, since the corpus has hardly any. Nothing is added before or after
    a text.
    """
    end, turn, stop, unknown = CHAT_SPECIAL
    core = _core(pieces(texts, special=CHAT_SPECIAL, lower=True), CHAT_SPECIAL)
    core.normalizer = normalizers.Sequence([core.normalizer, normalizers.Lowercase()])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=LENGTH,
        padding_side="right",
        pad_token=end,
        eos_token=stop,
        unk_token=unknown,
        additional_special_tokens=[turn],
        chat_template=CHAT_TEMPLATE,
    )
