// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace gradaccum::detail {

class LateArrivals;

/// Tensors whose new numbers are still on their way, while the program goes on.
///
/// An operation of LibTorch on this thread, or in a backward pass of it, waits for those that it is given, or that lie
/// in the same memory, before it runs. They have no address meanwhile: `data_ptr()`, and operations on other threads,
/// throw what `advice` says. Of an address that was asked for earlier nobody knows, nor of what other threads do with
/// another tensor of the same memory, a view say.
///
/// Where one cannot arrive, it and all that are still late stay as they are, without an address: whoever reads them
/// gets the reason as an error.
class LateTensors {
 public:
  /// `arrive(i)` returns when the i-th has its numbers. It is called by one thread at a time, and never twice.
  LateTensors(std::vector<at::Tensor> tensors, std::function<void(std::size_t)> arrive, const std::string& advice);
  LateTensors(const LateTensors&) = delete;
  LateTensors& operator=(const LateTensors&) = delete;
  /// Those that have not been waited for stay late.
  ~LateTensors();

  /// For all. Throws why one of them cannot arrive.
  void wait();

 private:
  std::shared_ptr<LateArrivals> arrivals_;
};

/// For all that this thread has begun: before something asks for addresses, or reads those that it was given earlier.
void wait_for_late_tensors();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/late_tensors.ipp>
#endif
