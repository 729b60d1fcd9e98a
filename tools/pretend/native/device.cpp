// A pretended CUDA: tensors of device "cuda:N" whose memory is the host's. tools/pretend/build.py
// compiles it; it must be loaded before torch, and tools/pretend/cuda.py gives torch.cuda's part.
#include "attention.h"
#include "nccl.h"

#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

using c10d::TimerRegistry;
using c10d::RegistererTimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, pretended::Clock);

namespace pretended {

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

using at::Storage;
using Sizes = at::IntArrayRef;

Tensor as_strided(const Tensor& t, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
Tensor& set_part(Tensor& t, Storage storage, int64_t offset, Sizes size, Sizes stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset, size, stride);
}
Tensor& set_storage(Tensor& t, Storage storage) {
  const int64_t count = storage.nbytes() / t.dtype().itemsize();
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {count}, {});
}
Tensor& set_tensor(Tensor& t, const Tensor& from) {
  return at::native::set_storage_cpu_(t, from.storage(), from.storage_offset(), from.sizes(),
                                      from.strides());
}
Tensor& set_nothing(Tensor& t) {
  Storage none(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return at::native::set_storage_cpu_(t, none, 0, {0}, {});
}
void record_stream(Tensor&, c10::Stream) {}

// PyTorch has compositions of other operations for these, which CUDA does not use.
const char* const KERNELS[] = {
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "native_group_norm_backward", "native_dropout", "native_dropout_backward"};
// bitsandbytes has slow compositions for these, and kernels for the CPU and for CUDA.
const char* const EIGHT_BITS[] = {
    "optimizer_update_8bit_blockwise", "optimizer_update_32bit", "quantize_blockwise",
    "dequantize_blockwise", "quantize_4bit", "dequantize_4bit", "gemv_4bit",
    "int8_linear_matmul", "int8_vectorwise_quant", "int8_mm_dequant"};

torch::CppFunction boxed() { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(boxed()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("_softmax", &softmax<false>);
  m.impl("_log_softmax", &softmax<true>);
  m.impl("_softmax_backward_data", &softmax_backward<false>);
  m.impl("_log_softmax_backward_data", &softmax_backward<true>);
  m.impl("_scaled_dot_product_efficient_attention", &efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  for (const char* name : KERNELS) m.impl(name, boxed());
}

TORCH_LIBRARY_IMPL(bitsandbytes, CUDA, m) {
  for (const char* name : EIGHT_BITS) m.impl(name, boxed());
}

// The default generator of a GPU, for torch.cuda.
Tensor random_state(int64_t device) { return default_generator(int(device)).get_state(); }
void set_random_state(int64_t device, const Tensor& state) {
  at::Generator generator = default_generator(int(device));
  generator.set_state(state);
}
void seed(int64_t device, int64_t value) {
  at::Generator generator = default_generator(int(device));
  generator.set_current_seed(uint64_t(value));
}
int64_t initial_seed(int64_t device) { return default_generator(int(device)).current_seed(); }

// What a storage's resize_ does on a GPU (at::native::resize_bytes_cuda), which a build without CUDA
// lacks. FSDP frees and takes the memory of gathered weights by it.
void resize_storage(const Tensor& tensor, int64_t bytes) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr data = allocator.on(storage->device().index(), size_t(bytes));
  const size_t kept = std::min(storage->nbytes(), size_t(bytes));
  if (kept > 0) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size_t(bytes));
}

TORCH_LIBRARY(pretended, m) {
  m.def("resize_storage(Tensor tensor, int bytes) -> ()");
  m.def("random_state(int device) -> Tensor", &random_state);
  m.def("set_random_state(int device, Tensor state) -> ()", &set_random_state);
  m.def("seed(int device, int value) -> ()", &seed);
  m.def("initial_seed(int device) -> int", &initial_seed);
  m.def("on_host(Tensor tensor) -> Tensor");
  m.def("add_nccl(__torch__.torch.classes.c10d.ProcessGroup group, bool alone) -> ()", &add_nccl);
}
Tensor alias(const Tensor& tensor) { return on_host(tensor); }
TORCH_LIBRARY_IMPL(pretended, CUDA, m) {
  m.impl("on_host", &alias);
  m.impl("resize_storage", &resize_storage);
}

struct Start {
  Start() {
    c10::SetAllocator(DeviceType::CUDA, &allocator, 10);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  }
} start;

}  // namespace pretended

extern "C" {
void pretended_card(int devices, int capability, int64_t capacity, int64_t workspace) {
  pretended::devices = devices;
  pretended::capability = capability;
  pretended::capacity = capacity;
  pretended::workspace = workspace;
}
void pretended_book(pretended::Enter enter) { pretended::enter = enter; }
// Up to `most` freed blocks, oldest first, as device and address by turns; returns their number.
int64_t pretended_freed(int64_t* into, int64_t most) {
  std::lock_guard<std::mutex> guard(pretended::freed_lock);
  auto& all = pretended::freed;
  const auto count = std::min<int64_t>(most, int64_t(all.size()));
  for (int64_t i = 0; i < count; ++i) {
    into[2 * i] = all[i].first;
    into[2 * i + 1] = all[i].second;
  }
  all.erase(all.begin(), all.begin() + count);
  return count;
}
// How often the host has waited for a GPU, after `more` of it.
int64_t pretended_waits(int64_t more) { return pretended::waits += more; }
int pretended_current() { return pretended::current; }
void pretended_set_current(int device) { pretended::current = device; }
void pretended_clear_workspaces() { pretended::clear_workspaces(); }
}
