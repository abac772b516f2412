// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/whole_gradients.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace gradaccum::detail {

GRADACCUM_INLINE double WholeGradients::finish(const std::vector<double>& used_by, double weight_of_all) {
  const at::NoGradGuard no_grad;
  const auto unit = unit_of(weight_of_all);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    links_->wait(under_way_[i].pending, "the gradients of a window");
    if (unit != 1) under_way_[i].sum.div_(unit);
    put_back(buckets_[i], under_way_[i].sum, used_by);
  }
  links_->end_exchange(this);
  return unit;
}

GRADACCUM_INLINE void WholeGradients::send(const Bucket& bucket) {
  auto sum = bucket.places.size() == 1 ? sent_alone(bucket) : sent_together(bucket);
  auto pending = links_->begin_sum(line_, sum.is_complex() ? at::view_as_real(sum) : sum);
  under_way_.push_back({std::move(sum), std::move(pending)});
}

GRADACCUM_INLINE at::Tensor WholeGradients::sent_together(const Bucket& bucket) const {
  const auto all = at::empty({bucket.elements}, bucket.options);
  std::int64_t from = 0;
  for (auto place : bucket.places) {
    const auto& parameter = parameters_[place];
    const auto part = all.narrow(0, from, parameter.numel()).view(parameter.sizes());
    if (const auto gradient = own(place); gradient.defined())
      part.copy_(gradient);
    else
      part.zero_();
    from += parameter.numel();
  }
  times_weight(all);
  return all;
}

GRADACCUM_INLINE void WholeGradients::put_back(const Bucket& bucket, const at::Tensor& sum,
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
