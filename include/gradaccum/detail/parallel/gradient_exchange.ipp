// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/gradient_exchange.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
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
      open;  // buckets with space left
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
      bucket_of_(parameters_.size()) {
  for (std::size_t i = 0; i < buckets_.size(); ++i)
    for (auto place : buckets_[i].places) bucket_of_[place] = i;
  begin_round();
}

GRADACCUM_INLINE void GradientExchange::begin_round() {
  const std::lock_guard lock(mutex_);
  missing_.clear();
  for (auto& bucket : buckets_) missing_.push_back(bucket.places.size());
  arrived_.assign(parameters_.size(), false);
  sent_ = 0;
  ended_ = false;
}

GRADACCUM_INLINE void GradientExchange::arrive(std::size_t place) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  const at::NoGradGuard no_grad;
  TORCH_CHECK(bucket_of_[place], "Replicas: parameter ", place, " (shape ", parameters_[place].sizes(),
              ") was frozen when this window's gradients began to be sent; set requires_grad between windows");
  const auto bucket = *bucket_of_[place];
  TORCH_CHECK(!arrived_[place] || bucket >= sent_, "Replicas: the gradient of parameter ", place, " (shape ",
              parameters_[place].sizes(),
              ") arrived again after it was sent: an operation runs a backward of its own inside of backward; "
              "use {.overlap = false}");
  window_->fold_into_sum(place, accumulate_in_);
  if (arrived_[place]) return;
  arrived_[place] = true;
  --missing_[bucket];
  while (sent_ < buckets_.size() && missing_[sent_] == 0) send_next();
}

GRADACCUM_INLINE void GradientExchange::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
}

GRADACCUM_INLINE void GradientExchange::end_round() {
  const at::NoGradGuard no_grad;
  while (sent_ < buckets_.size()) send_next();
}

GRADACCUM_INLINE void GradientExchange::send_next() {
  links_->begin_exchange(this);
  begun_ = true;
  send(buckets_[sent_++]);
}

GRADACCUM_INLINE at::Tensor GradientExchange::own(std::size_t place) const {
  if (!has_own(place)) return {};
  const auto& gradient = window_->sums()[place];
  return (gradient.layout() == at::kStrided ? gradient.detach() : gradient.to_dense()).resolve_conj().resolve_neg();
}

GRADACCUM_INLINE bool GradientExchange::has_unsent() const {
  for (auto& bucket : buckets_)
    for (auto place : bucket.places)
      if (has_own(place)) return true;
  return false;
}

GRADACCUM_INLINE std::vector<double> GradientExchange::used() const {
  std::vector<double> used;
  for (std::size_t place = 0; place < parameters_.size(); ++place) used.push_back(has_own(place) ? 1 : 0);
  return used;
}

GRADACCUM_INLINE at::Tensor GradientExchange::sent_alone(const Bucket& bucket) const {
  const auto place = bucket.places[0];
  const auto gradient = own(place);
  if (!gradient.defined()) return at::zeros(parameters_[place].sizes(), bucket.options);
  const auto sent = gradient.to(bucket.options.dtype()).contiguous();
  times_weight(sent);
  return sent;
}

GRADACCUM_INLINE void GradientExchange::times_weight(const at::Tensor& sum) const {
  if (const auto weight = window_->first_weight(); weight != 0 && weight != 1) sum.mul_(weight);
}

GRADACCUM_INLINE double GradientExchange::unit_of(double weight_of_all) const {
  const bool has_half = std::any_of(parameters_.begin(), parameters_.end(),
                                    [](auto& parameter) { return parameter.scalar_type() == at::kHalf; });
  return has_half && weight_of_all > 0 ? weight_of_all : 1;
}

}  // namespace gradaccum::detail
