// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace gradaccum::detail {

/// A device number that is copied to the host without a wait, and read once it has arrived.
class LateNumber {
 public:
  /// Begins to copy a 0-dim float32 tensor. Does nothing while a copy is in flight.
  void ask(const at::Tensor& number);
  /// Returns the number once, if it has arrived.
  std::optional<float> answer();

 private:
  at::Tensor on_host_;
  std::optional<c10::Event> copied_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/late_number.ipp>
#endif
