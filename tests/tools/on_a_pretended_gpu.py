"""Checks that run on a pretended GPU, in one process for each card; test_pretended.py starts them.

python on_a_pretended_gpu.py    prints {name of a check: "" or what was wrong} as JSON
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from tight_fit.command import calibrate
from tight_fit.gpus import REHEARSAL, calibration
from tight_fit.gpus.specs import find_gpu
from tight_fit.memory.allocator import CachingAllocator
from tools.pretend.cards import CONTEXT

T4 = torch.cuda.get_device_capability() == (7, 5)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def refused(words, work, error=RuntimeError):
    try:
        work()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(f"nothing was raised that says {words!r}")


@check
def memory_is_the_allocators():
    torch.cuda.empty_cache()
    before, ours = torch.cuda.memory_allocated(), CachingAllocator()
    assert before == torch.cuda.memory_reserved() == 0
    kept = []
    for size in (100, 3 << 20, 700_000, 12 << 20, 5, 3 << 20):
        kept.append((torch.empty(size, dtype=torch.uint8, device="cuda"), ours.malloc(size)))
        if size == 700_000:
            tensor, address = kept.pop(1)
            del tensor
            ours.free(address)
    assert torch.cuda.memory_allocated() == ours.allocated
    assert torch.cuda.max_memory_allocated() == ours.most_allocated
    assert torch.cuda.max_memory_reserved() == ours.most_reserved
    del kept[:]
    assert torch.cuda.memory_allocated() == 0 < torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == 0


@check
def a_storage_is_resized_as_fsdp_does():
    torch.cuda.empty_cache()
    tensor = torch.arange(300.0, device="cuda")
    storage, before = tensor.untyped_storage(), torch.cuda.memory_allocated()
    for count, allocated in ((600, 2560), (100, 512), (0, 0), (300, 1536)):
        assert storage.resize_(4 * count) is storage and storage.nbytes() == 4 * count
        assert torch.cuda.memory_allocated() == before - 1536 + allocated
        if count == 100:
            assert tensor[:100].tolist() == list(range(100))
    host = torch.ones(4).untyped_storage()
    assert host.resize_(8).nbytes() == 8


@check
def memory_ends():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    assert free == total - CONTEXT
    before = torch.cuda.memory_stats()["num_ooms"]
    half = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    words = "CUDA out of memory. Tried to allocate"
    refused(words, partial(torch.empty, free * 2 // 3, device="cuda"), torch.OutOfMemoryError)
    assert torch.cuda.memory_stats()["num_ooms"] == before + 1
    del half
    torch.empty(free * 2 // 3, dtype=torch.uint8, device="cuda")  # the cache is given back for it
    torch.cuda.empty_cache()


@check
def a_matrix_product_takes_a_workspace_on_each_thread():
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    loss = (x @ x).sum()
    forward = torch.cuda.memory_allocated()
    loss.backward()
    assert forward - before > 8 << 20
    assert torch.cuda.memory_allocated() - forward > 8 << 20
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 8 << 20


@check
def devices_do_not_mix():
    on_gpu = torch.ones(3, device="cuda")
    assert (on_gpu + torch.tensor(2.0)).device.type == "cuda"  # a number may be on the host
    refused("Expected all tensors to be on the same device", lambda: on_gpu + torch.ones(3))
    refused("same device", lambda: F.linear(on_gpu, torch.ones(2, 3)))
    refused("convert cuda", on_gpu.numpy, TypeError)
    refused("invalid device ordinal", lambda: torch.empty(1, device="cuda:1"))
    host, gpu = torch.Generator(), torch.Generator("cuda")
    refused("'cuda' device type", partial(torch.randperm, 9, device="cuda", generator=host))
    refused("'cpu' device type", partial(torch.randn, 3, generator=gpu))
    assert sorted(torch.randperm(9, device="cuda", generator=gpu).tolist()) == list(range(9))


@check
def a_t4_has_no_bf16_and_an_a100_has():
    assert torch.cuda.is_bf16_supported()  # the answer that counts emulation
    assert torch.cuda.is_bf16_supported(including_emulation=False) is not T4
    assert torch.cuda.get_device_name() == ("Tesla T4" if T4 else "NVIDIA A100-SXM4-40GB")


@check
def what_cuda_kernels_refuse_is_refused():
    on_gpu, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    index = torch.tensor([0, 2])
    on_gpu[index] = torch.tensor(5.0)  # a number, and indices, may be on the host
    assert on_gpu[index].tolist() == [5.0, 5.0]
    refused("same device", partial(on_gpu.index_put_, (index,), on_host[:2]))
    refused("same device", partial(on_host.index_put_, (index,), on_gpu[:2]))
    refused("same device", partial(torch.equal, on_gpu[0], on_host[0]))
    whole = torch.ones(2, 2, dtype=torch.long, device="cuda")
    refused("not implemented for 'Long'", lambda: whole @ whole)
    half = torch.ones(2, 4, dtype=torch.half, device="cuda")
    weight = torch.ones(4, device="cuda")
    refused("expected scalar type Half", partial(F.layer_norm, half, (4,), weight, weight))
    torch.use_deterministic_algorithms(True)
    try:
        refused("CUBLAS_WORKSPACE_CONFIG", lambda: half @ half.T)
    finally:
        torch.use_deterministic_algorithms(False)


@check
def only_the_hosts_memory_is_pinned():
    plain = torch.ones(3)
    pinned = plain.pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not plain.is_pinned()
    refused("cannot pin", torch.ones(3, device="cuda").pin_memory)


@check
def a_forked_process_cannot_use_the_gpu():
    torch.ones(1, device="cuda")
    for work in (partial(torch.ones, 1, device="cuda"), torch.cuda.current_device):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                work()
                said = "nothing"
            except RuntimeError as error:
                said = str(error)
            os.write(writer, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reader, 1000).decode()
        assert said.startswith("Cannot re-initialize CUDA in forked subprocess"), said
        os.close(reader)
        os.close(writer)


@check
def attention_is_chosen_as_on_cuda():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        on_cpu = torch.randn(2, 4, 50, 16).to(dtype).requires_grad_()
        on_gpu = on_cpu.detach().cuda().requires_grad_()
        made = F.scaled_dot_product_attention(on_gpu, on_gpu, on_gpu)
        kind = type(made.grad_fn).__name__
        if dtype == torch.float32 or (T4 and dtype == torch.float16):
            assert "EfficientAttention" in kind, kind
        else:
            assert ("FlashAttention" in kind) is not T4, (dtype, kind)
        told = F.scaled_dot_product_attention(on_cpu, on_cpu, on_cpu)
        made.sum().backward()
        told.sum().backward()
        near = 1e-5 if dtype == torch.float32 else 0.05
        assert torch.allclose(made.cpu(), told, atol=near)
        assert torch.allclose(on_gpu.grad.cpu(), on_cpu.grad, atol=near)


@check
def autocast_is_cudas():
    x = torch.randn(4, 8, device="cuda")
    with torch.autocast("cuda", torch.float16):
        product = x @ x.T
        assert product.dtype == torch.float16
        assert product.softmax(-1).dtype == torch.float32  # half in, float out, as CUDA's kernel
        target = torch.zeros(4, dtype=torch.long, device="cuda")
        assert F.cross_entropy(product, target).dtype == torch.float32
        assert F.layer_norm(product, (4,)).dtype == torch.float32


@check
def events_and_streams():
    first, last, plain = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
    refused("must be recorded", lambda: first.elapsed_time(last), ValueError)
    with torch.cuda.stream(torch.cuda.Stream()):
        first.record()
        torch.ones(1000, device="cuda").sum()
        last.record()
    torch.cuda.current_stream().wait_event(last)
    refused("not ready", lambda: first.elapsed_time(last))
    for wait in (
        torch.cuda.synchronize,
        torch.cuda.current_stream().synchronize,
        last.synchronize,
        torch.ones(3, device="cuda").cpu,
        torch.ones(3, device="cuda").sum().item,
    ):
        last.record()
        torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        refused("not ready", lambda: first.elapsed_time(last))
        wait()
        assert 0 < first.elapsed_time(last) < 10_000
    plain.record()
    last.synchronize()
    refused("enable_timing=True", lambda: plain.elapsed_time(last), ValueError)


@check
def a_step_is_what_its_plan_says():
    """The narrow DeBERTa: every tensor of a step on the pretended GPU, by category."""
    from helpers import measure, profile, train
    from helpers.recipe import replace
    from tools.pretend.narrow import inside

    recipe = profile.recipe("deberta", batch_size=4)
    data = train.encoded(recipe)["train"]
    for change in ({"precision": "fp16"}, {"lora_rank": 2, "optimizer": "adamw8bit"}):
        changed = replace(recipe, **change)
        seen = measure.measure(changed, data, "cuda").tracked
        from helpers.plan import plan

        planned = inside(plan)(changed)
        assert seen.peak == planned.peak and seen.at_peak == planned.at_peak, change


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_attention_heads=4, **sizes))


TEXTS = [{name: torch.arange(256) for name in ("input_ids", "labels")} for _ in range(24)]


def planned_as_reserved(callback, fit):
    """What PyTorch reserves in the training that `fit` runs is planned, to a segment."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fit()
    facts = callback.facts
    off = facts["reserved"] - facts["measured"]
    assert facts["fits"] and 0 <= off <= 2 << 20, facts  # a segment of small tensors
    assert facts["measured"] == torch.cuda.max_memory_reserved()


@check
def a_callback_plans_what_trainer_reserves():
    from transformers import Trainer, TrainingArguments

    from tight_fit import PlanCallback

    callback = PlanCallback(say=lambda line: None)
    with tempfile.TemporaryDirectory() as folder:
        options = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=4, **options)
        trainer = Trainer(llama(), arguments, train_dataset=TEXTS, callbacks=[callback])
        planned_as_reserved(callback, trainer.train)


@check
def a_gpu_is_calibrated():
    """From the first measurement to a plan that takes the file; times are those of the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "mine.json")
        assert not calibrate.main(["--out", path, "--seconds", "20"])
        with calibration.chosen(path):
            mine = find_gpu(torch.cuda.get_device_name())
        with open(path) as file:
            kernels = json.load(file)["measured"]["kernels"]
        assert mine.rates and mine.name == ("T4" if T4 else "A100-40GB")
        assert bool(mine.rates.bf16) is not T4
        kinds = {op[1] for one in kernels for op in one["ops"]}
        assert {"elementwise", "softmax", "norm", "matmul", "multi_tensor"} <= kinds
        pretended = os.environ.pop(REHEARSAL)
        try:
            refused("pretended", lambda: calibration.read(Path(path)), ValueError)
        finally:
            os.environ[REHEARSAL] = pretended


def main() -> None:
    answers = {}
    for name, function in CHECKS.items():
        try:
            function()
            answers[name] = ""
        except Exception:
            answers[name] = traceback.format_exc()
    print(json.dumps(answers))


if __name__ == "__main__":
    sys.exit(main())
