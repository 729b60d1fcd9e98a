"""Steps of one's own with quantized layers, DistributedDataParallel, and older PyTorch.

The references: the tensors that bitsandbytes itself makes on a CPU, the sizes of DDP's buckets, a
peak that PyTorch's own recipe publishes, and formulas.
"""

import copy

import pytest
import torch
from torch import nn

from tight_fit.plans.own_step import plan_custom_step
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.quantized import state_tensors
from tight_fit.trace.releases import parse
from tight_fit.trace.storage_trace import BORN

MIB = 2**20


# -- bitsandbytes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers():
    return pytest.importorskip("bitsandbytes").nn


def made_before(plan) -> list[int]:
    """Bytes of what existed before the first step, largest first."""
    trace = plan.storage_trace
    before = [event[1] for event in trace.events[: trace.begin] if event[0] == BORN]
    return sorted((trace.bytes[storage] for storage in before), reverse=True)


def real_sizes(layer: nn.Module) -> list[int]:
    """Bytes of what the library keeps of a layer, made on a CPU by the library itself."""
    layer = layer.to("cpu")  # quantizes
    state = getattr(layer.weight, "quant_state", None)
    tensors = [layer.weight.data, *([] if layer.bias is None else [layer.bias.data])]
    if state is None:
        tensors.append(layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB)
    else:
        tensors += [state.absmax, state.code]
        if state.nested:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
    return sorted((tensor.numel() * tensor.element_size() for tensor in tensors), reverse=True)


LAYERS = {
    "nf4": lambda b: b.Linear4bit(192, 200, quant_type="nf4", compress_statistics=False),
    "nf4, double": lambda b: b.Linear4bit(192, 200, bias=False, quant_type="nf4"),
    "fp4, bf16 storage": lambda b: b.Linear4bit(192, 200, quant_storage=torch.bfloat16),
    "int8": lambda b: b.Linear8bitLt(192, 200, has_fp16_weights=False),
}


@pytest.mark.parametrize("moved", [False, True], ids=["never named", "cuda"])
@pytest.mark.parametrize("name", LAYERS)
def test_quantized_layers_hold_what_the_library_holds(name, moved, layers):
    place = "cuda" if moved else "cpu"

    def setup():
        layer = LAYERS[name](layers)
        layer = layer.cuda() if moved else layer
        x = torch.zeros(8, 192, requires_grad=True, device=place)
        return [layer], lambda: layer(x).sum().backward()

    sizes = made_before(plan_custom_step(setup, steps=1))
    for size in real_sizes(LAYERS[name](layers)):
        sizes.remove(size)  # each is there
    assert sum(sizes) <= (4 * 8 * 192 if moved else 0)  # and only the input beside them


def described(value: object) -> object:
    """What two values must share to be taken for the same: all but the values of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if type(value).__name__ == "QuantState":
        return {name: described(part) for name, part in vars(value).items()}
    return type(value) if isinstance(value, nn.Module) else value


def told_by(weight: nn.Parameter, names: set[str]) -> dict[str, object]:
    """What a weight says under these names, described; a name that it lacks is left out."""
    found = {name: getattr(weight, name) for name in names if hasattr(weight, name)}
    return {name: described(value) for name, value in found.items() if not callable(value)}


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a deep copy"])
@pytest.mark.parametrize("quantized", [False, True], ids=["as made", "quantized"])
@pytest.mark.parametrize("name", ["nf4, double", "int8"])
def test_whoever_asks_a_planned_weight_is_told_what_the_library_tells(
    name, quantized, copied, layers
):
    """peft and transformers read attributes of these weights, and go by their class's name."""
    planned = []

    def setup():
        layer = LAYERS[name](layers)
        layer = layer.cuda() if quantized else layer
        planned.append(copy.deepcopy(layer).weight if copied else layer.weight)
        return [nn.Linear(2, 2)], lambda: None

    plan_custom_step(setup, steps=1)
    (weight,) = planned
    real = LAYERS[name](layers)
    real = (real.to("cpu") if quantized else real).weight
    kind = type(real)
    assert isinstance(weight, kind) and isinstance(weight, nn.Parameter)
    assert type(weight).__name__ == kind.__name__ == weight.__class__.__name__
    assert described(weight) == described(real) and weight.requires_grad == real.requires_grad
    names = set(dir(kind)) - set(dir(nn.Parameter)) | set(vars(real))
    assert set(vars(real)) >= {"quant_state", "quant_type"} or set(vars(real)) >= {"CB", "SCB"}
    assert told_by(weight, names) == told_by(real, names)


@pytest.mark.parametrize(
    "make, weight",
    [
        (lambda b: b.Linear4bit(1024, 1024, bias=False), 1024 * 1024 // 2),
        (lambda b: b.Linear8bitLt(1024, 1024, bias=False, has_fp16_weights=False), 1024 * 1024),
    ],
    ids=["4 bits", "8 bits"],
)
def test_a_step_with_an_adapter_writes_the_weight_out_for_a_moment(make, weight, layers):
    def setup():
        down, up = nn.Linear(1024, 8, bias=False), nn.Linear(8, 1024, bias=False)
        layer, adapter = make(layers), nn.Sequential(down, up)
        model = nn.ModuleList([layer, adapter]).to(torch.bfloat16).cuda()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert sum(p.numel() for p in trained) == 2 * 8 * 1024
        optimizer = torch.optim.AdamW(trained)
        x = torch.zeros(16, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)

        def step():
            optimizer.zero_grad()
            (layer(x) + adapter(x)).float().square().mean().backward()
            optimizer.step()

        return [model, x], step

    planned = plan_custom_step(setup)
    written_out = 2 * 1024 * 1024
    assert planned.storage_trace.bytes.count(written_out) >= 2
    assert weight + written_out < planned.peak < weight + written_out + MIB
    assert made_before(planned)[0] == weight


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_bias_beside_quantized_weights_trains(name, layers):
    made = []

    def trained(place):
        layer = LAYERS[name](layers)
        layer.bias.requires_grad_()
        layer = layer.to("cpu") if place == "cpu" else layer.cuda()
        layer(torch.ones(8, 192, device=place)).sum().backward()
        made.append(layer.bias.grad)
        return [layer], lambda: None

    plan_custom_step(lambda: trained("cuda"), steps=1)
    trained("cpu")  # the library itself
    planned, real = made[0], made[-1]
    assert planned is not None and real is not None
    assert (planned.shape, planned.dtype) == (real.shape, real.dtype)


def test_what_cannot_be_planned_of_bitsandbytes_is_told(layers):
    with pytest.raises(NotImplementedError, match="has_fp16_weights=False"):
        plan_custom_step(lambda: ([layers.Linear8bitLt(64, 64)], lambda: None))


def test_nothing_of_bitsandbytes_stays_changed(layers):
    layer = layers.Linear4bit(64, 64)
    assert type(layer.weight).__name__ == "Params4bit" and not state_tensors(nn.Linear(2, 2))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="Tensor subclass"):
        layers.Linear4bit(64, 64)


# -- DistributedDataParallel -----------------------------------------------------------------------


def data_parallel(update: bool = True, **options):
    """The step of PyTorch's recipe of ZeroRedundancyOptimizer, with Adam."""

    def setup():
        torch.distributed.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(2000, 2000).to("cuda") for _ in range(20)))
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0], **options)
        optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)

        def step():
            out = parallel(torch.zeros(20, 2000).to("cuda"))
            nn.MSELoss()(out, torch.zeros(20, 2000).to("cuda")).backward()
            if update:
                optimizer.step()
            optimizer.zero_grad()

        return [model], step

    return setup


def test_the_peak_is_the_one_that_pytorchs_recipe_publishes():
    """PyTorch 1.8: "Max memory allocated before optimizer step(): 992.0MB", after it 1697.0MB."""
    for update, megabytes in ((False, 992), (True, 1697)):
        planned = plan_custom_step(data_parallel(update), steps=1, torch_version="1.8", ranks=2)
        assert planned.allocator_peaks("V100-16GB").allocated // 10**6 == megabytes


def test_buckets_lie_beside_gradients_unless_these_are_views_of_them():
    beside, views = (
        plan_custom_step(data_parallel(gradient_as_bucket_view=view), steps=3, ranks=2)
        for view in (False, True)
    )
    parameters = 4 * 20 * (2000 * 2000 + 2000)
    apart = [plan.allocator_peaks("V100-16GB").allocated for plan in (beside, views)]
    assert apart[0] - apart[1] == pytest.approx(
        parameters, rel=0.06
    )  # a gradient's block is larger
    assert not torch.distributed.is_initialized()


def test_without_a_number_of_ranks_it_is_refused():
    wrapped = nn.parallel.DistributedDataParallel
    with pytest.raises(NotImplementedError, match="ranks=2"):
        plan_custom_step(lambda: ([wrapped(nn.Linear(2, 2))], lambda: None))


# -- older releases --------------------------------------------------------------------------------


def adam_step(optimizer=torch.optim.Adam, **options):
    def setup():
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        updates = optimizer(model.parameters(), **options)
        batch = torch.zeros(4, 512)

        def step():
            updates.zero_grad()
            model(batch).sum().backward()
            updates.step()

        return [model, batch], step

    return setup


WEIGHTS = 8 * 4 * 512 * 512


def test_adams_temporaries_are_the_releases():
    """Weights, gradients, two states; beside them two lists, one list, or two or three tensors."""
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for version, least, most in (("1.13", 2, 3), ("2.0", 16, 16), ("2.1", 8, 8)):
            peak = plan_custom_step(adam_step(kind), torch_version=version).peak
            temporaries = 8 * (peak - 4 * WEIGHTS) / WEIGHTS  # as many as so many tensors
            assert least - 0.1 < temporaries < most + 0.1, version
    todays = plan_custom_step(adam_step(kind))
    assert todays.peak == plan_custom_step(adam_step(kind), torch_version="2.5").peak


def test_workspaces_are_outside_the_allocator_before_2_0():
    old, new = (
        plan_custom_step(adam_step(foreach=False), torch_version=version).allocator_peaks("T4")
        for version in ("1.13", "2.1")
    )
    assert new.allocated - old.allocated == pytest.approx(2 * 8.125 * MIB, abs=MIB)


def test_zero_grad_fills_before_2_0():
    def setup():
        model = nn.Linear(4, 4)

        def step():
            model.zero_grad()
            kept.append(model.weight.grad is not None)
            model(torch.zeros(2, 4)).sum().backward()

        return [model], step

    for version, expected in (("1.13", [False, True]), ("2.0", [False, False])):
        kept = []
        plan_custom_step(setup, torch_version=version, steps=2)
        assert kept == expected


def test_releases_are_read_as_they_are_written():
    assert parse("2.1.0.dev20230623+cu118") == (2, 1) and parse("1.13.1") == (1, 13)
    assert parse(None) == parse(torch.__version__)
