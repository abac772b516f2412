// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/numbers.hpp>

#include <cstdint>

/// What kernels are given, of processors and of devices.
namespace gradaccum::detail {

/// Dense memory, all in the same order. State is float32 for 16-bit parameters, else of the parameter's type.
struct SgdOperand {
  SgdNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* momentum_buffer = nullptr;  ///< none without momentum
  std::uint64_t rounding_key = 0;   ///< of stochastic rounding
};
struct AdamOperand {
  AdamNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *exp_avg = nullptr, *exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  ///< of amsgrad alone
  std::uint64_t rounding_key = 0;  ///< of stochastic rounding
};

/// The same with moments of 8 bits: codes, and a scale for each block of them.
struct Adam8bitOperand {
  AdamNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  std::uint8_t *exp_avg = nullptr, *exp_avg_sq = nullptr;
  float *exp_avg_scale = nullptr, *exp_avg_sq_scale = nullptr;
  std::uint64_t rounding_key = 0;  ///< of stochastic rounding
};

/// Matrices one after another, row-major; or a vector, which has a variance. State is of the type as in Adam.
struct AdafactorOperand {
  AdafactorNumbers numbers;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void *row_var = nullptr, *col_var = nullptr, *variance = nullptr;
  void* exp_avg = nullptr;                                 ///< none without momentum
  void *row_factors = nullptr, *column_factors = nullptr;  ///< sums of squares first; `parts` of each column's
  std::int64_t matrices = 0, rows = 0, columns = 0, parts = 0;
  std::uint64_t rounding_key = 0;  ///< of stochastic rounding
};

}  // namespace gradaccum::detail
