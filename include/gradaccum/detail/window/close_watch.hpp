// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gradaccum::detail {

class ArrivalScope;
class WatchedParameters;

/// Watches a few parameters closely, for leftovers of accumulation by hand in a loop: clipping inside a window, a step
/// of the wrapped optimizer's own, or a missing zero_grad().
///
/// It follows each gradient in backward. On the CPU it samples numbers, which shows writes that version counters miss.
class CloseWatch {
 public:
  CloseWatch();
  CloseWatch(const CloseWatch&) = delete;
  CloseWatch& operator=(const CloseWatch&) = delete;
  ~CloseWatch();

  /// Watches some of these parameters from now on.
  void follow(const std::vector<at::Tensor>& parameters);
  /// Opens a window in which parameters must not change after the first micro-batch. Call `look` first.
  void open();
  /// Records the gradients as correct.
  void look();
  /// Counts a micro-batch of this window.
  void count();

  /// The smallest number of backward passes in this micro-batch over the parameters that backward has reached.
  std::int64_t passes() const;
  /// Warns, once, if a parameter is not what it was in the window's first micro-batch. A warning only, since code that
  /// perturbs and restores parameters, or a forward pass that writes to them, is legitimate.
  void watch_parameters();
  /// Throws if anything else has written to the gradients since backward or `look`. `of_backward_alone`: checks only
  /// the parameters that backward has reached in this micro-batch.
  void check_gradients(bool of_backward_alone) const;
  /// Throws if backward has added to gradients that were there when the window began.
  void check_cleared() const;
  /// Warns of as many passes in a micro-batch as a window has `steps`: the loop seems to count by itself.
  void warn_of_passes(std::int64_t steps);

 private:
  std::shared_ptr<WatchedParameters> watched_;
  std::unique_ptr<ArrivalScope> hearing_;
  bool warned_of_passes_ = false, warned_of_parameters_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/close_watch.ipp>
#endif
