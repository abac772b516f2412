// SPDX-License-Identifier: Apache-2.0
// Counts floating-point operations by the shapes that LibTorch's dispatcher reports.
#pragma once

#include <gradaccum/flop_counter.hpp>

#include <gradaccum/detail/types/recorded_inputs.hpp>
#include <gradaccum/detail/types/uncounted.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

using Inputs = c10::ArrayRef<const c10::IValue>;
using FlopsOf = std::int64_t (*)(Inputs inputs);

/// The counts of a FlopCounter, to which operations on several threads may add.
struct FlopCounts final : c10::DebugInfoBase {
  std::mutex mutex;
  FlopsByOperation by_operation;
  FlopCounts* const outer = of_thread();  // outlives this one

  /// Returns the innermost counter's; nullptr if there is none, or in an UncountedScope.
  static FlopCounts* of_thread() { return dynamic_cast<FlopCounts*>(c10::ThreadLocalDebugInfo::get(flops_key())); }

  void add(const std::string& operation, std::int64_t flops) {
    for (auto* counts = this; counts; counts = counts->outer) {
      const std::lock_guard lock(counts->mutex);
      counts->by_operation[operation] += flops;
    }
  }
};

/// Returns the operations of a product of the last two dimensions, for each matrix of a batch.
GRADACCUM_INLINE std::int64_t product_flops(const at::Tensor& a, const at::Tensor& b) {
  return 2 * a.numel() * b.size(-1);
}

/// Returns the operations of a convolution with a weight of `weight_numel`, for each position of `positions`.
GRADACCUM_INLINE std::int64_t convolution_flops(std::int64_t batch, at::IntArrayRef positions,
                                                std::int64_t weight_numel) {
  return 2 * batch * c10::multiply_integers(positions.slice(2)) * weight_numel;
}

/// aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
GRADACCUM_INLINE std::int64_t convolution_flops(Inputs inputs) {
  const auto& x = inputs[0].toTensor();
  const auto& weight = inputs[1].toTensor();
  if (inputs[6].toBool()) return convolution_flops(x.size(0), x.sizes(), weight.numel());
  const auto of_dim = [](const c10::IValue& list, std::int64_t dim) {  // a list of one number is for all dimensions
    const auto numbers = list.toIntVector();
    return numbers[numbers.size() == 1 ? 0 : static_cast<std::size_t>(dim)];
  };
  auto output = x.sizes().vec();
  for (std::int64_t dim = 2; dim < x.dim(); ++dim) {
    const auto stride = of_dim(inputs[3], dim - 2), padding = of_dim(inputs[4], dim - 2);
    const auto kernel = of_dim(inputs[5], dim - 2) * (weight.size(dim) - 1) + 1;
    output[static_cast<std::size_t>(dim)] = (x.size(dim) + 2 * padding - kernel) / stride + 1;
  }
  return convolution_flops(x.size(0), output, weight.numel());
}

/// aten::convolution_backward(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed,
/// output_padding, groups, output_mask). The gradient of the input is a convolution that is transposed if the forward
/// one is not. The gradient of the weight convolves the input by `grad_output`, or the reverse if transposed, with
/// batch and channels exchanged.
GRADACCUM_INLINE std::int64_t convolution_backward_flops(Inputs inputs) {
  const auto& grad = inputs[0].toTensor();
  const auto& x = inputs[1].toTensor();
  const auto& weight = inputs[2].toTensor();
  const bool transposed = inputs[7].toBool();
  const auto mask = inputs[10].toBoolList();
  std::int64_t flops = 0;
  if (mask.get(0)) flops += convolution_flops(grad.size(0), transposed ? x.sizes() : grad.sizes(), weight.numel());
  if (mask.get(1))
    flops += transposed ? convolution_flops(grad.size(1), weight.sizes(), x.numel())
                        : convolution_flops(x.size(1), weight.sizes(), grad.numel());
  return flops;
}

/// Returns the operations of `of_query_key` products like query * key and `of_value` products like scores * value.
/// Key and value may have fewer heads than the query.
GRADACCUM_INLINE std::int64_t attention_flops(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                              int of_query_key, int of_value) {
  const auto scores =
      c10::multiply_integers(query.sizes().slice(0, static_cast<std::size_t>(query.dim() - 1))) * key.size(-2);
  return 2 * scores * (of_query_key * query.size(-1) + of_value * value.size(-1));
}

GRADACCUM_INLINE FlopsOf flops_of(const std::string& operation) {
  static const auto known = [] {
    std::unordered_map<std::string, FlopsOf> all;
    all["aten::mm"] = all["aten::bmm"] =
        all["aten::_scaled_mm"] = [](Inputs of) { return product_flops(of[0].toTensor(), of[1].toTensor()); };
    all["aten::addmm"] =
        all["aten::baddbmm"] = [](Inputs of) { return product_flops(of[1].toTensor(), of[2].toTensor()); };
    all["aten::convolution"] = [](Inputs of) { return convolution_flops(of); };
    all["aten::convolution_backward"] = &convolution_backward_flops;
    for (const std::string kernel :
         {"efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention"}) {
      const auto name = "aten::_scaled_dot_product_" + kernel;
      all[name] = [](Inputs of) { return attention_flops(of[0].toTensor(), of[1].toTensor(), of[2].toTensor(), 1, 1); };
      all[name + "_backward"] = [](Inputs of) {
        return attention_flops(of[1].toTensor(), of[2].toTensor(), of[3].toTensor(), 3, 2);
      };
    }
    return all;
  }();
  const auto found = known.find(operation);
  return found == known.end() ? nullptr : found->second;
}

GRADACCUM_INLINE std::unique_ptr<at::ObserverContext> count_flops(const at::RecordFunction& operation) {
  const auto name = operation.operator_name();
  const auto flops = name ? flops_of(name->name) : nullptr;
  if (!flops) return nullptr;
  if (auto* const counts = FlopCounts::of_thread()) counts->add(name->name, flops(recorded_inputs(operation)));
  return nullptr;
}

}  // namespace detail

GRADACCUM_INLINE void detail::add_flops(const FlopsByOperation& counts) {
  if (auto* const of_thread = FlopCounts::of_thread())
    for (auto& [operation, flops] : counts) of_thread->add(operation, flops);
}

GRADACCUM_INLINE FlopCounter::FlopCounter()
    : is_outermost_(!c10::ThreadLocalDebugInfo::get(detail::flops_key())),
      counts_(std::make_shared<detail::FlopCounts>()),
      guard_(detail::flops_key(), counts_) {
  if (!is_outermost_) return;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&detail::count_flops).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

GRADACCUM_INLINE FlopCounter::~FlopCounter() {
  if (is_outermost_) at::removeCallback(callback_);
}

GRADACCUM_INLINE std::map<std::string, std::int64_t> FlopCounter::get_flop_counts() const {
  const std::lock_guard lock(counts_->mutex);
  return counts_->by_operation;
}

GRADACCUM_INLINE std::int64_t FlopCounter::get_total_flops() const {
  std::int64_t all = 0;
  for (auto& [operation, flops] : get_flop_counts()) all += flops;
  return all;
}

GRADACCUM_INLINE double measure_peak_flops(c10::Device device, at::ScalarType dtype, std::int64_t rows) {
  TORCH_CHECK(rows >= 0, "measure_peak_flops: rows must be >= 0, got ", rows);
  if (rows == 0) rows = device.is_cpu() ? 2048 : 8192;
  constexpr int runs = 8;
  const at::NoGradGuard no_grad;
  // Random numbers, with which a GPU is slower than with equal ones; not from the program's generators.
  const auto numbers = at::randn({rows, rows}, at::detail::createCPUGenerator(/*seed_val=*/0), at::TensorOptions());
  const auto a = numbers.to(device, dtype), b = a.clone();
  auto product = at::mm(a, b);  // loads kernels
  const auto synchronize = [&] {
    if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(a.device().index());
  };
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < runs; ++run) {
    synchronize();
    const auto start = std::chrono::steady_clock::now();
    at::mm_out(product, a, b);
    synchronize();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return static_cast<double>(detail::product_flops(a, b)) / least;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
