// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: watching

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace gradaccum {

/// Counts the floating-point operations of products, convolutions and attention, as Python's FlopCounterMode does.
///
///     ga::FlopCounter counter;
///     torch::mse_loss(model->forward(x), y).backward();
///     std::cout << counter.get_total_flops() << " in a training step\n";
///     for (auto& [operation, flops] : counter.get_flop_counts()) std::cout << operation << ": " << flops << '\n';
///
/// Counts by the shapes of the inputs, from its construction to its destruction, in forward and backward passes on all
/// threads. A multiplication and an addition are 2. Elementwise operations, matrix-vector products, the mask of causal
/// attention and the savings of grouped convolutions do not count; operations of compiled and replayed steps are not
/// seen. To compare a training with a peak, count one step and divide by its time measured without a counter.
///
/// One counter at a time: a second one throws. May be constructed and destroyed on different threads.
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
  std::uint64_t callback_ = 0;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/watching/flop_counter.ipp>
#endif
