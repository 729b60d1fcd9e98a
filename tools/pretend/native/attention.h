// Attention as CUDA chooses and computes it, by the CPU's flash kernel.
//
// The choice follows sdp_utils.cpp of ATen's CUDA part as far as the course meets it: flash on
// compute capability 8.0 and later in 16 bits and without a mask, else the memory-efficient kernel
// where rows are aligned, else the plain operations. The CPU's kernel has no dropout, so attention
// with dropout takes the plain operations here, and does not on a real GPU.
#pragma once
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>

#include "kernels.h"

namespace pretended {

inline int capability = 75;  // 10 * major + minor
using Bias = std::optional<Tensor>;
using Scale = std::optional<double>;

inline int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value,
                      const Bias& mask, double dropout, bool causal, Scale, bool grouped) {
  const auto& context = at::globalContext();
  const auto type = query.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  const bool known = half || type == at::kFloat;
  const bool shapes = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && !grouped &&
                      query.size(3) == value.size(3);
  if (known && shapes && dropout == 0) {
    if (context.userEnabledFlashSDP() && half && capability >= 80 && !mask && query.size(3) <= 256)
      return int64_t(at::SDPBackend::flash_attention);
    const bool supported = type != at::kBFloat16 || capability >= 80;
    if (context.userEnabledMemEfficientSDP() && supported && query.size(3) % (half ? 8 : 4) == 0)
      return int64_t(at::SDPBackend::efficient_attention);
  }
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return int64_t(at::SDPBackend::math);
}

inline Tensor number(int device, int64_t value) {
  return on_gpu(at::full({}, value, at::kLong), device);
}

// The kernel keeps a row of 32 bits per query, rounded up to 32 queries.
inline Tensor padded(const Tensor& logsumexp) {
  const int64_t queries = logsumexp.size(2), rounded = (queries + 31) / 32 * 32;
  Tensor made = at::zeros({logsumexp.size(0), logsumexp.size(1), rounded}, at::kFloat);
  made.narrow(2, 0, queries).copy_(logsumexp);
  return made;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const Bias& bias, bool keep,
    double, bool causal, Scale scale) {
  Quietly quietly;
  const int device = query.device().index();
  const Bias mask = bias ? Bias(on_host(*bias)) : bias;
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(query), on_host(key), on_host(value), 0.0, causal, mask, scale);
  Tensor kept = keep ? padded(sums) : at::zeros({sums.size(0), sums.size(1), 0}, at::kFloat);
  return {on_gpu(out, device), on_gpu(kept, device), number(device, 0), number(device, 0)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&,
    double, std::array<bool, 4>, bool causal, Scale scale) {
  Quietly quietly;
  if (!grad.defined()) return {};
  const int device = query.device().index();
  const Bias mask = bias.defined() ? Bias(on_host(bias)) : Bias();
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(query), on_host(key), on_host(value), on_host(out),
      on_host(sums).narrow(2, 0, query.size(2)), 0.0, causal, mask, scale);
  return {on_gpu(q, device), on_gpu(k, device), on_gpu(v, device), Tensor()};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
flash(const Tensor& query, const Tensor& key, const Tensor& value, double, bool causal, bool,
      Scale scale) {
  Quietly quietly;
  const int device = query.device().index();
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_host(query), on_host(key), on_host(value), 0.0, causal, Bias(), scale);
  Tensor state = on_gpu(at::zeros({2}, at::kLong), device);
  Tensor none = on_gpu(at::empty({0}, out.options()), device);
  return {on_gpu(out, device), on_gpu(sums.contiguous(), device), Tensor(), Tensor(),
          query.sym_size(2),   key.sym_size(2), state, number(device, 0), none};
}

inline std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double, bool causal, const Tensor&, const Tensor&, Scale scale) {
  Quietly quietly;
  const int device = query.device().index();
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_host(grad), on_host(query), on_host(key), on_host(value), on_host(out), on_host(sums),
      0.0, causal, Bias(), scale);
  return {on_gpu(q, device), on_gpu(k, device), on_gpu(v, device)};
}

}  // namespace pretended
