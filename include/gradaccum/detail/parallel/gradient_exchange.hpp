// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace gradaccum::detail {

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
/// What is sent is the sum times the window's first weight, which each rank has divided its own by.
class GradientExchange : public ArrivalListener {
 public:
  GradientExchange(std::shared_ptr<Links> links, Links::Line line, std::shared_ptr<WindowGradients> window,
                   std::optional<c10::ScalarType> accumulate_in, std::int64_t bucket_bytes);

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  GRADACCUM_INLINE void arrive(std::size_t place) override;
  GRADACCUM_INLINE void end() override;

  /// All buckets are to be sent once more: another micro-batch.
  void begin_round();
  /// Sends what has not been sent.
  GRADACCUM_INLINE virtual void end_round();
  /// Without a backward: what there is, or zeros.
  void send_round() { begin_round(), end_round(); }
  /// Something has been sent of this window.
  bool begun() const { return begun_; }

  /// There are gradients here that have not been sent, should no round be under way.
  bool has_unsent() const;
  /// 1 for each parameter that has a gradient in this window here.
  GRADACCUM_INLINE virtual std::vector<double> used() const;
  /// After the last round: waits, and the window has the sums, of parameters that are used somewhere. Gives what they
  /// have been divided by: 1, but for float16 parameters, where sums might overflow.
  virtual double finish(const std::vector<double>& used_by, double weight_of_all) = 0;

 protected:
  /// A window without weight has none, whatever lies there.
  bool has_own(std::size_t place) const { return window_->first_weight() != 0 && window_->sums()[place].defined(); }
  /// What this rank has of it, dense.
  at::Tensor own(std::size_t place) const;
  /// The same as it is sent, times the weight: itself, where it is so already.
  at::Tensor sent_alone(const Bucket& bucket) const;
  void times_weight(const at::Tensor& sum) const;
  double unit_of(double weight_of_all) const;
  virtual void send(const Bucket& bucket) = 0;

  const std::shared_ptr<Links> links_;
  const Links::Line line_;
  const std::shared_ptr<WindowGradients> window_;
  const std::vector<at::Tensor> parameters_;
  const std::optional<c10::ScalarType> accumulate_in_;
  const std::vector<Bucket> buckets_;

 private:
  void send_next();

  std::vector<std::optional<std::size_t>> bucket_of_;  // by place; of what was frozen when this began, none
  std::vector<std::size_t> missing_;                   // by bucket, how many gradients
  std::vector<bool> arrived_;
  std::size_t sent_ = 0;  // buckets in this round
  bool begun_ = false, ended_ = false;
  std::mutex mutex_;
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/gradient_exchange.ipp>
#endif
