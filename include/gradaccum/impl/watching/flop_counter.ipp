// SPDX-License-Identifier: Apache-2.0
// Counts floating-point operations by the shapes that LibTorch's dispatcher reports.
#pragma once

#include <gradaccum/flop_counter.hpp>

#include <gradaccum/detail/types/recorded_inputs.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

namespace detail {

using Inputs = c10::ArrayRef<const c10::IValue>;
using FlopsOf = std::int64_t (*)(Inputs inputs);

/// The counts of the FlopCounter that exists, of which operations on all threads add to one.
struct RunningFlops {
  std::mutex mutex;
  bool is_running = false;
  std::map<std::string, std::int64_t> counts;

  static RunningFlops& get() {
    static RunningFlops running;
    return running;
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
  const auto count = flops(recorded_inputs(operation));
  auto& running = RunningFlops::get();
  const std::lock_guard lock(running.mutex);
  if (running.is_running) running.counts[name->name] += count;
  return nullptr;
}

}  // namespace detail

GRADACCUM_INLINE FlopCounter::FlopCounter() {
  auto& running = detail::RunningFlops::get();
  {
    const std::lock_guard lock(running.mutex);
    TORCH_CHECK(!running.is_running, "FlopCounter: another one exists; there may be one at a time");
    running.is_running = true;
    running.counts.clear();
  }
  callback_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&detail::count_flops).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

GRADACCUM_INLINE FlopCounter::~FlopCounter() {
  at::removeCallback(callback_);
  auto& running = detail::RunningFlops::get();
  const std::lock_guard lock(running.mutex);
  running.is_running = false;
}

GRADACCUM_INLINE std::map<std::string, std::int64_t> FlopCounter::get_flop_counts() const {
  auto& running = detail::RunningFlops::get();
  const std::lock_guard lock(running.mutex);
  return running.counts;
}

GRADACCUM_INLINE std::int64_t FlopCounter::get_total_flops() const {
  std::int64_t all = 0;
  for (auto& [operation, flops] : get_flop_counts()) all += flops;
  return all;
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
