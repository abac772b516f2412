// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/buckets.hpp>
#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/window/arrival_scope.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// Adds one window's gradients up over all ranks: a bucket is sent when all its gradients are there, and all those
/// before it are sent.
///
/// What is sent is the sum times the window's first weight, which each rank has divided its own by. A gradient that
/// fills its bucket alone is summed where it is; others are copied together, and back.
class GradientExchange final : public ArrivalListener {
 public:
  GradientExchange(std::shared_ptr<Links> links, Links::Line line, std::shared_ptr<WindowGradients> window,
                   std::optional<c10::ScalarType> accumulate_in, std::int64_t bucket_bytes)
      : links_(std::move(links)),
        line_(line),
        window_(std::move(window)),
        parameters_(window_->all_parameters()),
        accumulate_in_(accumulate_in),
        buckets_(buckets_of(parameters_, accumulate_in, bucket_bytes)),
        bucket_of_(parameters_.size()),
        arrived_(parameters_.size()),
        weight_(window_->first_weight()) {
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      missing_.push_back(buckets_[i].places.size());
      for (auto place : buckets_[i].places) bucket_of_[place] = i;
    }
  }

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  void arrive(std::size_t place) override;
  void end() override {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }

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

  /// A window without weight has none, whatever lies there.
  at::Tensor own(std::size_t place) const { return weight_ == 0 ? at::Tensor() : window_->sums()[place]; }
  at::Tensor own_dense(std::size_t place) const {
    const auto gradient = own(place);
    if (!gradient.defined()) return gradient;
    return gradient.layout() == at::kStrided ? gradient.detach() : gradient.to_dense();
  }
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

inline void GradientExchange::arrive(std::size_t place) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  const at::NoGradGuard no_grad;
  const auto bucket = bucket_of_[place];
  TORCH_CHECK(!arrived_[place] || bucket >= sent_.size(), "Replicas: the gradient of parameter ", place, " (shape ",
              parameters_[place].sizes(),
              ") arrived again after it was sent: an operation runs a backward of its own inside of backward; "
              "use {.overlap = false}");
  if (accumulate_in_) window_->fold_into_sum(place, *accumulate_in_);
  if (arrived_[place]) return;
  arrived_[place] = true;
  --missing_[bucket];
  while (sent_.size() < buckets_.size() && missing_[sent_.size()] == 0) send(buckets_[sent_.size()]);
}

inline std::vector<double> GradientExchange::used() const {
  std::vector<double> used;
  for (std::size_t i = 0; i < parameters_.size(); ++i) used.push_back(own(i).defined() ? 1 : 0);
  return used;
}

inline double GradientExchange::finish(const std::vector<double>& used_by, double weight_of_all) {
  const at::NoGradGuard no_grad;
  const bool has_half = std::any_of(parameters_.begin(), parameters_.end(),
                                    [](auto& parameter) { return parameter.scalar_type() == at::kHalf; });
  const double unit = has_half && weight_of_all > 0 ? weight_of_all : 1;
  while (sent_.size() < buckets_.size()) send(buckets_[sent_.size()]);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    links_->wait(sent_[i].pending, "the gradients of a window");
    if (unit != 1) sent_[i].sum.div_(unit);
    put_back(buckets_[i], sent_[i].sum, used_by);
  }
  links_->end_exchange(this);
  return unit;
}

inline void GradientExchange::send(const Bucket& bucket) {
  links_->begin_exchange(this);
  auto sum = bucket.places.size() == 1 ? sent_alone(bucket.places[0], bucket) : sent_together(bucket);
  if (weight_ != 0 && weight_ != 1) sum.mul_(weight_);
  auto pending = links_->begin_sum(line_, sum.is_complex() ? at::view_as_real(sum) : sum);
  sent_.push_back({std::move(sum), std::move(pending)});
}

inline at::Tensor GradientExchange::sent_alone(std::size_t place, const Bucket& bucket) const {
  const auto gradient = own_dense(place);
  if (!gradient.defined()) return at::zeros(parameters_[place].sizes(), bucket.options);
  return gradient.to(bucket.options.dtype()).contiguous();  // itself, where it is so already
}

inline at::Tensor GradientExchange::sent_together(const Bucket& bucket) const {
  const auto all = at::empty({bucket.elements}, bucket.options);
  std::int64_t from = 0;
  for (auto place : bucket.places) {
    const auto& parameter = parameters_[place];
    const auto part = all.narrow(0, from, parameter.numel()).view(parameter.sizes());
    if (const auto gradient = own_dense(place); gradient.defined())
      part.copy_(gradient);
    else
      part.zero_();
    from += parameter.numel();
  }
  return all;
}

inline void GradientExchange::put_back(const Bucket& bucket, const at::Tensor& sum,
                                       const std::vector<double>& used_by) {
  std::int64_t from = 0;
  for (auto place : bucket.places) {
    const auto& parameter = parameters_[place];
    const auto part = bucket.places.size() == 1 ? sum : sum.narrow(0, from, parameter.numel()).view(parameter.sizes());
    from += parameter.numel();
    if (used_by[place] == 0) continue;
    const auto& gradient = window_->sums()[place];
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      if (!gradient.is_alias_of(part)) gradient.detach().copy_(part);
      continue;
    }
    const auto dtype = accumulate_in_ ? part.scalar_type() : parameter.scalar_type();
    window_->sums().set(place, part.to(dtype, /*non_blocking=*/false, /*copy=*/bucket.places.size() > 1));
  }
}

}  // namespace gradaccum::detail
