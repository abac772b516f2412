// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

void batch_size() = delete;  // hides a global variable of that name: only the batch's own namespace counts

template <class B>
concept tells_its_size = requires(const B& batch) {
  { batch_size(batch) } -> std::convertible_to<std::int64_t>;  // found where the batch's class is declared
};
template <class B>
concept has_data = requires(const B& batch) {
  batch.data;
};
template <class B>
concept maps_names = requires(const B& batch) {
  typename B::mapped_type;
  batch.begin()->second;
};
template <class B>
concept is_tuple = requires {
  std::tuple_size<B>::value;
};
template <class B>
concept is_sized = requires(const B& batch) {
  { batch.size() } -> std::convertible_to<std::int64_t>;
};
/// A tuple that begins with a tensor, such as inputs and targets; not an array of numbers.
template <class B>
concept is_tuple_of_tensors =
    is_tuple<B> && std::derived_from<std::remove_cvref_t<decltype(std::get<0>(std::declval<B&>()))>, at::Tensor>;
template <class B>
concept is_text = std::convertible_to<const B&, std::string_view>;

/// The number of samples in a batch: `batch_size(batch)` if there is one; the rows of a tensor, of `batch.data`, of a
/// tuple's first element or of a map's first entry; else its `size()`, or 1 for text; else 1.
template <class Batch>
std::int64_t samples_of(const Batch& batch) {
  if constexpr (tells_its_size<Batch>)
    return static_cast<std::int64_t>(batch_size(batch));
  else if constexpr (is_text<Batch>)
    return 1;
  else if constexpr (std::derived_from<Batch, at::Tensor>)
    return batch.defined() && batch.dim() > 0 ? batch.size(0) : 1;
  else if constexpr (has_data<Batch> && !is_sized<Batch>)
    return samples_of(batch.data);
  else if constexpr (maps_names<Batch>)
    return batch.empty() ? 0 : samples_of(batch.begin()->second);
  else if constexpr (is_tuple_of_tensors<Batch> || (is_tuple<Batch> && !is_sized<Batch>))
    return samples_of(std::get<0>(batch));
  else if constexpr (is_sized<Batch>)
    return static_cast<std::int64_t>(batch.size());
  else
    return 1;
}

/// The number of batches in an epoch, if the range has a `size()`.
template <class Batches>
std::optional<std::int64_t> batches_of(const Batches& batches) {
  if constexpr (is_sized<Batches>)
    return static_cast<std::int64_t>(batches.size());
  else
    return std::nullopt;
}

}  // namespace gradaccum::detail
