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

/// Each rank is somewhere, and nowhere are two: NCCL refuses two ranks on one device.
bool each_has_its_own(const std::vector<std::string>& places);

/// The machine and the CUDA device on which all these are; "" where there is no such, or no NCCL.
std::string device_place(const std::vector<at::Tensor>& tensors);

/// NCCL between the devices of all ranks.
///
/// It connects with the first exchange, in a thread of its own, since it waits for ranks that may never come; and ends
/// by an abort, which waits for nobody, when all that was sent has come, or never will.
class NcclLink {
 public:
  /// `store`: a connection that nobody else uses. All ranks are asked for this at once.
  NcclLink(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, at::Device device,
           std::chrono::milliseconds timeout);
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;
  ~NcclLink();

  bool answers() const;
  /// Throws what went wrong, when it answers.
  void check() { connected_.get(); }

  c10d::Backend& backend() const { return *nccl_; }

  /// Nothing waits on the device any more. That takes seconds at most; what hangs even so is left to itself.
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
