"""The names of torch's operations, by what a GPU does for them."""

from __future__ import annotations


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


VIEWS = _names("""
    _unsafe_view detach detach_ alias lift_fresh _reshape_alias set_ resize_ split
    split_with_sizes unbind chunk unsafe_split unsafe_chunk is_same_size as_strided_
""")
NOTHING = _names("""
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted
    _nested_tensor_size sym_size sym_numel sym_stride sym_storage_offset record_stream
""")
WAITS = _names("""
    _local_scalar_dense item nonzero equal is_nonzero masked_select
""")
FILLS = _names("""
    zero_ fill_ zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full
    arange scalar_tensor random_ normal_ uniform_ bernoulli_ randint rand randn eye
""")
GATHERS = _names("""
    embedding index gather index_select take take_along_dim
""")
SCATTERS = _names("""
    index_put index_put_ index_add index_add_ scatter_add scatter_add_ scatter scatter_
    embedding_dense_backward _index_put_impl_ gather_backward slice_scatter select_scatter
""")
REDUCTIONS = _names("""
    sum mean amax amin max min argmax argmin var var_mean std std_mean norm linalg_vector_norm
    prod any all logsumexp cumsum nll_loss_forward topk sort
    float8_scales
""")
SOFTMAXES = _names("""
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax
""")
COPIES = _names("""
    clone contiguous copy_ _to_copy
""")
PRODUCTS = _names("""
    mm addmm bmm baddbmm mv addmv _scaled_mm addbmm dot
""")
GROUPED_PRODUCTS = _names("""
    _grouped_mm
""")
CONVOLUTIONS = _names("""
    convolution _convolution cudnn_convolution mkldnn_convolution convolution_backward
""")
LAYER_NORMS = _names("""
    native_layer_norm native_layer_norm_backward
""")
GROUP_NORMS = _names("""
    native_group_norm native_group_norm_backward
""")
BATCH_NORMS = _names("""
    native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    _native_batch_norm_legit
""")
FSDP_COPIES = _names("""
    all_gather_copy_in split_with_sizes_copy chunk_cat
""")
EIGHT_BIT = _names("""
    optimizer_update_8bit_blockwise optimizer_update_32bit
""")
ATTENTION = frozenset(
    f"_scaled_dot_product_{kind}attention{where}{back}"
    for kind in ("flash_", "efficient_", "cudnn_", "fused_")
    for where in ("", "_for_cpu", "_overrideable")
    for back in ("", "_backward")
)
