// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/parallel/gradient_exchange.hpp>

#include <vector>

namespace gradaccum::detail {

/// All-reduces gradients: each rank gets the sums of all.
///
/// A gradient that fills its bucket alone is summed in place; others are copied together, and back.
class WholeGradients final : public GradientExchange {
 public:
  using GradientExchange::GradientExchange;

  GRADACCUM_INLINE double finish(const std::vector<double>& used_by, double weight_of_all) override;

 private:
  struct Sent {
    at::Tensor sum;
    Links::Pending pending;
  };

  GRADACCUM_INLINE void send(const Bucket& bucket) override;
  at::Tensor sent_together(const Bucket& bucket) const;
  void put_back(const Bucket& bucket, const at::Tensor& sum, const std::vector<double>& used_by);

  std::vector<Sent> under_way_;  // by bucket
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/parallel/whole_gradients.ipp>
#endif
