// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace gradaccum::detail {

class WindowGradients;

inline constexpr std::int64_t alone_from = std::int64_t{1} << 20;  ///< bytes: copying costs more than another message

/// Gradients that are sent together, by their places in the list of parameters.
struct Bucket {
  std::vector<std::size_t> places = {};
  at::TensorOptions options = {};  ///< as they are sent
  std::int64_t elements = 0;
};

/// A window's gradients in buckets of at most so many bytes, each of one dtype and device; a large one goes alone, and
/// is not copied. Backward brings the last parameters first, and so do the buckets, each by the parameter that
/// completes it: small ones of many layers wait for the first of these. The same on all ranks: it depends on the
/// parameters alone, and not on which of them have gradients.
///
/// float16 is sent as float32, in which the sum over ranks does not overflow.
std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters, std::optional<c10::ScalarType> accumulate_in,
                               std::int64_t bucket_bytes);

/// Adds one window's gradients up over all ranks: a bucket is sent when all its gradients are there, and all those
/// before it are sent.
///
/// What is sent is the sum times the window's first weight, which each rank has divided its own by. A gradient that
/// fills its bucket alone is summed where it is; others are copied together, and back.
class GradientExchange final : public ArrivalListener {
 public:
  GradientExchange(std::shared_ptr<Links> links, Links::Line line, std::shared_ptr<WindowGradients> window,
                   std::optional<c10::ScalarType> accumulate_in, std::int64_t bucket_bytes);

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  GRADACCUM_INLINE void arrive(std::size_t place) override;
  GRADACCUM_INLINE void end() override;

  /// 1 for each parameter that has a gradient here.
  std::vector<double> used() const;
  /// Sends what has not been sent, waits, and puts the sums into the window: of parameters that are used somewhere.
  /// Gives what they have been divided by: 1, but for float16 parameters, where sums might overflow.
  double finish(const std::vector<double>& used_by, double weight_of_all);
  bool begun() const { return !sent_.empty(); }

 private:
  struct Sent {
    at::Tensor sum;
    Links::Pending pending;
  };

  at::Tensor own(std::size_t place) const;
  at::Tensor own_dense(std::size_t place) const;
  void send(const Bucket& bucket);
  at::Tensor sent_alone(std::size_t place, const Bucket& bucket) const;
  at::Tensor sent_together(const Bucket& bucket) const;
  void put_back(const Bucket& bucket, const at::Tensor& sum, const std::vector<double>& used_by);

  const std::shared_ptr<Links> links_;
  const Links::Line line_;
  const std::shared_ptr<WindowGradients> window_;
  const std::vector<at::Tensor> parameters_;
  const std::optional<c10::ScalarType> accumulate_in_;
  const std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_, missing_;  // by place; by bucket, how many gradients
  std::vector<bool> arrived_;
  const double weight_;
  std::vector<Sent> sent_;
  bool ended_ = false;
  std::mutex mutex_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/gradient_exchange.ipp>
#endif
