// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/numbers.hpp>

#include <cstdint>

/// The arguments of kernels, for processors and devices.
namespace gradaccum::detail {

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
