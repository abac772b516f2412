// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/on_device.hpp>

#include <cmath>
#include <cstdint>

/// What an optimizer is set to for one step, and the numbers that its kernels are given of it: on a processor by the
/// host, on a device by itself, which alone may know the factor and the count of steps.
namespace gradaccum::detail {

struct SgdSettings {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first;  ///< first: there was no momentum yet

  bool operator==(const SgdSettings&) const = default;
};

/// What a step of SGD multiplies by.
struct SgdNumbers {
  double multiplier, weight_decay, momentum;  ///< multiplier: of the gradient: deferred scale, mean and clipping
  double fresh;                               ///< 1 - dampening
  double lr;
  bool nesterov, first;  ///< first: the buffer begins as the gradient
};

GRADACCUM_ON_DEVICE inline SgdNumbers numbers_of(const SgdSettings& by, double multiplier) {
  return {multiplier, by.weight_decay, by.momentum, 1 - by.dampening, by.lr, by.nesterov, by.first};
}

struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad, decoupled;  ///< decoupled: AdamW's weight decay
  std::int64_t step;        ///< this one, counted from 1

  bool operator==(const AdamSettings&) const = default;
};

/// What a step of Adam multiplies by.
struct AdamNumbers {
  double multiplier;                    ///< of the gradient: deferred scale, mean and clipping
  double weight_decay;                  ///< added to the gradient
  double kept;                          ///< of the parameter, by decoupled weight decay
  double beta1, fresh1, beta2, fresh2;  ///< fresh: 1 - beta, exact where beta is rounded
  double step_size;                     ///< lr / bias correction of the first moment
  double correction;                    ///< 1 / sqrt(bias correction of the second moment)
  double eps;
};

GRADACCUM_ON_DEVICE inline AdamNumbers numbers_of(const AdamSettings& by, double multiplier) {
  const auto step = static_cast<double>(by.step);
  const double correction1 = 1 - std::pow(by.beta1, step), correction2 = 1 - std::pow(by.beta2, step);
  return {.multiplier = multiplier,
          .weight_decay = by.decoupled ? 0 : by.weight_decay,
          .kept = by.decoupled ? 1 - by.lr * by.weight_decay : 1,
          .beta1 = by.beta1,
          .fresh1 = 1 - by.beta1,
          .beta2 = by.beta2,
          .fresh2 = 1 - by.beta2,
          .step_size = by.lr / correction1,
          .correction = 1 / std::sqrt(correction2),
          .eps = by.eps};
}

/// What a step of Adafactor multiplies by and is bounded by.
struct AdafactorNumbers {
  double multiplier;
  double beta1, beta2, fresh2;
  double added;                    ///< to the squared gradient: eps1, or 0
  double least_mean;               ///< of a matrix's row_var: 0, or eps1
  double largest_scale;            ///< of the gradient to the update: infinity, or 1 / eps1
  double kept = 1, step_size = 0;  ///< known once both sums of squares are
};

}  // namespace gradaccum::detail
