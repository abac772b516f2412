// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/memory/copied_to.hpp>

#include <gradaccum/detail/build/inline.hpp>

namespace gradaccum::detail {

GRADACCUM_INLINE at::Tensor copied_to(at::Device device, const at::Tensor& of_host) {
  if (!device.is_cuda()) return of_host.to(device);
  return of_host.pin_memory().to(device, /*non_blocking=*/true);
}

}  // namespace gradaccum::detail
