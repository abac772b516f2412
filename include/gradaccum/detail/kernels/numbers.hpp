// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include <gradaccum/detail/kernels/on_device.hpp>

/// The settings of an optimizer for one step, and the numbers that its kernels need. The host computes the numbers for
/// CPU kernels; a device computes them itself, since only it may know the multiplier and the step count.
namespace gradaccum::detail {

/// Keeps a compiler from fusing a product, which is rounded here, with a sum: results then differ between processors.
template <class Number>
GRADACCUM_ON_DEVICE void keep_rounded(Number& product) {
#if defined(__CUDA_ARCH__) || !(defined(__GNUC__) || defined(__clang__))
  static_cast<void>(product);
#elif defined(__x86_64__)
  __asm__("" : "+x"(product));
#elif defined(__aarch64__)
  __asm__("" : "+w"(product));
#else
  __asm__("" : "+m"(product));
#endif
}

/// Returns 1 - a b, rounded twice.
GRADACCUM_ON_DEVICE inline double one_minus_product(double a, double b) {
  double product = a * b;
  keep_rounded(product);
  return 1 - product;
}

struct SgdSettings {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, first;  ///< first: there is no momentum buffer yet

  bool operator==(const SgdSettings&) const = default;
};

/// The factors in a step of SGD.
struct SgdNumbers {
  double multiplier, weight_decay, momentum;  ///< multiplier: for the gradient: deferred scale, mean and clipping
  double fresh;                               ///< 1 - dampening
  double lr;
  bool nesterov, first;  ///< first: the buffer starts as the gradient
};

GRADACCUM_ON_DEVICE inline SgdNumbers numbers_of(const SgdSettings& by, double multiplier) {
  return {multiplier, by.weight_decay, by.momentum, 1 - by.dampening, by.lr, by.nesterov, by.first};
}

struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool amsgrad, decoupled;  ///< decoupled: AdamW's weight decay
  std::int64_t step;        ///< the current step, counted from 1

  bool operator==(const AdamSettings&) const = default;
};

/// The factors in a step of Adam.
struct AdamNumbers {
  double multiplier;                    ///< for the gradient: deferred scale, mean and clipping
  double weight_decay;                  ///< added to the gradient
  double kept;                          ///< the parameter's factor in decoupled weight decay
  double beta1, fresh1, beta2, fresh2;  ///< fresh: 1 - beta, exact even if beta is rounded
  double step_size;                     ///< lr / bias correction of the first moment
  double correction;                    ///< 1 / sqrt(bias correction of the second moment)
  double eps;
};

GRADACCUM_ON_DEVICE inline AdamNumbers numbers_of(const AdamSettings& by, double multiplier) {
  const auto step = static_cast<double>(by.step);
  const double correction1 = 1 - std::pow(by.beta1, step), correction2 = 1 - std::pow(by.beta2, step);
  return {.multiplier = multiplier,
          .weight_decay = by.decoupled ? 0 : by.weight_decay,
          .kept = by.decoupled ? one_minus_product(by.lr, by.weight_decay) : 1,
          .beta1 = by.beta1,
          .fresh1 = 1 - by.beta1,
          .beta2 = by.beta2,
          .fresh2 = 1 - by.beta2,
          .step_size = by.lr / correction1,
          .correction = 1 / std::sqrt(correction2),
          .eps = by.eps};
}

struct AdafactorSettings {
  double lr, step_size;  ///< step_size: lr or its replacement, before scaling
  double fresh2;         ///< 1 - beta2 in this step
  double eps1, eps2, d, weight_decay, beta1;
  bool scale_parameter, pytorch;

  /// The inputs of `step_size` and `fresh2`, for a device that counts the steps itself, from 1.
  double step = 1, beta2_decay = 0;
  bool relative_step = false, warmup_init = false;

  bool operator==(const AdafactorSettings&) const = default;
};

/// Sets the members that depend on the step count.
GRADACCUM_ON_DEVICE inline AdafactorSettings at_step(AdafactorSettings by, double step) {
  const double most = by.warmup_init ? 1e-6 * step : by.lr, relative = 1 / std::sqrt(step);
  by.step = step;
  by.fresh2 = std::pow(step, by.beta2_decay);
  by.step_size = !by.relative_step ? by.lr : relative < most ? relative : most;
  return by;
}

/// The factors and bounds in a step of Adafactor.
struct AdafactorNumbers {
  double multiplier;
  double beta1, beta2, fresh2;
  double added;                    ///< to the squared gradient: eps1 or 0
  double least_mean;               ///< lower bound of a matrix's mean row_var: 0 or eps1
  double largest_scale;            ///< upper bound of update / gradient: infinity or 1 / eps1
  double kept = 1, step_size = 0;  ///< set once both sums of squares are known
};

GRADACCUM_ON_DEVICE inline AdafactorNumbers numbers_of(const AdafactorSettings& by, double multiplier) {
  return {.multiplier = multiplier,
          .beta1 = by.beta1,
          .beta2 = 1 - by.fresh2,
          .fresh2 = by.fresh2,
          .added = by.pytorch ? 0 : by.eps1,
          .least_mean = by.pytorch ? by.eps1 : 0,
          .largest_scale = by.pytorch ? 1 / by.eps1 : std::numeric_limits<double>::infinity()};
}

/// Sums over a tensor: its elements, the squares of the parameter, and the squares of its update before scaling.
struct AdafactorSums {
  double elements, parameter_squares, update_squares;
};

/// Returns the larger one; NaN stays NaN.
GRADACCUM_ON_DEVICE inline double at_least(double least, double x) { return x < least ? least : x; }

GRADACCUM_ON_DEVICE inline void set_step_size(AdafactorNumbers& numbers, const AdafactorSettings& by,
                                              const AdafactorSums& of) {
  const double rms = std::sqrt(of.parameter_squares / of.elements);
  const double update_rms = std::sqrt(of.update_squares / of.elements);
  const double size = by.step_size * (by.scale_parameter ? at_least(by.eps2, rms) : 1);
  numbers.kept = one_minus_product(by.weight_decay, by.pytorch ? by.lr : size);
  numbers.step_size = size / at_least(1, update_rms / by.d);
}

// The arguments of kernels, for processors and devices.

/// Dense arrays of the same element order. State is float32 for 16-bit parameters, else of the parameter's type.
struct SgdOperand {
  SgdNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* momentum_buffer = nullptr;  ///< null without momentum
  std::uint64_t rounding_key = 0;   ///< for stochastic rounding
};
struct AdamOperand {
  AdamNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *exp_avg = nullptr, *exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  ///< only with amsgrad, else null
  std::uint64_t rounding_key = 0;  ///< for stochastic rounding
};

/// Adam's operand with 8-bit moments: codes, and one scale per block.
struct Adam8bitOperand {
  AdamNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  std::uint8_t *exp_avg = nullptr, *exp_avg_sq = nullptr;
  float *exp_avg_scale = nullptr, *exp_avg_sq_scale = nullptr;
  std::uint64_t rounding_key = 0;  ///< for stochastic rounding
};

/// Consecutive row-major matrices, or a vector, which has a `variance` instead. State has the type of Adam's.
struct AdafactorOperand {
  AdafactorNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *row_var = nullptr, *col_var = nullptr, *variance = nullptr;
  void* exp_avg = nullptr;                                 ///< null without momentum
  void *row_factors = nullptr, *column_factors = nullptr;  ///< initially sums of squares; `parts` for each column
  std::int64_t matrices = 0, rows = 0, columns = 0, parts = 0;
  std::uint64_t rounding_key = 0;  ///< for stochastic rounding
};

}  // namespace gradaccum::detail

#undef GRADACCUM_ON_DEVICE
#undef GRADACCUM_UNROLL
