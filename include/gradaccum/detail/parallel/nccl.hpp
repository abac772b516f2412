// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <future>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace gradaccum::detail {

/// True if each rank has a device, and no two share one, which NCCL refuses.
bool each_has_its_own(const std::vector<std::string>& places);

/// Returns the machine and the CUDA device of all these tensors; "" if they are not on one, or there is no NCCL.
std::string device_place(const std::vector<at::Tensor>& tensors);

/// NCCL connections between the devices of all ranks.
///
/// Connects by a first exchange in a separate thread, since that waits for ranks that may never come. Ends by an abort,
/// which waits for no rank, once all that was sent has arrived or never will.
class NcclLink {
 public:
  /// Starts to connect, as all ranks must at the same time. `store` must be a connection with no other user.
  NcclLink(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, at::Device device,
           std::chrono::milliseconds timeout);
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;
  ~NcclLink();

  bool answers() const;
  /// Waits until connected. Throws the error if connecting failed.
  void check() { connected_.get(); }

  c10d::Backend& backend() const { return *nccl_; }

  /// Ends all waiting on the device, and abandons what still hangs after ten seconds.
  void abort() noexcept;

 private:
  c10::intrusive_ptr<c10d::Backend> nccl_;
  std::future<void> connected_;
  bool aborted_ = false;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/nccl.ipp>
#endif
