"""NF4 layers on real tensors and on tensors without values, beside the library's own."""

import peft
import pytest
import torch
import transformers as library
from torch import nn

from helpers.recipe import Recipe
from tight_fit.techniques import four_bits
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode

bitsandbytes = pytest.importorskip("bitsandbytes")
WIDTH = 64


def config(**changed):
    fields = {
        "vocab_size": 99, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64,
    }  # fmt: skip
    return library.LlamaConfig(**{**fields, **changed})


def quantized(compute=torch.bfloat16):
    model = library.LlamaForCausalLM(config())
    four_bits.quantize(model, compute)
    return model


def test_the_layers_are_the_librarys_and_compute_what_it_computes():
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(config())
    layer = model.model.layers[1].mlp.down_proj
    own = bitsandbytes.nn.Linear4bit(128, WIDTH, False, torch.bfloat16, quant_type="nf4")
    own.load_state_dict({"weight": layer.weight.data.to(torch.bfloat16)})
    own.to("cpu")
    four_bits.quantize(model, torch.bfloat16)
    made = model.model.layers[1].mlp.down_proj
    assert isinstance(made, bitsandbytes.nn.Linear4bit) and torch.equal(made.weight, own.weight)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(made(x), own(x))


def test_adapters_beside_4_bits_keep_their_common_input_once_under_a_gpus_autocast():
    """peft's adapters cast their input to fp32 themselves unless CUDA's autocast is on. Measured on
    an H200: all 28 layers of Qwen3-0.6B keep what this leaves (results/models/nvidia-h200.json)."""
    attention = quantized().model.layers[0].self_attn
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"]), attention
    )
    x, kept = torch.randn(2, 8, WIDTH, dtype=torch.bfloat16, requires_grad=True), set()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.add((tensor.data_ptr(), tensor.shape)) or tensor, lambda tensor: tensor
    )
    with hooks, CudaKernels(Recipe(precision="bf16")), torch.autocast("cpu"):
        for project in (adapted.q_proj, adapted.k_proj, adapted.v_proj):
            project(x)
    assert {address for address, shape in kept if shape.numel() == x.numel()} == {x.data_ptr()}
    assert not torch.is_autocast_enabled()


@pytest.mark.parametrize("experts_are", [library.MixtralConfig, library.Qwen3MoeConfig])
def test_what_stays_in_16_bits_is_what_the_library_leaves(experts_are, tmp_path):
    """Also in a mixture of experts: those of a layer are one tensor, and no linear layer."""
    mixture = experts_are(**config().to_diff_dict(), num_local_experts=4, num_experts=4)
    model = library.AutoModelForCausalLM.from_config(mixture, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    theirs = library.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=library.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_use_double_quant=True, **options
        ),
        device_map="cpu",
    )
    four_bits.quantize(model, torch.bfloat16)
    found, wanted = (
        {name: (type(part), part.shape, part.dtype) for name, part in each.named_parameters()}
        for each in (model, theirs)
    )
    assert found == wanted
    stacked = {name for name, (_, shape, _) in found.items() if len(shape) == 3}
    assert len(stacked) == 2 * 2 and all(found[name][2] == torch.bfloat16 for name in stacked)


def test_bytes_of_a_weight_are_those_of_the_paper():
    """4 bits, 8 bits per 64 weights, 32 bits per 64 × 256: 4.127 bits per weight."""
    model = library.LlamaForCausalLM(config(hidden_size=512, intermediate_size=2048))
    four_bits.quantize(model, torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    tables = 4 * (four_bits.CODES + four_bits.CODES_OF_SCALES) + 4  # and the mean of the scales
    total = sum(tensor.nbytes for tensor in (layer.weight, *layer.buffers())) - tables
    assert 8 * total / (512 * 2048) == pytest.approx(4.127, abs=0.001)


def test_without_values_every_tensor_has_the_size_of_the_real_one():
    real = quantized()
    with FakeTensorMode():
        fake = quantized()
    sizes = [
        [(name, tuple(part.shape), part.dtype) for name, part in (*model.named_parameters(),)]
        + [(name, tuple(part.shape), part.dtype) for name, part in (*model.named_buffers(),)]
        for model in (real, fake)
    ]
    assert sizes[0] == sizes[1] and any("quantization_4" in name for name, *_ in sizes[0])


def test_gpt2s_transposed_layers_are_quantized_as_well():
    model = library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=99, n_embd=64, n_layer=1, n_head=4)
    )
    before = model.transformer.h[0].mlp.c_fc
    weight, bias = before.weight.data.T.clone(), before.bias.data.clone()
    four_bits.quantize(model, torch.float32)
    after = model.transformer.h[0].mlp.c_fc
    x = torch.randn(5, 64)
    unpacked = bitsandbytes.functional.dequantize_4bit(after.weight, after.quant_state)
    assert torch.allclose(after(x), x @ unpacked.T + bias, atol=1e-5)
    assert (unpacked - weight).abs().max() < 0.2 * weight.abs().max()


def test_parameters_are_counted_as_before():
    plain = library.LlamaForCausalLM(config())
    count = sum(parameter.numel() for parameter in plain.parameters())
    assert four_bits.count_parameters(plain) == count
    assert four_bits.count_parameters(quantized()) == count


def test_the_product_has_the_gradient_of_the_written_out_weight():
    model = quantized(compute=torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.quant_state)
    x, y = (torch.ones(2, WIDTH).mul_(0.5).requires_grad_(True) for _ in range(2))
    four_bits.Product4bit.apply(x, None, layer.weight, layer.quant_state).square().sum().backward()
    nn.functional.linear(y, weight).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-5)


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: library.LlamaForCausalLM(config(intermediate_size=17, hidden_size=12)), "divide"),
        (
            lambda: library.ResNetForImageClassification(
                library.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
            ),
            "none below its head",
        ),
    ],
)
def test_what_cannot_be_quantized_says_so(model, words):
    with pytest.raises(ValueError, match=words) as caught:
        four_bits.quantize(model(), torch.bfloat16)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
