// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstddef>
#include <cstdint>

namespace gradaccum::detail {

/// The CRC-32C of iSCSI and of TensorFlow's records: another polynomial than zlib's, Castagnoli's. A byte a step.
std::uint32_t crc32c(const void* data, std::size_t size);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/kernels/crc32c.ipp>
#endif
