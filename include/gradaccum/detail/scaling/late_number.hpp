// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace gradaccum::detail {

/// A number of a device that the host asks for without a wait, and hears of when it has come.
class LateNumber {
 public:
  /// 0-dim float32. Does nothing while an answer is under way.
  void ask(const at::Tensor& number);
  /// If it has come; once.
  std::optional<float> answer();

 private:
  at::Tensor on_host_;
  std::optional<c10::Event> copied_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/scaling/late_number.ipp>
#endif
