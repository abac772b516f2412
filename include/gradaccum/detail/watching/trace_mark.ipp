// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/trace_mark.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/record_function.h>

#include <string_view>

namespace gradaccum::detail {

GRADACCUM_INLINE TraceMark::TraceMark(const std::string& name)
    : record_(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE)) {
  if (record_->isActive()) record_->before(std::string_view(name));
}

GRADACCUM_INLINE TraceMark::~TraceMark() = default;

}  // namespace gradaccum::detail
