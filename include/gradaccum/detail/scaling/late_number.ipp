// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/scaling/late_number.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace gradaccum::detail {

GRADACCUM_INLINE void LateNumber::ask(const at::Tensor& number) {
  if (copied_) return;
  const auto device = number.device();
  if (!on_host_.defined()) on_host_ = at::empty({}, at::TensorOptions(at::kFloat).pinned_memory(device.is_cuda()));
  on_host_.copy_(number, /*non_blocking=*/true);
  copied_.emplace(device.type());
  copied_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

GRADACCUM_INLINE std::optional<float> LateNumber::answer() {
  if (!copied_ || !copied_->query()) return {};
  copied_.reset();
  return *on_host_.const_data_ptr<float>();
}

}  // namespace gradaccum::detail
