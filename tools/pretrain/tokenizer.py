"""The mini DeBERTa's own tokenizer: a Unigram vocabulary trained on the pretraining corpus.

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
SCORE_DIGITS = 4  # log-probabilities are rounded, as their last bits depend on the machine


def pieces(texts: Iterable[str], size: int = VOCABULARY) -> list[tuple[str, float]]:
    """The `size` pieces with their log-probabilities, the special tokens first.

    Every printable ASCII character is a piece, though the corpus, all letters, hardly has digits.
    """
    out = io.BytesIO()
    pad, cls, sep, unk, mask = SPECIAL
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=out, model_type="unigram", vocab_size=size,
        normalization_rule_name="nfkc", character_coverage=0.9999, max_sentence_length=1 << 16,
        num_threads=1, minloglevel=2,
        required_chars=string.ascii_letters + string.digits + string.punctuation,
        pad_id=0, pad_piece=pad, bos_id=1, bos_piece=cls, eos_id=2, eos_piece=sep,
        unk_id=3, unk_piece=unk, control_symbols=[mask],
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    return [
        (model.id_to_piece(i), round(model.get_score(i), SCORE_DIGITS)) for i in range(len(model))
    ]


def build(vocabulary: list[tuple[str, float]]) -> PreTrainedTokenizerFast:
    """The fast tokenizer around a vocabulary.

    NFKC, single spaces, Metaspace, Unigram, and [CLS] text [SEP].
    """
    core = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIAL.index("[UNK]"), byte_fallback=False))
    core.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    core.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    core.add_special_tokens(list(SPECIAL))
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
