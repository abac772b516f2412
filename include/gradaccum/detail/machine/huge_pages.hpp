// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/machine/comparison.hpp>

#include <optional>
#include <string>

namespace gradaccum::detail {

/// Who gets memory in pages of 2 MB in place of 4 KB: nobody, who asks for it, all.
enum class HugePages { unknown, never, on_request, always };

/// As /sys/kernel/mm/transparent_hugepage/enabled says: `always [madvise] never` is on request.
HugePages huge_pages_of(const std::string& enabled);

/// LibTorch or glibc was told to ask for them, by these variables of the environment.
bool requests_huge_pages(const char* libtorch, const char* glibc);

/// The first touch of new memory, as it comes and in huge pages; none where they cannot be asked for.
std::optional<Comparison> first_touch();

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/machine/huge_pages.ipp>
#endif
