"""Steps of one's own as they are written for a GPU: planned as on a GPU, against other spellings
of the same step and against real tensors.
"""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from helpers.recipe import Recipe
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.torch_private import FakeTensorMode, PlainDispatchMode
from tight_fit.trace import cuda_kernels
from tight_fit.trace.cuda_kernels import AS_GIVEN, AUTOCAST, REFUSED, CudaKernels, _written_out
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.storage_trace import ACTIVATIONS, BORN, PARAMETERS
from tight_fit.trace.tracker import Tracker, steady_memory

WIDTH = 256


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def a_step(change=lambda model: model, batch_of=torch.zeros, dtype=torch.float32, **options):
    """A set-up of AdamW on a small network; `change` is done to the model."""

    def setup():
        model = change(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        batch = batch_of(32, WIDTH, dtype=dtype)

        def step():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return [model, batch], step

    return setup


def moves(plan) -> list[tuple[int, int]]:
    """(kind, bytes) of every event in order."""
    return [(kind, plan.storage_trace.bytes[storage]) for kind, storage, _, _ in _events(plan)]


def _events(plan):
    return plan.storage_trace.events


def real_moves(setup, steps=2) -> list[tuple[int, int]]:
    """(kind, bytes) of every event of the step on real tensors, on a CPU."""
    (model, *given), step = setup()
    tracker = Tracker()
    with steady_memory(), tracker:
        for child in [*model, model]:
            tracker.adopt([*child._parameters.values()], PARAMETERS)
        tracker.adopt(given, ACTIVATIONS)
        for _ in range(steps):
            step()
    trace = tracker.storage_trace
    return [(kind, trace.bytes[storage]) for kind, storage, _, _ in trace.events]


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, dtype",
    [
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.bfloat16().float(), torch.float32),
    ],
    ids=["to", "bfloat16", "half", "double", "back"],
)
def test_a_changed_dtype_is_planned_as_on_real_tensors(change, dtype):
    setup = a_step(change, dtype=dtype, foreach=False)
    planned = plan_custom_step(setup, steps=1)
    assert moves(planned) == real_moves(setup, steps=1)


def test_weights_stay_tied_and_known_to_their_optimizer():
    def setup():
        model = mlp()
        model.tied = nn.Linear(WIDTH, 4 * WIDTH)
        model.tied.weight = model[0].weight
        weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.bfloat16()
        assert (
            model.tied.weight is model[0].weight is weight is optimizer.param_groups[0]["params"][0]
        )
        assert weight.dtype == torch.bfloat16 and type(weight) is not torch.Tensor
        return [model], lambda: None

    plan_custom_step(setup)
    assert nn.Linear(2, 2).to(torch.float16).weight.dtype == torch.float16  # nothing stays patched


# -- gradient scaler -------------------------------------------------------------------------------

SCALERS = {
    "amp.cpu": lambda: torch.amp.GradScaler("cpu"),
    "amp.cuda": lambda: torch.amp.GradScaler("cuda"),
    "amp": lambda: torch.amp.GradScaler(),
    "torch": lambda: torch.GradScaler(),
    "cuda.amp": lambda: torch.cuda.amp.GradScaler(),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [*SCALERS, "moved"])
def test_a_scaler_takes_the_step(name):
    def setup():
        model = mlp().cuda() if name == "moved" else mlp()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        scaler = SCALERS.get(name, SCALERS["amp.cuda"])()
        assert scaler.is_enabled()
        batch = torch.zeros(32, WIDTH, device="cuda" if name == "moved" else None)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert len(optimizer.state) == 4 and scaler.get_scale() == 1

        return [model, batch], step

    scaled = plan_custom_step(setup)
    made = [scaled.storage_trace.bytes[event[1]] for event in _events(scaled) if event[0] == BORN]
    weight = 4 * 4 * WIDTH * WIDTH
    assert made.count(weight) >= 2 * (1 + 2 + 2)  # two weights, two states each, two gradients each


# -- autocast --------------------------------------------------------------------------------------

AUTOCASTS = {
    "cuda": lambda: torch.autocast("cuda"),
    "cuda fp16": lambda: torch.autocast("cuda", torch.float16),
    "bf16": lambda: torch.autocast("cuda", torch.bfloat16),
    "keyword": lambda: torch.autocast(device_type="cuda", dtype=torch.float16),
    "amp": lambda: torch.amp.autocast("cuda", dtype=torch.float16),
    "cuda.amp": lambda: torch.cuda.amp.autocast(),
    "cpu": lambda: torch.autocast("cpu", torch.float16),
}


def cast_step(context, **expected):
    def setup():
        model = mlp()
        batch = torch.zeros(32, WIDTH)

        def step():
            with context():
                assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
                out = model(batch)
                loss = out.softmax(-1).square().mean()
            for name, value in expected.items():
                assert getattr(out, name) == value
            loss.backward()

        return [model, batch], step

    return setup


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", AUTOCASTS)
def test_autocast_for_cuda_is_the_cpus_with_the_gpus_rules(name):
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    found = plan_custom_step(cast_step(AUTOCASTS[name], dtype=dtype))
    assert moves(found) == moves(plan_custom_step(cast_step(AUTOCASTS["cpu"]), mixed=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [nn.Identity, nn.Tanh], ids=lambda kind: kind.__name__)
def test_gradients_of_cast_weights_are_on_the_gpu_where_the_step_names_it(make, dtype):
    """Autograd casts them, and names the device that it sees: the CPU. One weight and its gradient
    in fp32 and a cast copy are the least that is alive at once."""

    def planned(place):
        def setup():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), make())
            model = place(model)
            optimizer = torch.optim.SGD(model.parameters())
            batch = place(torch.zeros(8, WIDTH))

            def step():
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    out = model(batch)[:, 0]  # whose gradient autograd makes of zeros
                out.float().square().mean().backward()
                optimizer.step()

            return [model, batch], step

        return plan_custom_step(setup).peak

    named = planned(lambda held: held.cuda())
    assert named == planned(lambda held: held) >= (4 + 4 + 2) * WIDTH**2


def torchs_list(kind: str, *names: str) -> set[str]:
    """Names of the operations in lists of PyTorch's own test of autocast."""
    found = importlib.util.find_spec("torch")
    path = Path(found.origin).parent / "testing/_internal/autocast_test_lists.py"
    tree = ast.parse(path.read_text(encoding="utf8"))
    klass = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    return {
        item.elts[0].value
        for node in ast.walk(klass)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") in names
        for item in node.value.elts
    }


FP32 = torchs_list("AutocastTestLists", "torch_fp32", "nn_fp32", "methods_fp32")
CPU_ONLY = torchs_list("AutocastCPUTestLists", "torch_fp32", "nn_fp32") - FP32


def test_the_list_of_autocast_is_torchs_own():
    assert len(FP32) > 45 and CPU_ONLY
    missing = {
        f"{owner.__name__}.{name}"
        for name in FP32
        for owner in (torch, torch.Tensor, F)
        if hasattr(owner, name) and getattr(owner, name) not in AUTOCAST - AS_GIVEN
    }
    assert not missing
    own = {"reflection_pad1d": "pad", "huber_loss": None}  # CUDA's list has huber_loss, too
    for name in {own.get(name, name) for name in CPU_ONLY} - {None}:
        assert getattr(F, name) in AS_GIVEN | REFUSED, name


def test_the_list_of_autocast_is_that_of_its_source():
    """Names in the header that PyTorch ships, as far as Python can call them."""
    include = Path(importlib.util.find_spec("torch").origin).parent / "include/ATen"
    text = (include / "autocast_mode.h").read_text(encoding="utf8")
    part = text.split("#define AT_FORALL_FP32(_)")[1].split("#define AT_FORALL_DIFFERENT")[0]
    names = {
        line.split("(")[1].split(")")[0].split(",")[0] for line in part.splitlines() if "_(" in line
    }
    assert len(names) > 60
    for name in names:
        for owner in (torch, torch.Tensor, F):
            if hasattr(owner, name) and name != "native_layer_norm":
                assert getattr(owner, name) in AUTOCAST, name


@pytest.mark.parametrize(
    "operation, dtype",
    [(lambda x: x.sum(), torch.float32), (lambda x: torch.sum(x, 0), torch.float32),
     (lambda x: x.norm(), torch.float32), (lambda x: torch.linalg.norm(x), torch.float32),
     (lambda x: F.normalize(x), torch.float32), (lambda x: F.mse_loss(x, x), torch.float32),
     (lambda x: F.kl_div(x, x), torch.float32),
     (lambda x: F.interpolate(x[None], scale_factor=2), torch.float32),
     (lambda x: F.interpolate(x[None], scale_factor=0.5, mode="area"), torch.float16),
     (lambda x: 1 / x, torch.float32), (lambda x: 2**x, torch.float32),
     (lambda x: x.square(), torch.float32),
     (lambda x: x.sum(0, dtype=torch.float64), torch.float64),
     (lambda x: torch.softmax(x, 0, torch.float64), torch.float64),
     (lambda x: F.pad(x[None], (1, 1), "reflect"), torch.float16),
     (lambda x: F.avg_pool3d(x[None, None, None], 1), torch.float16),
     (lambda x: nn.PReLU()(x.float()), torch.float16), (lambda x: x.mean(), torch.float16)],
)  # fmt: skip
def test_operations_have_the_gpus_dtype(operation, dtype):
    with (
        FakeTensorMode(),
        CudaKernels(Recipe(precision="fp16")),
        torch.autocast("cpu", torch.float16),
    ):
        assert operation(torch.zeros(4, 4, dtype=torch.float16)).dtype == dtype


def test_a_sum_makes_no_copy_of_its_input():
    """On a GPU the kernel casts while it adds (AT_FORALL_FP32_SET_OPT_DTYPE)."""
    with FakeTensorMode(), CudaKernels(Recipe(precision="bf16")), torch.autocast("cpu"):
        values = torch.zeros(64, 64, dtype=torch.bfloat16)
        with Tracker() as tracker:
            values.sum()
    assert tracker.storage_trace.bytes == [4]


def test_what_cuda_refuses_is_refused():
    values = torch.ones(2)
    kernels = CudaKernels(Recipe(precision="bf16"))
    with kernels, torch.autocast("cpu"), pytest.raises(RuntimeError, match="with_logits"):
        F.binary_cross_entropy(values, values)


# -- attention -------------------------------------------------------------------------------------


def attention_step(dropout: float, need_weights: bool = False):
    def setup():
        module = nn.MultiheadAttention(WIDTH, 4, dropout, batch_first=True)
        batch = torch.zeros(8, 512, WIDTH)

        def step():
            module(batch, batch, batch, need_weights=need_weights)[0].sum().backward()

        return [module, batch], step

    return setup


def test_multi_head_attention_draws_dropout_in_the_fused_kernel():
    """With dropout it keeps what it keeps without; no mask, and no matrix of weights."""
    plain, dropped = (plan_custom_step(attention_step(rate)).peak for rate in (0.0, 0.1))
    assert dropped == plain < 60 * 2**20  # one matrix of weights takes 32 MiB


def test_weights_that_are_returned_have_a_mask_of_one_byte():
    trace = plan_custom_step(attention_step(0.1, need_weights=True)).storage_trace
    made = {size for size, name in zip(trace.bytes, trace.made_by) if name == "native_dropout"}
    assert made == {8 * 4 * 512 * 512, 4 * 8 * 4 * 512 * 512}


@pytest.mark.parametrize(
    "make, inputs",
    [
        (lambda rate: nn.TransformerEncoderLayer(WIDTH, 4, 512, rate, batch_first=True), 1),
        (lambda rate: nn.TransformerDecoderLayer(WIDTH, 4, 512, rate, batch_first=True), 2),
        (lambda rate: nn.Transformer(WIDTH, 4, 1, 1, 512, rate, batch_first=True), 2),
    ],
    ids=["encoder", "decoder", "both"],
)
def test_a_layer_with_dropout_keeps_only_masks_of_one_byte(make, inputs):
    def setup():
        layer = make(0.1)
        batch = torch.zeros(4, 320, WIDTH)

        def step():
            layer(*[batch] * inputs).sum().backward()

        return [layer, batch], step

    planned = plan_custom_step(setup)
    made = [planned.storage_trace.bytes[event[1]] for event in _events(planned) if event[0] == BORN]
    assert 4 * 320 * WIDTH in made  # a mask of the hidden states
    assert not {4 * 4 * 320 * 320 * size for size in (1, 4)} & set(made)  # none of the attention


HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtype, autocast, flash, key_heads, fused",
    [(HALF, None, True, 8, True), (BRAIN, None, True, 8, True), (FULL, None, True, 8, True),
     (DOUBLE, None, True, 8, False), (HALF, None, False, 8, True), (FULL, None, False, 8, True),
     (BRAIN, None, False, 8, False), (DOUBLE, None, False, 8, False),
     (FULL, HALF, False, 8, True), (FULL, BRAIN, False, 8, False), (FULL, BRAIN, True, 8, True),
     (HALF, None, True, 2, True), (HALF, None, False, 2, False), (BRAIN, None, True, 2, True),
     (FULL, None, True, 2, False), (FULL, BRAIN, True, 2, True)],
)  # fmt: skip
def test_attention_is_fused_where_the_gpu_has_a_kernel(
    dtype, autocast, flash, key_heads, fused, monkeypatch
):
    """By whether a matrix of scores is made, in a step that knows the GPU and not the dtype."""
    monkeypatch.setattr(cuda_kernels, "GROUPED", False)  # as before PyTorch 2.14

    def setup():
        query = torch.zeros(2, 8, 512, 16, dtype=dtype, requires_grad=True)
        key = torch.zeros(2, key_heads, 512, 16, dtype=dtype, requires_grad=True)

        def step():
            with torch.autocast("cuda", autocast, enabled=autocast is not None):
                out = F.scaled_dot_product_attention(
                    query, key, key, is_causal=True, enable_gqa=key_heads != 8
                )
            out.sum().backward()

        return [query, key], step

    plan = plan_custom_step(setup, flash=flash, steps=1)
    scores = 2 * 8 * 512 * 512 * torch.promote_types(dtype, FULL).itemsize
    assert (scores not in plan.storage_trace.bytes) == fused


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_attention_with_a_transposed_mask_is_written_out(dtype, flash):
    """Every fused kernel reads the mask along its last dimension (sdp_utils.cpp); T5's position
    bias lies along the heads. Measured on an H200 with transformers 5.17: T5-base holds 5.6 GiB
    more than with a fused kernel (results/models/nvidia-h200.json)."""
    scores = 2 * 8 * 512 * 512 * 4

    def setup(lies_along_heads):
        query = torch.zeros(2, 8, 512, 16, dtype=dtype, requires_grad=True)
        bias = torch.zeros(512, 512, 8, dtype=dtype).permute(2, 0, 1)
        mask = (bias if lies_along_heads else bias.contiguous()).unsqueeze(0)

        def step():
            F.scaled_dot_product_attention(query, query, query, mask).sum().backward()

        return [query, mask], step

    written, fused = (
        plan_custom_step(lambda lies=lies: setup(lies), flash=flash, steps=1)
        for lies in (True, False)
    )
    assert scores in written.storage_trace.bytes
    assert scores not in fused.storage_trace.bytes


def test_pytorch_says_which_release_has_grouped_queries_in_which_kernel():
    says = "Memory-efficient attention also supports" in F.scaled_dot_product_attention.__doc__
    assert says == cuda_kernels.GROUPED


@pytest.mark.parametrize("dtype", [FULL, BRAIN, DOUBLE])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": torch.ones(33, 33, dtype=torch.bool).tril()},
     {"attn_mask": torch.zeros(2, 1, 33, 33)}, {"scale": 0.3}, {"enable_gqa": True},
     {"enable_gqa": True, "is_causal": True}],
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
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, saved=saved: (
                    saved.append(tensor.untyped_storage().nbytes()) or tensor
                ),
                lambda tensor: tensor,
            ),
        ):
            out = attention(query, key, value, **options)
        out.sum().backward()
        results.append((out.detach(), sorted(saved), key.grad))
    (expected, bytes_expected, grad_expected), (found, bytes_found, grad) = results
    assert found.dtype == dtype and torch.equal(found, expected)
    assert bytes_found == bytes_expected and torch.equal(grad, grad_expected)


def test_recomputed_dropout_is_the_gpus():
    """A checkpointed layer runs again during `backward`, with masks of one byte there as well."""

    def setup(rate=0.1):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate))
        batch = torch.zeros(64, WIDTH)

        def step():
            torch.utils.checkpoint.checkpoint(layer, batch, use_reentrant=False).sum().backward()

        return [layer, batch], step

    steps = 2
    planned = plan_custom_step(setup, steps=steps)
    made = [planned.storage_trace.bytes[event[1]] for event in _events(planned) if event[0] == BORN]
    assert made.count(64 * WIDTH) == 2 * steps


# -- devices ---------------------------------------------------------------------------------------

PLACED = {
    "cuda": lambda: a_step(lambda m: m.cuda(), on("cuda")),
    "to": lambda: a_step(lambda m: m.to("cuda"), on(torch.device("cuda"))),
    "number": lambda: a_step(lambda m: m.to(0), lambda *size, dtype: torch.zeros(*size).cuda(0)),
    "pinned": lambda: a_step(
        lambda m: m.to(device="cuda:0", non_blocking=True),
        lambda *size, dtype: torch.zeros(*size).pin_memory().cuda(non_blocking=True),
    ),
    "made there": lambda: a_step(lambda m: made_there(), on("cuda")),
}


def on(device):
    return lambda *size, dtype: torch.zeros(*size, dtype=dtype, device=device)


def made_there():
    with torch.device("cuda"):
        return mlp()


def sizes(plan, least=1024):
    """Events of storages of at least so many bytes; the counters of Adam's steps are smaller."""
    return [move for move in moves(plan) if move[1] >= least]


@pytest.mark.parametrize("name", PLACED)
def test_a_step_that_names_the_gpu_is_the_step_that_does_not(name):
    found, plain = plan_custom_step(PLACED[name]()), plan_custom_step(a_step())
    assert sizes(found) == sizes(plain)
    # Adam's counters of steps are on the host, as foreach=True keeps them there.
    assert 0 < plain.peak - found.peak < 256


def moving_step(pinned: bool):
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

    return setup


@pytest.mark.parametrize("pinned", [False, True])
def test_what_stays_on_the_host_does_not_count(pinned):
    planned = plan_custom_step(moving_step(pinned), steps=1)
    made = [planned.storage_trace.bytes[event[1]] for event in _events(planned) if event[0] == BORN]
    assert 4_000_000 not in made
    assert made.count(4 * 32) == 1  # the mask
    before = [event[1] for event in _events(planned)[: planned.storage_trace.begin]]
    assert sum(planned.storage_trace.bytes[storage] for storage in before) == 4 * sum(
        parameter.numel() for parameter in mlp().parameters()
    )
    assert made.count(4 * 32 * WIDTH) >= 1  # the batch, moved


def test_what_is_on_the_gpu_counts_although_it_is_not_listed():
    def setup():
        model, forgotten = mlp().cuda(), torch.zeros(500, 500, device="cuda")
        return [model], lambda: (model, forgotten)

    planned = plan_custom_step(setup)
    assert planned.peak == 4 * (500 * 500 + sum(p.numel() for p in mlp().parameters()))


class Operations(PlainDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def nearer(places: torch.Tensor, middle: int):
    return torch.where((places < middle) & (places > -middle), places, torch.abs(places) / middle)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_function_in_torchscript_is_planned_alike_each_time():
    """TorchScript rewrites one after its first calls; DeBERTa of transformers 5.17 has several."""
    scripted, runs = torch.jit.script(nearer), []
    for _ in range(4):
        seen = Operations()
        with FakeTensorMode(), FakeValues(), seen:
            scripted(torch.ones(4, 8), 3)
        runs.append(seen.names)
    assert "aten.where.self" in runs[0] and all(names == runs[0] for names in runs)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="new in PyTorch 2.13")
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_whose_chunks_no_plan_sees_is_refused(reduction):
    """Its products and its logits would be missing, and with them most of the step's time."""

    def setup(options):
        head, states = nn.Linear(8, 64, bias=False), torch.zeros(16, 8)

        def step():
            wanted = torch.zeros(16, dtype=torch.int64)
            given = {"reduction": reduction, "options": options}
            F.linear_cross_entropy(states, head.weight, wanted, **given).sum().backward()

        return [head, states], step

    assert plan_custom_step(lambda: setup(None)).peak > 16 * 64 * 4
    with pytest.raises(NotImplementedError, match="chunks that a plan does not see: leave out"):
        plan_custom_step(lambda: setup(nn.LinearCrossEntropyOptions()))


# -- optimizers, steps -----------------------------------------------------------------------------


def test_optimizers_are_a_gpus_by_default():
    default, each, loop = (
        plan_custom_step(a_step(**options))
        for options in ({}, {"foreach": True}, {"foreach": False})
    )
    assert moves(default) == moves(each) != moves(loop)


def test_a_fused_optimizer_needs_no_temporaries():
    fused, each = (plan_custom_step(a_step(**{name: True})) for name in ("fused", "foreach"))
    assert fused.peak < each.peak
    states = 2 * 4 * sum(parameter.numel() for parameter in mlp().parameters())
    alive = sum(
        {BORN: 1}.get(kind, -1 if kind == 1 else 0) * fused.storage_trace.bytes[storage]
        for kind, storage, _, _ in _events(fused)
    )
    assert alive > 2 * states  # weights and gradients are as large as the states


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


def test_checkpointing_on_a_gpu_recomputes_what_it_saved():
    """PyTorch compares devices of tensors that were saved with those of tensors recomputed."""

    def setup():
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.zeros(32, WIDTH, device="cuda")

        def step():
            optimizer.zero_grad()
            checkpoint(model, batch, use_reentrant=False).square().mean().backward()
            optimizer.step()

        return [model, batch], step

    products = {
        name: plan_custom_step(step, steps=2).storage_trace.made_by.count("addmm")
        for name, step in (("once", a_step(lambda model: model.cuda())), ("twice", setup))
    }
    # Of two steps; the recomputation ends with the last tensor that was saved.
    assert products == {"once": 4, "twice": 6}
