// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

#include <gradaccum/detail/build/inline.hpp>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace gradaccum {

namespace detail {
struct FlopCounts;
using FlopsByOperation = std::map<std::string, std::int64_t>;

/// Adds to this thread's counters, for a step that replays operations which it has counted before.
void add_flops(const FlopsByOperation& counts);
}  // namespace detail

/// Counts the floating-point operations of products, convolutions and attention, as Python's FlopCounterMode does.
///
///     ga::FlopCounter counter;
///     torch::mse_loss(model->forward(x), y).backward();
///     std::cout << counter.get_total_flops() << " in a training step\n";
///     for (auto& [operation, flops] : counter.get_flop_counts()) std::cout << operation << ": " << flops << '\n';
///
/// Counts by the shapes of the inputs, on this thread and in its backward passes, from construction to destruction. A
/// multiplication and an addition are 2. Elementwise operations, matrix-vector products, the mask of causal attention
/// and the savings of grouped convolutions do not count.
///
/// Differences from Python's: what a checkpoint runs again does not count, since it is not the model's own. A
/// `GraphedStep` or `CompiledStep` counts as its objective does. The code of an `ExportedModel` does not count.
///
/// Counters may be nested; destroy them in reverse order, on the thread that constructed them.
///
/// @note Does not synchronize. Each operation takes some microseconds longer while a counter exists.
class FlopCounter {
 public:
  FlopCounter();
  FlopCounter& operator=(FlopCounter&&) = delete;
  ~FlopCounter();

  std::int64_t get_total_flops() const;
  /// Returns the count of each operation, such as `aten::mm`, that has one.
  std::map<std::string, std::int64_t> get_flop_counts() const;

 private:
  bool is_outermost_;
  std::shared_ptr<detail::FlopCounts> counts_;
  c10::DebugInfoGuard guard_;
  std::uint64_t callback_ = 0;  // of the outermost counter
};

/// Measures the FLOP/s of large matrix products in this dtype, for the peak of an MFU.
///
///     ga::Trainer trainer(model, sgd, objective);
///     const auto peak = ga::measure_peak_flops(torch::kCPU, torch::kFloat);
///     std::cout << trainer.fit(batches, {.peak_flops = peak});  // FLOP/s: 31.4 GFLOP/s, MFU 23.1 % of 136 GFLOP/s
///
/// The products of `rows` x `rows` matrices (0: 2048 on a processor, 8192 on a device) run with the program's settings,
/// such as the number of threads and TF32, and take about a second. A manufacturer's figure is usually higher.
///
/// @note Synchronizes with the device.
double measure_peak_flops(c10::Device device, at::ScalarType dtype, std::int64_t rows = 0);

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/flop_counter.ipp>
#endif
