// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

namespace gradaccum::detail {

/// Gradients that are sent together, by their places in the list of parameters.
struct Bucket {
  std::vector<std::size_t> places = {};
  at::TensorOptions options = {};  ///< as they are sent
  std::int64_t elements = 0;
};

constexpr std::int64_t alone_from = std::int64_t{1} << 20;  ///< bytes: copying costs more than another message

/// A window's gradients in buckets of at most so many bytes, each of one dtype and device; a large one goes alone, and
/// is not copied. Backward brings the last parameters first, and so do the buckets. The same on all ranks: it depends
/// on the parameters alone, and not on which of them have gradients.
///
/// float16 is sent as float32, in which the sum over ranks does not overflow.
inline std::vector<Bucket> buckets_of(const std::vector<at::Tensor>& parameters,
                                      std::optional<c10::ScalarType> accumulate_in, std::int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  std::map<std::tuple<c10::ScalarType, c10::DeviceType, c10::DeviceIndex>, std::size_t>
      open;  // that others of their kind may join
  for (std::size_t place = parameters.size(); place-- > 0;) {
    const auto& parameter = parameters[place];
    if (!parameter.requires_grad()) continue;
    auto dtype = parameter.scalar_type();
    if (accumulate_in && c10::elementSize(dtype) < c10::elementSize(*accumulate_in)) dtype = *accumulate_in;
    if (dtype == c10::kHalf) dtype = c10::kFloat;
    const auto elements = parameter.numel();
    const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
    const auto options = at::TensorOptions(dtype).device(parameter.device());
    const auto kind = std::tuple(dtype, parameter.device().type(), parameter.device().index());
    if (elements * size >= std::min(alone_from, bucket_bytes)) {
      buckets.push_back({.places = {place}, .options = options, .elements = elements});
      continue;
    }
    const auto found = open.find(kind);
    if (found == open.end() || (buckets[found->second].elements + elements) * size > bucket_bytes) {
      open[kind] = buckets.size();
      buckets.push_back({.options = options});
    }
    auto& bucket = buckets[open[kind]];
    bucket.places.push_back(place);
    bucket.elements += elements;
  }
  return buckets;
}

}  // namespace gradaccum::detail
