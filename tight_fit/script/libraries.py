"""What libraries do in a program without values: models from configurations, no compilation."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import hub as transformers_hub

from tight_fit.models.local import folder_in_mirror
from tight_fit.techniques import model_changes
from tight_fit.torch_private import WRAPPERS, FakeTensor, call_with, disable_current_modes
from tight_fit.trace.compiled_layers import Compiler
from tight_fit.trace.known_values import KnownValues
from tight_fit.trace.tracker import Tracker


@contextmanager
def parameters_without_values(known: KnownValues) -> Iterator[None]:
    """Inside, every `nn.Parameter` has a shape and no values.

    The memory that it is made from is given back before anybody writes to it, so that a model of
    any size can be made.
    """
    make = nn.Parameter.__new__

    def made(kind, data=None, requires_grad=True):
        if isinstance(data, torch.Tensor) and not isinstance(data, (FakeTensor, *WRAPPERS)):
            data = known.empty_like(data)
        return make(kind, data, requires_grad)

    with patch.object(nn.Parameter, "__new__", staticmethod(made)):
        yield


class Notes:
    """What a plan has to say of the program, each sentence once, in order."""

    def __init__(self):
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        """Say it, unless it was said."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)


@contextmanager
def adapted(
    notes: Notes, on_gpu: bool, line: Callable[[], str], tracker: Tracker
) -> Iterator[None]:
    """Inside, libraries make models without reading weights, and make no code: what is compiled
    runs as a plan has it (`trace.compiled_layers`)."""
    load = torch.load

    def without(where: str) -> None:
        notes.add(
            f"{where} compiles: planned as PyTorch runs it without compiling, which as a rule "
            "takes more memory and more time."
        )

    def compiled(model=None, **options):
        where = line()
        if isinstance(model, nn.Module):
            compiler = Compiler(tracker, refuses=lambda error: without(where))
            call_with(model, lambda: compiler.in_place_of(model))
            return model
        without(where)
        return model if model is not None else lambda function: function

    def compiled_module(module, *args, **kwargs):
        compiled(module)

    def loaded(file, map_location=None, **options):
        moves = on_gpu and map_location is not None and "cuda" in str(map_location)
        with disable_current_modes():
            held = load(file, map_location="cpu", **options)
        return _on_gpu(held) if moves else held

    def from_pretrained(kind, name, *args, **kwargs):
        return _from_configuration(kind, name, args, kwargs, notes)

    def paged(*shape, dtype=torch.float32, device="cuda"):
        notes.add(
            "Paged optimizer states are counted on the GPU; where it is full, the driver moves "
            "them to the host's memory, and the step takes longer."
        )
        states = torch.zeros(*shape, dtype=dtype, device="cuda")
        states.is_paged = True  # type: ignore[attr-defined]  # bitsandbytes' own mark
        return states

    find = transformers_hub.cached_files

    def found(path_or_repo_id, filenames, **options):
        return find(folder_in_mirror(str(path_or_repo_id)) or path_or_repo_id, filenames, **options)

    with ExitStack() as patches:
        for owner, name, value in (
            (transformers_hub, "cached_files", found),
            (torch, "compile", compiled),
            (nn.Module, "compile", compiled_module),
            (torch, "load", loaded),
            (PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        ):
            patches.enter_context(patch.object(owner, name, value))
        if (utils := sys.modules.get("accelerate.utils")) is not None:
            patches.enter_context(_searches_said(utils, notes, line))
        if on_gpu and (functional := sys.modules.get("bitsandbytes.functional")) is not None:
            patches.enter_context(patch.object(functional, "get_paged", paged))
            for name in ("fill", "prefetch_tensor"):  # kernels for memory that the driver moves
                patches.enter_context(patch.object(functional, name, lambda *args, **kwargs: None))
        for owner, name, value in _kernels_of_trl() if on_gpu else ():
            patches.enter_context(patch.object(owner, name, value))
        yield


TILES = {  # what TRL (1.16) does by kernels of Triton, by module
    "trl.kernels.chunked_logprob": ("_forward_tile", "_backward_tile"),
    "trl.kernels.chunked_divergence": ("_stats_tile", "_jsd_tile", "_backward_tile"),
}


def _kernels_of_trl() -> Iterator[tuple[Any, str, Any]]:
    """(module, name, value): TRL's kernels work in place, and hold nothing. No kernel starts here,
    and the functions of PyTorch that TRL has for machines without Triton hold many tensors."""
    for name, tiles in TILES.items():
        module = sys.modules.get(name)
        if module is not None and all(hasattr(module, one) for one in ("_use_triton", *tiles)):
            yield module, "_use_triton", lambda device: False
            yield from ((module, one, lambda *args, **kwargs: None) for one in tiles)


def _searches_said(utils: Any, notes: Notes, line: Callable[[], str]) -> Any:
    """Accelerate's search of a batch size, Trainer's auto_find_batch_size too: with a note."""
    search = utils.find_executable_batch_size

    def searched(function=None, starting_batch_size=128, **options):
        notes.add(
            f"{line()} searches its batch size as it runs: planned is the first that it tries, "
            f"{starting_batch_size}; where that does not fit, it goes on with smaller ones."
        )
        return search(function, starting_batch_size, **options)

    return patch.object(utils, "find_executable_batch_size", searched)


def _on_gpu(held: Any) -> Any:
    if isinstance(held, torch.Tensor):
        return held.cuda()
    if isinstance(held, dict):
        return type(held)((name, _on_gpu(value)) for name, value in held.items())
    if isinstance(held, (list, tuple)):
        return type(held)(_on_gpu(value) for value in held)
    return held


# Options of `from_pretrained` that say where files are and how they are read.
_READING = (
    "state_dict proxies tqdm_class from_tf from_flax low_cpu_mem_usage "
    "max_memory offload_folder offload_buffers offload_state_dict variant use_safetensors "
    "weights_only ignore_mismatched_sizes key_mapping _commit_hash _fast_init mirror adapter_name "
    "disable_mmap use_kernels kernel_config allow_all_kernels fusion_config generation_config"
).split()
_PLACES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def _from_configuration(kind: Any, name: Any, args: tuple, kwargs: dict[str, Any], notes: Notes):
    """What `from_pretrained` gives, but that no weights are read."""
    kwargs = {key: value for key, value in kwargs.items() if key not in _READING}
    loading_info = kwargs.pop("output_loading_info", False)
    places = {key: kwargs.pop(key) for key in _PLACES if key in kwargs}
    device_map = kwargs.pop("device_map", None)
    quantization = kwargs.pop("quantization_config", None)
    dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or "auto"
    kwargs.pop("torch_dtype", None)
    attention = kwargs.pop("attn_implementation", None)
    for key in ("trust_remote_code", "_from_auto", "_from_pipeline", "adapter_kwargs"):
        kwargs.pop(key, None)
    config = kwargs.pop("config", None)
    if config is None or isinstance(config, str):
        config, kwargs = kind.config_class.from_pretrained(
            config or name, return_unused_kwargs=True, **places, **kwargs
        )
    config = copy.deepcopy(config)
    if attention is not None:
        config._attn_implementation = attention
    config.name_or_path = str(name)
    stored = getattr(config, "dtype", None)
    chosen = stored if dtype == "auto" else dtype
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."))
    if dtype == "auto" and stored is None:
        notes.add(f"The configuration of {name} names no dtype: its weights are taken for fp32.")
    chosen = chosen or torch.float32
    config.dtype = chosen
    with model_changes.default_dtype(chosen), no_init_weights():
        model = kind(config, *args, **kwargs)
        model.tie_weights()
    quantizer = None if quantization is None else _quantizer(quantization)
    if quantizer is not None:
        device_map = quantizer.update_device_map(device_map)
        _quantize(model, quantizer)
    model.eval()
    if device_map is not None and str(device_map) not in ("cpu", "{'': 'cpu'}"):
        model.to("cuda")
    if quantizer is not None:
        model.hf_quantizer = quantizer  # as it is set, the model refuses to be moved
        quantizer.postprocess_model(model)
    if not loading_info:
        return model
    told: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set()}
    return model, {**told, "mismatched_keys": set(), "error_msgs": []}


def _quantizer(wanted: Any) -> Any:
    """What quantizes a model in transformers. Raises NotImplementedError for what is no bits of
    bitsandbytes."""
    if isinstance(wanted, dict):
        wanted = BitsAndBytesConfig(**wanted)
    if not (getattr(wanted, "load_in_4bit", False) or getattr(wanted, "load_in_8bit", False)):
        raise NotImplementedError(
            f"weights quantized by {type(wanted).__name__} are not planned: only those of "
            "bitsandbytes with 4 and 8 bits are"
        )
    return AutoHfQuantizer.from_config(wanted)


def _quantize(model: nn.Module, quantizer: Any) -> None:
    """Replace linear layers by those of bitsandbytes, as transformers does when it loads.

    It makes the new layers without any data, and gives them that of the checkpoint: here of the
    layer that was there.
    """
    before = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map=None)
    for name, layer in model.named_modules():
        old: Any = before[name]
        if layer is old:
            continue
        empty: Any = layer.weight
        data = old.weight.data.T if isinstance(old, Conv1D) else old.weight.data
        layer.weight = type(empty)(data, requires_grad=False, **vars(empty))
        if old.bias is not None:
            layer.bias = old.bias.requires_grad_(False)
