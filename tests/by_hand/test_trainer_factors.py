"""What lessons 02 and 07 say of Trainer under accumulation, for the installed transformers."""

import pytest
import transformers

from by_hand.trainer_factors import (
    MODELS,
    PARTS,
    batch_of,
    measured,
    rows_of,
    step,
    tiny,
    trainer_factors,
)

# What the lessons say: these divide by num_items_in_batch, and all others that are measured ignore
# it, so that Trainer multiplies their gradients by the number of micro-batches.
USE_THE_NUMBER = {"LlamaForCausalLM", "Qwen3ForCausalLM", "ViTForImageClassification"}
WHAT_TO_CHANGE = (
    "transformers {version} multiplies the accumulated gradient of {name} by {found:.3f}, and no "
    "longer by {wanted}{line}. Correct USE_THE_NUMBER in tests/by_hand/test_trainer_factors.py, "
    "and the sentences on accepts_loss_kwargs in lessons 02 (text, decision card) and 07, in labs "
    "02 and 07, and in helpers/models.py."
)


@pytest.mark.parametrize("name", MODELS)
def test_trainers_gradient_is_what_the_lessons_say(name):
    wanted = 1 if name in USE_THE_NUMBER else PARTS
    found, told = measured(name), measured(name, accepts_loss_kwargs=False)
    for one, factor, line in ((found, wanted, ""), (told, 1, " with the line")):
        assert one.factor == pytest.approx(factor, rel=1e-3), WHAT_TO_CHANGE.format(
            version=transformers.__version__, name=name, found=one.factor, wanted=factor, line=line
        )
    assert found.loss == pytest.approx(wanted * told.loss, rel=1e-3), "the symptom in the log"
    # The test of one line that lesson 02 gives for any model.
    model, batch = tiny(name), batch_of(rows_of(name))
    one, other = (model(**batch, num_items_in_batch=count).loss.item() for count in (1, 2))
    assert (one != other) == (name in USE_THE_NUMBER)


@pytest.mark.parametrize(
    "where, factor", [("before", 1), ("inside", 1), ("wrapper", PARTS), ("nowhere", PARTS)]
)
def test_with_peft_the_line_belongs_on_the_base_model(where, factor):
    """Before get_peft_model or after it, and not on what get_peft_model returns."""
    peft = pytest.importorskip("peft")
    base = tiny("BertForSequenceClassification")
    if where == "before":
        base.accepts_loss_kwargs = False
    settings = peft.LoraConfig(
        r=2, target_modules=["query"], task_type="SEQ_CLS", init_lora_weights=False
    )
    model = peft.get_peft_model(base, settings)
    if where == "inside":
        model.get_base_model().accepts_loss_kwargs = False
    if where == "wrapper":
        model.accepts_loss_kwargs = False
    found = step(model, rows_of("BertForSequenceClassification"))
    assert found.factor == pytest.approx(factor, rel=1e-3)


def test_a_class_that_is_not_measured_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'BertForSequenceClassification'"):
        trainer_factors("BertForSequenceClasification")
