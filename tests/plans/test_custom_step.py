"""Steps of one's own as they are written for a GPU: planned as on a GPU, against other spellings
of the same step and against real tensors.
"""

import ast
import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from helpers.recipe import Recipe
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.trace import cuda_kernels
from tight_fit.trace.cuda_kernels import AS_GIVEN, AUTOCAST, REFUSED, CudaKernels, _written_out
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.storage_trace import ACTIVATIONS, BORN, PARAMETERS
from tight_fit.trace.tracker import Tracker, steady_memory

WIDTH = 256
HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def mlp(*more) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), *more)


SIZE = 4 * sum(parameter.numel() for parameter in mlp().parameters())


def own_step(make, loss_of, optimizer=None):
    """A set-up: `make` gives what there is, the model first, and `loss_of` takes it."""

    def setup():
        given = make()
        updates = optimizer(given[0].parameters()) if optimizer else None

        def step():
            if updates:
                updates.zero_grad()
            loss_of(*given).backward()
            if updates:
                updates.step()

        return [*given], step

    return setup


def a_step(change=lambda model: model, batch_of=torch.zeros, dtype=FULL, **options):
    """A set-up of AdamW on a small network; `change` is done to the model."""
    return own_step(
        lambda: (change(mlp()), batch_of(32, WIDTH, dtype=dtype)),
        lambda model, batch: model(batch).square().mean(),
        partial(torch.optim.AdamW, **options),
    )


def moves(plan) -> list[tuple[int, int]]:
    """(kind, bytes) of every event in order."""
    return in_order(plan.storage_trace)


def in_order(trace):
    return [(kind, trace.bytes[storage]) for kind, storage, _, _ in trace.events]


def born(plan) -> list[int]:
    """Bytes of everything that was made."""
    return [size for kind, size in moves(plan) if kind == BORN]


def real_moves(setup) -> list[tuple[int, int]]:
    """(kind, bytes) of every event of a step on real tensors, on a CPU."""
    (model, *given), step = setup()
    tracker = Tracker()
    with steady_memory(), tracker:
        for child in [*model, model]:
            tracker.adopt([*child._parameters.values()], PARAMETERS)
        tracker.adopt(given, ACTIVATIONS)
        step()
    return in_order(tracker.storage_trace)


# -- dtypes, gradient scaler ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, dtype",
    [
        (lambda model: model.to(BRAIN), BRAIN),
        (lambda model: model.double(), DOUBLE),
        (lambda model: model.half().float(), FULL),
    ],
    ids=["to", "double", "back"],
)
def test_a_changed_dtype_is_planned_as_on_real_tensors(change, dtype):
    setup = a_step(change, dtype=dtype, foreach=False)
    assert moves(plan_custom_step(setup, steps=1)) == real_moves(setup)


def test_weights_stay_tied_and_known_to_their_optimizer():
    def setup():
        model = mlp()
        model.tied = nn.Linear(WIDTH, 4 * WIDTH)
        weight = model.tied.weight = model[0].weight
        (known, *_), *_ = (g["params"] for g in torch.optim.SGD(model.parameters()).param_groups)
        model.bfloat16()
        assert model.tied.weight is model[0].weight is weight is known
        assert weight.dtype == BRAIN and type(weight) is not torch.Tensor
        return [model], lambda: None

    plan_custom_step(setup)
    assert nn.Linear(2, 2).to(HALF).weight.dtype == HALF  # nothing stays patched


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "scaler_of, place",
    [
        (lambda: torch.amp.GradScaler("cpu"), "cpu"),
        (lambda: torch.amp.GradScaler(), "cuda"),
        (lambda: torch.cuda.amp.GradScaler(), "cpu"),
    ],
)
def test_a_scaler_takes_the_step(scaler_of, place):
    def setup():
        model = mlp().to(place)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        scaler = scaler_of()
        batch = torch.zeros(32, WIDTH, device=place)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert len(optimizer.state) == 4 and scaler.get_scale() == 1 and scaler.is_enabled()

        return [model, batch], step

    made = born(plan_custom_step(setup))
    # Two weights, two states each, two gradients each
    assert made.count(4 * 4 * WIDTH * WIDTH) >= 2 * (1 + 2 + 2)


# -- autocast --------------------------------------------------------------------------------------


def cast_step(context, dtype=HALF):
    def loss_of(model, batch):
        with context():
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
            out = model(batch)
            loss = out.softmax(-1).square().mean()
        assert out.dtype == dtype
        return loss

    return own_step(lambda: (mlp(), torch.zeros(32, WIDTH)), loss_of)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "context, dtype",
    [
        (lambda: torch.autocast("cuda"), HALF),
        (lambda: torch.autocast("cuda", BRAIN), BRAIN),
        (lambda: torch.amp.autocast(device_type="cuda", dtype=HALF), HALF),
        (lambda: torch.cuda.amp.autocast(), HALF),
    ],
)
def test_autocast_for_cuda_is_the_cpus_with_the_gpus_rules(context, dtype):
    found = plan_custom_step(cast_step(context, dtype))
    of_cpu = plan_custom_step(cast_step(lambda: torch.autocast("cpu", HALF)), mixed=True)
    assert moves(found) == moves(of_cpu)


@pytest.mark.parametrize("make", [nn.Identity, nn.Tanh])
def test_gradients_of_cast_weights_are_on_the_gpu_where_the_step_names_it(make):
    """Autograd casts them, and names the device that it sees: the CPU. One weight and its gradient
    in fp32 and a cast copy are the least that is alive at once."""

    def loss_of(model, batch):
        with torch.autocast("cuda", dtype=BRAIN):
            out = model(batch)[:, 0]  # whose gradient autograd makes of zeros
        return out.float().square().mean()

    def planned(place):
        def made():
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), make()).to(place)
            return model, torch.zeros(8, WIDTH, device=place)

        return plan_custom_step(own_step(made, loss_of, torch.optim.SGD)).peak

    assert planned("cuda") == planned("cpu") >= (4 + 4 + 2) * WIDTH**2


def test_the_list_of_autocast_is_torchs_own():
    """Names in the header that PyTorch ships, as far as Python can call them, and what PyTorch's
    own test says that a CPU casts and CUDA does not."""
    folder = Path(importlib.util.find_spec("torch").origin).parent
    text = (folder / "include/ATen/autocast_mode.h").read_text(encoding="utf8")
    part = text.split("#define AT_FORALL_FP32(_)")[1].split("#define AT_FORALL_DIFFERENT")[0]
    lines = [line.split("(")[1] for line in part.splitlines() if "_(" in line]
    of_cuda = {line.split(")")[0].split(",")[0] for line in lines} - {"native_layer_norm"}
    assert len(of_cuda) > 60
    for name in of_cuda:
        for owner in (torch, torch.Tensor, F):
            assert getattr(owner, name, None) in {*AUTOCAST - AS_GIVEN, None}, name
    tree = ast.parse((folder / "testing/_internal/autocast_test_lists.py").read_text())
    (lists,) = (node for node in tree.body if getattr(node, "name", "") == "AutocastCPUTestLists")
    of_cpu = {
        item.elts[0].value
        for node in ast.walk(lists)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "").endswith("_fp32")
        for item in node.value.elts
    } - of_cuda
    assert of_cpu
    for name in of_cpu - {"reflection_pad1d", "huber_loss"} | {"pad"}:  # the last is in both
        assert getattr(F, name) in AS_GIVEN | REFUSED, name


@pytest.mark.parametrize(
    "operation, dtype",
    [(lambda x: x.sum(), FULL), (lambda x: torch.sum(x, 0), FULL),
     (lambda x: torch.linalg.norm(x), FULL), (lambda x: F.normalize(x), FULL),
     (lambda x: F.mse_loss(x, x), FULL), (lambda x: F.interpolate(x[None], scale_factor=2), FULL),
     (lambda x: F.interpolate(x[None], scale_factor=0.5, mode="area"), HALF),
     (lambda x: 1 / x, FULL), (lambda x: 2**x, FULL), (lambda x: x.square(), FULL),
     (lambda x: x.sum(0, dtype=DOUBLE), DOUBLE), (lambda x: torch.softmax(x, 0, DOUBLE), DOUBLE),
     (lambda x: F.pad(x[None], (1, 1), "reflect"), HALF),
     (lambda x: nn.PReLU()(x.float()), HALF), (lambda x: x.mean(), HALF)],
)  # fmt: skip
def test_operations_have_the_gpus_dtype(operation, dtype):
    kernels = CudaKernels(Recipe(precision="fp16"))
    with FakeTensorMode(), kernels, torch.autocast("cpu", HALF):
        assert operation(torch.zeros(4, 4, dtype=HALF)).dtype == dtype


def test_a_sum_makes_no_copy_of_its_input():
    """On a GPU the kernel casts while it adds (AT_FORALL_FP32_SET_OPT_DTYPE)."""
    with FakeTensorMode(), CudaKernels(Recipe(precision="bf16")), torch.autocast("cpu"):
        values = torch.zeros(64, 64, dtype=BRAIN)
        with Tracker() as tracker:
            values.sum()
    assert tracker.storage_trace.bytes == [4]


def test_what_cuda_refuses_is_refused():
    values, kernels = torch.ones(2), CudaKernels(Recipe(precision="bf16"))
    with kernels, torch.autocast("cpu"), pytest.raises(RuntimeError, match="with_logits"):
        F.binary_cross_entropy(values, values)


# -- attention, dropout ----------------------------------------------------------------------------


def attention_step(dropout: float, need_weights: bool = False):
    return own_step(
        lambda: (
            nn.MultiheadAttention(WIDTH, 4, dropout, batch_first=True), torch.zeros(8, 512, WIDTH),
        ),
        lambda module, batch: module(batch, batch, batch, need_weights=need_weights)[0].sum(),
    )  # fmt: skip


def test_multi_head_attention_draws_dropout_in_the_fused_kernel():
    """With dropout it keeps what it keeps without; no mask, and no matrix of weights, unless these
    are returned."""
    plain, dropped = (plan_custom_step(attention_step(rate)).peak for rate in (0.0, 0.1))
    assert dropped == plain < 60 * 2**20  # one matrix of weights takes 32 MiB
    trace = plan_custom_step(attention_step(0.1, need_weights=True)).storage_trace
    made = {size for size, name in zip(trace.bytes, trace.made_by) if name == "native_dropout"}
    assert made == {8 * 4 * 512 * 512, 4 * 8 * 4 * 512 * 512}


def test_layers_with_dropout_keep_only_masks_of_one_byte():
    layers = partial(nn.Transformer, WIDTH, 4, 1, 1, 512, 0.1, batch_first=True)
    setup = own_step(
        lambda: (layers(), torch.zeros(4, 320, WIDTH)), lambda model, x: model(x, x).sum()
    )
    made = born(plan_custom_step(setup))
    assert 4 * 320 * WIDTH in made  # a mask of the hidden states
    assert not {4 * 4 * 320 * 320 * size for size in (1, 4)} & set(made)  # none of the attention


def test_checkpointing_on_a_gpu_recomputes_what_it_saved():
    """PyTorch compares devices of tensors that were saved with those of tensors recomputed; masks
    of dropout take one byte there as well."""

    def products(forward):
        def made():
            return mlp(nn.Dropout(0.1)).cuda(), torch.zeros(32, WIDTH, device="cuda")

        setup = own_step(made, lambda model, batch: forward(model, batch).sum())
        planned = plan_custom_step(setup, steps=2)
        masks = [size for size in born(planned) if size == 32 * WIDTH]
        return planned.storage_trace.made_by.count("addmm"), len(masks)

    assert products(lambda model, batch: model(batch)) == (4, 2)
    again = products(lambda model, batch: checkpoint(model, batch, use_reentrant=False))
    assert again == (8, 4)


@pytest.mark.parametrize(
    "dtype, autocast, flash, key_heads, fused",
    [(HALF, None, True, 8, True), (FULL, None, True, 8, True), (DOUBLE, None, True, 8, False),
     (HALF, None, False, 8, True), (BRAIN, None, False, 8, False), (FULL, HALF, False, 8, True),
     (FULL, BRAIN, False, 8, False), (FULL, BRAIN, True, 8, True), (HALF, None, True, 2, True),
     (HALF, None, False, 2, False), (FULL, None, True, 2, False), (FULL, BRAIN, True, 2, True)],
)  # fmt: skip
def test_attention_is_fused_where_the_gpu_has_a_kernel(
    dtype, autocast, flash, key_heads, fused, monkeypatch
):
    """By whether a matrix of scores is made, in a step that knows the GPU and not the dtype."""
    monkeypatch.setattr(cuda_kernels, "GROUPED", False)  # as before PyTorch 2.14
    options = {"is_causal": True, "enable_gqa": key_heads != 8}

    def made():
        return [
            torch.zeros(2, heads, 512, 16, dtype=dtype, requires_grad=True)
            for heads in (8, key_heads)
        ]

    def loss_of(query, key):
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            return F.scaled_dot_product_attention(query, key, key, **options).sum()

    plan = plan_custom_step(own_step(made, loss_of), flash=flash, steps=1)
    scores = 2 * 8 * 512 * 512 * torch.promote_types(dtype, FULL).itemsize
    assert (scores not in plan.storage_trace.bytes) == fused


@pytest.mark.parametrize("flash", [True, False])
def test_attention_with_a_transposed_mask_is_written_out(flash):
    """Every fused kernel reads the mask along its last dimension (sdp_utils.cpp); T5's position
    bias lies along the heads. Measured on an H200 with transformers 5.17: T5-base holds 5.6 GiB
    more than with a fused kernel (results/models/nvidia-h200.json)."""

    def made(lies_along_heads):
        def setup():
            query = torch.zeros(2, 8, 512, 16, dtype=HALF, requires_grad=True)
            bias = torch.zeros(512, 512, 8, dtype=HALF).permute(2, 0, 1)
            mask = (bias if lies_along_heads else bias.contiguous()).unsqueeze(0)
            attention = F.scaled_dot_product_attention
            return [query, mask], lambda: attention(query, query, query, mask).sum().backward()

        return plan_custom_step(setup, flash=flash, steps=1).storage_trace.bytes

    scores = 2 * 8 * 512 * 512 * 4
    assert scores in made(True) and scores not in made(False)


def test_pytorch_says_which_release_has_grouped_queries_in_which_kernel():
    says = "Memory-efficient attention also supports" in F.scaled_dot_product_attention.__doc__
    assert says == cuda_kernels.GROUPED


@pytest.mark.parametrize("dtype", [FULL, BRAIN, DOUBLE])
@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"attn_mask": torch.ones(33, 33, dtype=torch.bool).tril()},
     {"attn_mask": torch.zeros(2, 1, 33, 33)}, {"scale": 0.3}, {"enable_gqa": True}],
    ids=str,
)  # fmt: skip
def test_attention_written_out_is_torchs(dtype, options):
    """Its answer, the gradient of its keys and what it keeps for the backward pass."""
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options = options | {"attn_mask": mask.to(dtype)}
    heads = 2 if "enable_gqa" in options else 8
    results = []
    for attention in (F.scaled_dot_product_attention, _written_out):
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(2, of, 33, 16, dtype=dtype, requires_grad=True) for of in (8, heads, heads)
        )
        saved = []

        def kept(tensor, saved=saved):
            saved.append(tensor.untyped_storage().nbytes())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor)
        with sdpa_kernel(SDPBackend.MATH), hooks:
            out = attention(query, key, value, **options)
        out.sum().backward()
        results.append((out.detach(), key.grad, sorted(saved)))
    for expected, found in zip(*results):
        assert torch.equal(*map(torch.as_tensor, (expected, found)))
    assert results[1][0].dtype == dtype


# -- devices ---------------------------------------------------------------------------------------


def on(device):
    return lambda *size, dtype: torch.zeros(*size, dtype=dtype, device=device)


def made_there(model):
    with torch.device("cuda"):
        return mlp()


@pytest.mark.parametrize(
    "change, batch_of",
    [
        (lambda m: m.cuda(), on(torch.device("cuda"))),
        (lambda m: m.to(0), lambda *size, dtype: torch.zeros(*size).cuda(0)),
        (
            lambda m: m.to(device="cuda:0", non_blocking=True),
            lambda *size, dtype: torch.zeros(*size).pin_memory().cuda(non_blocking=True),
        ),
        (made_there, on("cuda")),
    ],
    ids=["cuda", "number", "pinned", "made there"],
)
def test_a_step_that_names_the_gpu_is_the_step_that_does_not(change, batch_of):
    plans = [plan_custom_step(step) for step in (a_step(change, batch_of), a_step())]
    # Adam's counters of steps are on the host, as foreach=True keeps them there.
    found, plain = ([move for move in moves(plan) if move[1] >= 1024] for plan in plans)
    assert found == plain and 0 < plans[1].peak - plans[0].peak < 256


@pytest.mark.parametrize("pinned", [False, True])
def test_what_stays_on_the_host_does_not_count(pinned):
    def setup():
        model = mlp().cuda()
        host = torch.zeros(32, WIDTH)
        host = host.pin_memory() if pinned else host

        def step():
            host.add_(1)
            batch = host.to("cuda", non_blocking=True)
            assert batch.device.type == "cuda" and batch.is_cuda and not host.is_cuda
            mask = torch.ones(32, 1, device=batch.device)
            loss = (model(batch) * mask).square().mean()
            loss.backward()
            assert model[0].weight.grad.is_cuda
            loss.detach().cpu().add(1)
            big_on_host = torch.zeros(1000, 1000)
            big_on_host += 1

        return [model, host], step

    planned = plan_custom_step(setup, steps=1)
    made, before = born(planned), moves(planned)[: planned.storage_trace.begin]
    assert 4_000_000 not in made and sum(size for _, size in before) == SIZE
    assert made.count(4 * 32) == 1  # the mask
    assert made.count(4 * 32 * WIDTH) >= 1  # the batch, moved


def test_what_is_on_the_gpu_counts_although_it_is_not_listed():
    def setup():
        model, forgotten = mlp().cuda(), torch.zeros(500, 500, device="cuda")
        return [model], lambda: (model, forgotten)

    assert plan_custom_step(setup).peak == 4 * 500 * 500 + SIZE


def nearer(places: torch.Tensor, middle: int):
    return torch.where((places < middle) & (places > -middle), places, torch.abs(places) / middle)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_function_in_torchscript_is_planned_alike_each_time():
    """TorchScript rewrites one after its first calls; DeBERTa of transformers 5.17 has several."""
    scripted, runs = torch.jit.script(nearer), []
    for _ in range(4):
        with FakeTensorMode(), FakeValues(), Tracker() as tracker:
            scripted(torch.ones(4, 8), 3)
        runs.append(tracker.storage_trace.made_by)
    assert "where" in runs[0] and all(names == runs[0] for names in runs)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="new in PyTorch 2.13")
def test_a_loss_whose_chunks_no_plan_sees_is_refused():
    """Its products and its logits would be missing, and with them most of the step's time."""

    def setup(options):
        head, states = nn.Linear(8, 64, bias=False), torch.zeros(16, 8)

        def step():
            wanted = torch.zeros(16, dtype=torch.int64)
            F.linear_cross_entropy(states, head.weight, wanted, options=options).backward()

        return [head, states], step

    assert plan_custom_step(lambda: setup(None)).peak > 16 * 64 * 4
    with pytest.raises(NotImplementedError, match="chunks that a plan does not see: leave out"):
        plan_custom_step(lambda: setup(nn.LinearCrossEntropyOptions()))


# -- optimizers, steps -----------------------------------------------------------------------------


def test_optimizers_are_a_gpus_by_default_and_a_fused_one_needs_no_temporaries():
    default, each, loop, fused = (
        plan_custom_step(a_step(**options))
        for options in ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
    )
    assert moves(default) == moves(each) != moves(loop)
    assert 4 * SIZE < fused.peak < each.peak, "weights, gradients and two states"


def test_steps_go_on_until_nothing_new_is_reserved():
    sizes_of_steps = iter([1, 2, 3, 4, 4, 4, 4, 4])

    def setup():
        model = nn.Linear(4, 4)
        taken = []

        def step():
            taken.append(next(sizes_of_steps))
            torch.zeros(taken[-1] * 10_000_000).add(1)

        return [model], step

    planned = plan_custom_step(setup, steps=None)
    assert next(sizes_of_steps) == 4  # five steps were taken
    assert planned.peak >= 2 * 4 * 40_000_000
    assert abs(planned.fits("T4").terms["allocator"]) < 0.1 * planned.peak


def test_nothing_stays_changed():
    before = torch.autocast.__init__, torch.is_autocast_enabled, nn.Module._apply
    plan_custom_step(a_step())
    assert before == (torch.autocast.__init__, torch.is_autocast_enabled, nn.Module._apply)
    assert not torch.zeros(1).is_cuda and cuda_kernels.F is F
