// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace gradaccum::detail {

/// Hears of gradients as a backward pass brings them. Each device has a thread of its own in backward.
class ArrivalListener {
 public:
  virtual ~ArrivalListener() = default;
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  /// Backward has added to the gradient of this parameter, and no other hook has run yet that came before.
  virtual void added(std::size_t /*place*/) {}
  /// The gradient of this parameter is there.
  virtual void arrive(std::size_t place) = 0;
  /// It matters how a gradient comes: not in parts that are added to it in place.
  virtual bool waits_for_whole() const { return true; }
  /// What arrives from now on is left alone. (After an exception other threads may still be at it.)
  virtual void end() = 0;
};

/// A scope around backward passes, in which somebody hears of the gradients as they arrive, after whatever else listens
/// for that.
class ArrivalScope {
 public:
  explicit ArrivalScope(std::shared_ptr<ArrivalListener> listener);
  ArrivalScope(const ArrivalScope&) = delete;
  ArrivalScope& operator=(const ArrivalScope&) = delete;
  ~ArrivalScope();

 private:
  std::shared_ptr<ArrivalListener> listener_;
  std::vector<const at::Tensor*> listening_;
};

/// Somebody waits for whole gradients of this parameter.
bool is_waited_for(const at::Tensor& parameter);
/// Says to those who listen that a part has been added to its gradient.
void say_added(const at::Tensor& parameter);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/arrival_scope.ipp>
#endif
