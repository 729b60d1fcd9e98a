// Kernels of the pretended GPUs: the CPU's, on the same memory.
//
// The fallback for the dispatch key CUDA gives the CPU's kernel aliases of its arguments and takes
// over what it returns, without a copy. It refuses tensors of the host among them, as CUDA does.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <set>

#include "runtime.h"

namespace pretended {

using at::IValue;
using at::Tensor;

// Inside, neither autocast nor autograd nor a dispatch mode sees what the CPU's kernels do.
struct Quietly {
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::AutoDispatchBelowADInplaceOrView autograd;
};

inline Tensor shaped(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                       c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

inline void let_go(void* context) { delete static_cast<c10::Storage*>(context); }

// The same memory as a tensor of the host, which keeps that memory alive.
inline Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  c10::DataPtr pointer(storage.mutable_data(), new c10::Storage(storage), &let_go,
                       Device(DeviceType::CPU));
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
                     nullptr, false);
  return shaped(alias, tensor, c10::DispatchKey::CPU);
}

// A new tensor of the host becomes one of the GPU, which takes its memory over.
inline Tensor on_gpu(const Tensor& tensor, int device) {
  const auto& storage = tensor.storage();
  const int64_t address = take(device, int64_t(storage.nbytes()));
  c10::DataPtr pointer(storage.mutable_data(), new Block{device, address, nullptr, 0, storage}, &drop,
                       Device(DeviceType::CUDA, device));
  c10::Storage there(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
                     &allocator, true);
  return shaped(there, tensor, c10::DispatchKey::CUDA);
}

// These take tensors of the host and of a GPU together on a real GPU as well. So does indexing, but
// only of its indices: they are lists of optional tensors.
inline const std::set<std::string> MIXED = {"aten::copy_", "aten::_copy_from",
                                            "aten::_foreach_copy_", "aten::set_.source_Tensor"};
// These give values to the host, which waits for them.
inline const std::set<std::string> READ = {"aten::_local_scalar_dense", "aten::equal",
                                           "aten::nonzero", "aten::masked_select"};
inline const std::set<std::string> PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm",
                                               "aten::baddbmm", "aten::mv", "aten::addmv"};
// {operation: its weight and bias among the arguments}, which have the dtype of the input on a GPU.
inline const std::map<std::string, std::pair<int, int>> NORMS = {
    {"aten::native_layer_norm", {2, 3}}, {"aten::native_group_norm", {1, 2}}};

// One call of the fallback: its arguments on the host, and how results find their way back.
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  const c10::FunctionSchema& schema = op.schema();
  size_t count = schema.arguments().size(), begin = stack->size() - count;
  int device = -1;
  bool host = false;
  std::optional<bool> drawn_there;  // whether a generator that was given is a GPU's
  std::vector<IValue> given{stack->begin() + begin, stack->end()};
  std::vector<std::pair<Tensor, Tensor>> aliases;  // (of the GPU, of the host)
  std::vector<std::pair<Tensor, Tensor>> empty;    // results to fill: (of the GPU, of the host)
  std::map<void*, c10::Storage> taken;             // storages of results already taken over

  std::string name() const {
    const auto& overload = schema.overload_name();
    return schema.name() + (overload.empty() ? "" : "." + overload);
  }

  Tensor to_host(const Tensor& tensor, bool result) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host |= tensor.dim() > 0 || schema.name() == "aten::equal";  // a number may be on the host
      return tensor;
    }
    if (device < 0) device = tensor.device().index();
    if (result && tensor.numel() == 0) {
      auto fresh = at::empty({0}, tensor.options().device(at::kCPU));
      empty.emplace_back(tensor, fresh);
      return fresh;
    }
    auto alias = on_host(tensor);
    aliases.emplace_back(tensor, alias);
    return alias;
  }

  void arguments() {
    for (size_t i = 0; i < count; ++i) {
      IValue& value = (*stack)[begin + i];
      const auto& argument = schema.arguments()[i];
      if (value.isTensor()) {
        value = to_host(value.toTensor(), argument.is_out());
      } else if (value.isTensorList()) {
        std::vector<Tensor> all;
        for (const Tensor& t : value.toTensorVector()) all.push_back(to_host(t, argument.is_out()));
        value = IValue(c10::List<Tensor>(all));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> all;
        const bool others = host;
        for (const auto& t : value.toOptionalTensorVector())
          all.push_back(t ? std::optional<Tensor>(to_host(*t, false)) : t);
        host = others;  // indices may be on the host
        value = IValue(all);
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        if (device < 0) device = checked(value.toDevice());
        value = IValue(Device(DeviceType::CPU));
      } else if (value.isGenerator() && value.toGenerator().defined()) {
        const auto generator = value.toGenerator();
        drawn_there = generator.device().is_cuda();
        if (*drawn_there)
          value = IValue(static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host);
      }
    }
    const char* names[] = {"cpu", "cuda"};
    TORCH_CHECK(!drawn_there || *drawn_there == (device >= 0), "Expected a '", names[device >= 0],
                "' device type for generator but found '", names[device < 0], "'");
    TORCH_CHECK(!host || aliases.empty() || MIXED.count(name()),
                "Expected all tensors to be on the same device, but found at least two devices, "
                "cuda:", device, " and cpu! (when checking arguments of ", name(), ")");
  }

  // What the CPU computes and kernels of CUDA refuse.
  void refused() const {
    if (device < 0) return;
    if (PRODUCTS.count(schema.name())) {
      for (const IValue& value : given)
        TORCH_CHECK(!value.isTensor() || !c10::isIntegralType(value.toTensor().scalar_type(), true),
                    "\"addmm_cuda\" not implemented for '", value.toTensor().scalar_type(), "'");
      const char* asked = std::getenv("CUBLAS_WORKSPACE_CONFIG");
      const std::string found = asked ? asked : "";
      const auto& context = at::globalContext();
      TORCH_CHECK(!context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly() ||
                      found == ":4096:8" || found == ":16:8",
                  "Deterministic behavior was enabled, but cuBLAS is not deterministic without "
                  "CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8.");
    }
    const auto norm = NORMS.find(schema.name());
    if (norm == NORMS.end()) return;
    const auto wanted = given[0].toTensor().scalar_type();
    for (int place : {norm->second.first, norm->second.second})
      if (given[place].isTensor() && given[place].toTensor().defined())
        TORCH_CHECK(given[place].toTensor().scalar_type() == wanted, "expected scalar type ",
                    wanted, " but found ", given[place].toTensor().scalar_type());
  }

  Tensor back(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda() || device < 0) return tensor;
    void* storage = tensor.storage().unsafeGetStorageImpl();
    for (const auto& [gpu, alias] : aliases)
      if (alias.storage().unsafeGetStorageImpl() == storage)
        return shaped(gpu.storage(), tensor, c10::DispatchKey::CUDA);
    if (taken.count(storage)) return shaped(taken[storage], tensor, c10::DispatchKey::CUDA);
    auto made = on_gpu(tensor, device);
    taken[storage] = made.storage();
    return made;
  }

  void results() {
    for (const auto& [gpu, filled] : empty) {
      gpu.resize_(filled.sizes());
      on_host(gpu).copy_(filled);
    }
    const auto& returns = schema.returns();
    const size_t first = stack->size() - returns.size();
    for (size_t r = 0; r < returns.size(); ++r) {
      IValue& value = (*stack)[first + r];
      const auto* written = returns[r].alias_info();
      if (written != nullptr && written->isWrite()) {
        for (size_t i = 0; i < count; ++i) {
          const auto* mine = schema.arguments()[i].alias_info();
          if (mine != nullptr && *mine == *written) {
            value = given[i];
            break;
          }
        }
      } else if (value.isTensor()) {
        value = back(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> all;
        for (const Tensor& t : value.toTensorVector()) all.push_back(back(t));
        value = IValue(c10::List<Tensor>(all));
      }
    }
  }
};

// While a kernel draws without a generator of its own, the default generator of the host has the
// state of the GPU's, and gets its own back.
struct Drawing {
  at::Generator host = at::detail::getDefaultCPUGenerator(), gpu;
  Tensor before = host.get_state();
  explicit Drawing(int device)
      : gpu(static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl())->host) {
    host.set_state(gpu.get_state());
  }
  ~Drawing() {
    gpu.set_state(host.get_state());
    host.set_state(before);
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Quietly quietly;
  Call call{op, stack};
  call.arguments();
  call.refused();
  if (call.device >= 0 && PRODUCTS.count(op.schema().name())) want_workspace(call.device);
  std::optional<Drawing> drawing;
  if (call.device >= 0 && op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(call.device);
  op.callBoxed(stack);
  if (READ.count(op.schema().name())) ++waits;
  drawing.reset();
  call.results();
}

inline Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout>, std::optional<Device> device,
                                  std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(DeviceType::CUDA, device ? checked(*device) : current));
  const auto type = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &allocator, keys, type, format);
}

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Device(DeviceType::CUDA, device ? checked(*device) : current));
  const auto type = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, type);
}

inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  Quietly quietly;
  if (!to.is_cuda() && !non_blocking) ++waits;
  Tensor there = on_host(to);
  there.copy_(on_host(from));
  return to;
}

// CUDA's softmax takes fp16 and gives fp32 in one kernel; the CPU's must be given fp32.
template <bool LOG>
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  Quietly quietly;
  Tensor in = on_host(self.contiguous());
  if (half_to_float) in = in.to(at::kFloat);
  return on_gpu(LOG ? at::_log_softmax(in, dim, false) : at::_softmax(in, dim, false),
                self.device().index());
}

template <bool LOG>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType as) {
  Quietly quietly;
  const Tensor g = on_host(grad.contiguous()), o = on_host(output.contiguous());
  const Tensor made = LOG ? at::_log_softmax_backward_data(g, o, dim, g.scalar_type())
                          : at::_softmax_backward_data(g, o, dim, g.scalar_type());
  return on_gpu(made.to(as), grad.device().index());
}

}  // namespace pretended
