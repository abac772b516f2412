// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/machine/comparison.hpp>
#include <gradaccum/detail/machine/machine_facts.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace gradaccum::detail {

/// What was measured, in seconds of one thread; none where there is nothing to compare.
struct MachineTimes {
  static constexpr std::int64_t product_size = 512;          ///< rows and columns of the matrices of float32
  static constexpr std::int64_t bfloat16_size = 256;         ///< and of those: slow ones are very slow
  static constexpr std::int64_t denormal_numbers = 1 << 16;  ///< that are multiplied
  static constexpr std::size_t filled_bytes = 72 << 20;      ///< of new memory
  static constexpr std::int64_t device_rows = 256;           ///< of what a CUDA device has met before

  std::optional<Comparison> products = {};         ///< of float32 matrices: by LibTorch, by oneDNN
  std::optional<Comparison> freed_memory = {};     ///< filling new memory, and kept memory
  std::optional<Comparison> threads = {};          ///< a product: with the threads of LibTorch, with as many as CPUs
  std::optional<Comparison> bfloat16 = {};         ///< products: in bfloat16, in float32
  std::optional<Comparison> denormals = {};        ///< multiplying numbers: denormal ones, others
  std::optional<Comparison> huge_pages = {};       ///< the first touch of memory: as it comes, in huge pages
  std::optional<Comparison> attention = {};        ///< over 64 tokens in bfloat16, there and back: by flash, without
  std::optional<Comparison> device_products = {};  ///< on a CUDA device: of a shape that is new, of one that was met
  std::optional<Comparison> device_attention =
      {};  ///< on a CUDA device: over a length that is new, over one that was met
};

/// Measures for about a second. All settings of the process are afterwards what they were.
MachineTimes machine_times(const MachineFacts& facts);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/machine_times.ipp>
#endif
