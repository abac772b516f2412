// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

namespace gradaccum::detail {

template <class T>
concept is_tensor = std::same_as<std::remove_cvref_t<T>, at::Tensor>;

/// `data::SequenceBatch` is one.
template <class B>
concept narrows_itself = !is_tensor<B> && requires(const B& batch, std::int64_t i) {
  { batch.rows() } -> std::convertible_to<std::int64_t>;
  { batch.narrow(i, i) } -> std::convertible_to<B>;
};

/// Two tensors and nothing else: other members would not be split.
template <class B>
concept is_data_and_target = requires(const B& batch) {
  requires is_tensor<decltype(batch.data)>;
  requires is_tensor<decltype(batch.target)>;
  B{batch.data, batch.target};
}
&&sizeof(B) == 2 * sizeof(at::Tensor);

template <class B>
constexpr bool holds_tensors_only = false;
template <class... T>
constexpr bool holds_tensors_only<std::tuple<T...>> = sizeof...(T) > 0 && (is_tensor<T> && ...);
template <class A, class B>
constexpr bool holds_tensors_only<std::pair<A, B>> = is_tensor<A>&& is_tensor<B>;

template <class B>
constexpr bool is_vector = false;
template <class T>
constexpr bool is_vector<std::vector<T>> = true;

template <class B>
concept has_rows = is_tensor<B> || narrows_itself<B> || is_data_and_target<B> || holds_tensors_only<B> || is_vector<B>;

template <class... Tensors>
std::int64_t rows_of_all(const at::Tensor& first, const Tensors&... others) {
  const bool all_have_rows = first.defined() && first.dim() > 0 && ((others.defined() && others.dim() > 0) && ...);
  TORCH_CHECK(all_have_rows, "verify_accumulation: every tensor of a batch must have a first dimension, its rows");
  TORCH_CHECK(((others.size(0) == first.size(0)) && ...),
              "verify_accumulation: the tensors of a batch must have as many rows each");
  return first.size(0);
}

template <has_rows B>
std::int64_t rows_of(const B& batch) {
  if constexpr (is_vector<B>)
    return static_cast<std::int64_t>(batch.size());
  else if constexpr (is_tensor<B>)
    return rows_of_all(batch);
  else if constexpr (narrows_itself<B>)
    return batch.rows();
  else if constexpr (is_data_and_target<B>)
    return rows_of_all(batch.data, batch.target);
  else
    return std::apply([](auto&... tensors) { return rows_of_all(tensors...); }, batch);
}

/// The rows [from, from + count).
template <has_rows B>
B narrowed(const B& batch, std::int64_t from, std::int64_t count) {
  if constexpr (is_vector<B>)
    return B(batch.begin() + from, batch.begin() + from + count);
  else if constexpr (is_tensor<B>)
    return batch.narrow(0, from, count);
  else if constexpr (narrows_itself<B>)
    return batch.narrow(from, count);
  else if constexpr (is_data_and_target<B>)
    return B{batch.data.narrow(0, from, count), batch.target.narrow(0, from, count)};
  else
    return std::apply([&](auto&... tensors) { return B{tensors.narrow(0, from, count)...}; }, batch);
}

/// Splits rows as evenly as they go: the first parts have one more.
struct SplitRows {
  template <has_rows B>
  std::vector<B> operator()(const B& batch, std::int64_t steps) const {
    const auto rows = rows_of(batch);
    TORCH_CHECK(rows >= steps, "verify_accumulation: the batch must have a row for each of ", steps, " steps, got ",
                rows);
    std::vector<B> parts;
    for (std::int64_t i = 0, from = 0; i < steps; ++i) {
      const auto count = rows / steps + (i < rows % steps);
      parts.push_back(narrowed(batch, from, count));
      from += count;
    }
    return parts;
  }
};

}  // namespace gradaccum::detail
