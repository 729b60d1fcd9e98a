"""`tight-fit MODEL --float8`: the words and the facts of an answer, and the GPUs that have none."""

from tight_fit.plans.model import plan_model

STEP = "--batch 4 --length 32 --quick"


def test_the_answer_says_how_products_are_scaled_and_what_is_not_planned(ask):
    code, text = ask(f"{STEP} --gpu L4 --float8 rowwise")
    assert code == 0 and "products of linear layers in FP8 scaled rowwise" in text.splitlines()[0]
    assert "torch.compile, without which torchao's float8 is slower than this" in text
    together = ask(f"{STEP} --gpu L4 --float8 rowwise --compile")[1]
    assert "without which" not in together and "joins the casts to FP8" in together
    assert "FP8" not in ask(f"{STEP} --gpu L4")[1]


def test_json_holds_its_plan_and_the_gpus_with_fp8(facts, folder):
    found = facts(f"{STEP} --gpu H100 --float8 tensorwise")
    planned = plan_model(folder, gpu="H100", batch_size=4, length=32, float8="tensorwise")
    assert (found["peak"], found["float8"]) == (planned.peak, "tensorwise")
    assert found["seconds"] == planned.seconds("H100").total
    cards = facts(f"{STEP} --float8 tensorwise")["cards"]
    assert cards["L4"] and not cards["A100-80GB"] and not cards["T4"]
    timed = facts(f"{STEP} --gpu 24GB --float8 tensorwise")["seconds_by_gpu"]
    assert "RTX 4090" in timed and "RTX 3090" not in timed


def test_a_layout_is_planned_compiled_and_on_gpus_that_have_fp8(ask, refuses):
    step = "--batch 4 --length 32 --float8 tensorwise --gpu"
    code, text = ask(f"{step} H100 --layout fsdp=2 --compile")
    assert code == 0
    assert "each layer compiled, products of linear layers in FP8 scaled tensorwise" in text
    refuses(f"{step} A100-80GB --layout fsdp=2 --compile", "has no products in FP8")
    refuses(f"{step} H100 --layout fsdp=2", "add compile")
    refuses(f"{step} T4", "The T4 has no products in FP8")
