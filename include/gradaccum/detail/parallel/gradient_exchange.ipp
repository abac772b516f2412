// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/gradient_exchange.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/window/window_gradients.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters,
                                                std::optional<c10::ScalarType> accumulate_in,
                                                std::int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  std::map<std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>, std::size_t>
      open;  // that others of their kind may join
  for (std::size_t place = parameters.size(); place-- > 0;) {
    const auto& parameter = parameters[place];
    if (!parameter.requires_grad()) continue;
    auto dtype = parameter.scalar_type();
    if (accumulate_in && c10::elementSize(dtype) < c10::elementSize(*accumulate_in)) dtype = *accumulate_in;
    if (dtype == c10::kHalf) dtype = c10::kFloat;
    const auto elements = parameter.numel();
    const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
    const auto options = at::TensorOptions(dtype).device(parameter.device());
    const auto kind = std::tuple(dtype, parameter.device().type(), parameter.device().index());
    if (elements * size >= std::min(alone_from, bucket_bytes)) {
      buckets.push_back({.places = {place}, .options = options, .elements = elements});
      continue;
    }
    const auto found = open.find(kind);
    if (found == open.end() || (buckets[found->second].elements + elements) * size > bucket_bytes) {
      open[kind] = buckets.size();
      buckets.push_back({.options = options});
    }
    auto& bucket = buckets[open[kind]];
    bucket.places.push_back(place);
    bucket.elements += elements;
  }
  std::stable_sort(buckets.begin(), buckets.end(),
                   [](const Bucket& a, const Bucket& b) { return a.places.back() > b.places.back(); });
  return buckets;
}

GRADACCUM_INLINE GradientExchange::GradientExchange(std::shared_ptr<Links> links, Links::Line line,
                                                    std::shared_ptr<WindowGradients> window,
                                                    std::optional<c10::ScalarType> accumulate_in,
                                                    std::int64_t bucket_bytes)
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

GRADACCUM_INLINE void GradientExchange::arrive(std::size_t place) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  const at::NoGradGuard no_grad;
  const auto bucket = bucket_of_[place];
  TORCH_CHECK(!arrived_[place] || bucket >= sent_.size(), "Replicas: the gradient of parameter ", place, " (shape ",
              parameters_[place].sizes(),
              ") arrived again after it was sent: an operation runs a backward of its own inside of backward; "
              "use {.overlap = false}");
  window_->fold_into_sum(place, accumulate_in_);
  if (arrived_[place]) return;
  arrived_[place] = true;
  --missing_[bucket];
  while (sent_.size() < buckets_.size() && missing_[sent_.size()] == 0) send(buckets_[sent_.size()]);
}

GRADACCUM_INLINE void GradientExchange::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

/// A window without weight has none, whatever lies there.
GRADACCUM_INLINE at::Tensor GradientExchange::own(std::size_t place) const {
  return weight_ == 0 ? at::Tensor() : window_->sums()[place];
}

GRADACCUM_INLINE at::Tensor GradientExchange::own_dense(std::size_t place) const {
  const auto gradient = own(place);
  if (!gradient.defined()) return gradient;
  return gradient.layout() == at::kStrided ? gradient.detach() : gradient.to_dense();
}

GRADACCUM_INLINE std::vector<double> GradientExchange::used() const {
  std::vector<double> used;
  for (std::size_t i = 0; i < parameters_.size(); ++i) used.push_back(own(i).defined() ? 1 : 0);
  return used;
}

GRADACCUM_INLINE double GradientExchange::finish(const std::vector<double>& used_by, double weight_of_all) {
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

GRADACCUM_INLINE void GradientExchange::send(const Bucket& bucket) {
  links_->begin_exchange(this);
  auto sum = bucket.places.size() == 1 ? sent_alone(bucket.places[0], bucket) : sent_together(bucket);
  if (weight_ != 0 && weight_ != 1) sum.mul_(weight_);
  auto pending = links_->begin_sum(line_, sum.is_complex() ? at::view_as_real(sum) : sum);
  sent_.push_back({std::move(sum), std::move(pending)});
}

GRADACCUM_INLINE at::Tensor GradientExchange::sent_alone(std::size_t place, const Bucket& bucket) const {
  const auto gradient = own_dense(place);
  if (!gradient.defined()) return at::zeros(parameters_[place].sizes(), bucket.options);
  return gradient.to(bucket.options.dtype()).contiguous();  // itself, where it is so already
}

GRADACCUM_INLINE at::Tensor GradientExchange::sent_together(const Bucket& bucket) const {
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

GRADACCUM_INLINE void GradientExchange::put_back(const Bucket& bucket, const at::Tensor& sum,
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
