// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/element_loop.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace gradaccum::detail {

/// Uses a TensorIterator over one byte per task: at::parallel_for is serial in programs built without -fopenmp.
GRADACCUM_INLINE void parallel_for(std::int64_t count, c10::function_ref<void(std::int64_t)> body) {
  const auto tasks = at::empty({count}, at::TensorOptions(at::kByte));
  const auto* const first = static_cast<const char*>(tasks.const_data_ptr());
  auto iterator = at::TensorIteratorConfig()
                      .check_all_same_dtype(false)
                      .declare_static_dtype_and_device(at::kByte, at::kCPU)
                      .resize_outputs(false)
                      .declare_static_shape(tasks.sizes())
                      .add_output(tasks)
                      .build();
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t inner, std::int64_t outer) {
        for (std::int64_t j = 0; j < outer; ++j)
          for (std::int64_t i = 0; i < inner; ++i) body(data[0] + j * strides[1] + i * strides[0] - first);
      },
      /*grain_size=*/1);
}

}  // namespace gradaccum::detail
