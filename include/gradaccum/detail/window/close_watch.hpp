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

/// Watches a few parameters more closely than all can be: notices what accumulation by hand has left in a loop, such as
/// clipping in the middle of a window, a step of the wrapped optimizer's own, or a zero_grad() that is missing.
///
/// Backward tells it of each gradient; on the CPU it looks at some of the numbers, which nobody can change unseen.
class CloseWatch {
 public:
  CloseWatch();
  CloseWatch(const CloseWatch&) = delete;
  CloseWatch& operator=(const CloseWatch&) = delete;
  ~CloseWatch();

  /// Watches some of these, from now on.
  void follow(const std::vector<at::Tensor>& parameters);
  /// A window begins, in which the parameters must stay as they are from its first micro-batch on. `look` comes first.
  void open();
  /// The gradients are as they should be.
  void look();
  /// A micro-batch of this window is complete.
  void count();

  /// How often backward has come in this micro-batch, to each of those that it has come to.
  std::int64_t passes() const;
  /// Warns, once, where a parameter is not what it was in the window's first micro-batch. Only that: who perturbs
  /// parameters and puts them back, or whose forward pass writes to them, may know what he does.
  void watch_parameters();
  /// Since backward, or since it looked, nobody else has written to the gradients. `of_backward_alone`: to those that
  /// backward has come to in this micro-batch.
  void check_gradients(bool of_backward_alone) const;
  /// Backward has not added to gradients that were there when the window began.
  void check_cleared() const;
  /// `steps`: of a window. As many passes a micro-batch look like a loop that counts by itself.
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
