"""What lessons 02 and 07 say of Trainer under accumulation, for the installed transformers."""

import pytest
import transformers

from by_hand import trainer_factors
from by_hand.trainer_factors import MODELS, PARTS, batch_of, measured, rows_of, step, tiny

# What the lessons say: these heads ignore num_items_in_batch, so that Trainer multiplies their
# gradients by the number of micro-batches.
IGNORE_THE_NUMBER = {
    "BertForSequenceClassification", "RobertaForSequenceClassification",
    "DistilBertForSequenceClassification", "ElectraForSequenceClassification",
    "AlbertForSequenceClassification", "ModernBertForSequenceClassification",
    "DebertaV2ForSequenceClassification", "LlamaForSequenceClassification",
    "Qwen3ForSequenceClassification", "GPT2ForSequenceClassification", "BertForTokenClassification",
    "BertForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration",
}  # fmt: skip
# And these divide by it.
USE_THE_NUMBER = {"LlamaForCausalLM", "Qwen3ForCausalLM", "ViTForImageClassification"}
WHAT_TO_CHANGE = (
    "transformers {version} multiplies the accumulated gradient of {name} by {found:.3f}, and no "
    "longer by {wanted}{line}. Move the class in tests/by_hand/test_trainer_factors.py, and "
    "correct the sentences on accepts_loss_kwargs in lessons 02 (text, decision card) and 07, in "
    "labs 02 and 07, and in helpers/models.py."
)


def changed(name, found, wanted, line=""):
    return WHAT_TO_CHANGE.format(
        version=transformers.__version__, name=name, found=found, wanted=wanted, line=line
    )


def test_every_measured_class_is_spoken_of():
    assert set(MODELS) == IGNORE_THE_NUMBER | USE_THE_NUMBER


@pytest.mark.parametrize("name", MODELS)
def test_trainers_gradient_is_what_the_lessons_say(name):
    wanted = PARTS if name in IGNORE_THE_NUMBER else 1
    found = measured(name)
    assert found.factor == pytest.approx(wanted, rel=1e-3), changed(name, found.factor, wanted)
    told = measured(name, accepts_loss_kwargs=False)
    assert told.factor == pytest.approx(1, rel=1e-3), changed(
        name, told.factor, 1, " with the line"
    )
    assert found.loss == pytest.approx(wanted * told.loss, rel=1e-3), "the symptom in the log"


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_that_another_number_leaves_unchanged_ignores_it(name):
    """The test of one line that lesson 02 gives for any model."""
    model, batch = tiny(name), batch_of(rows_of(name))
    one, other = (model(**batch, num_items_in_batch=count).loss.item() for count in (1, 2))
    assert (one == other) == (name in IGNORE_THE_NUMBER)


ADAPTED = {"BertForSequenceClassification": "query", "LlamaForSequenceClassification": "q_proj"}


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize(
    "where, factor", [("before", 1), ("inside", 1), ("wrapper", PARTS), ("nowhere", PARTS)]
)
def test_with_peft_the_line_belongs_on_the_base_model(name, where, factor):
    """Before get_peft_model or after it, and not on what get_peft_model returns."""
    peft = pytest.importorskip("peft")
    base = tiny(name)
    if where == "before":
        base.accepts_loss_kwargs = False
    settings = peft.LoraConfig(
        r=2, target_modules=[ADAPTED[name]], task_type="SEQ_CLS", init_lora_weights=False
    )
    model = peft.get_peft_model(base, settings)
    if where == "inside":
        model.get_base_model().accepts_loss_kwargs = False
    if where == "wrapper":
        model.accepts_loss_kwargs = False
    assert step(model, rows_of(name)).factor == pytest.approx(factor, rel=1e-3)


def test_a_class_that_is_not_measured_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'BertForSequenceClassification'"):
        trainer_factors.trainer_factors("BertForSequenceClasification")
