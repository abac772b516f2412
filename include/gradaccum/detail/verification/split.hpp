// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/loss.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A batch and its micro-batches, whatever their types.
struct SplitBatch {
  static constexpr std::int64_t whole = -1;

  std::function<std::size_t(std::int64_t steps)> split;  ///< says into how many it has
  std::function<std::int64_t(std::size_t part)> rows;
  std::function<Loss(std::int64_t part)> loss;  ///< of a micro-batch, or of the whole batch
};

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

/// Those of a batch that is made of tensors.
template <has_rows B>
auto tied_tensors(const B& batch) {
  if constexpr (is_tensor<B>)
    return std::tie(batch);
  else if constexpr (is_data_and_target<B>)
    return std::tie(batch.data, batch.target);
  else
    return std::apply([](auto&... tensors) { return std::tie(tensors...); }, batch);
}

std::int64_t rows_of_all(const std::vector<at::Tensor>& tensors);

template <has_rows B>
std::int64_t rows_of(const B& batch) {
  if constexpr (is_vector<B>)
    return static_cast<std::int64_t>(batch.size());
  else if constexpr (narrows_itself<B>)
    return batch.rows();
  else
    return std::apply([](auto&... tensors) { return rows_of_all({tensors...}); }, tied_tensors(batch));
}

/// The rows [from, from + count).
template <has_rows B>
B narrowed(const B& batch, std::int64_t from, std::int64_t count) {
  if constexpr (is_vector<B>)
    return B(batch.begin() + from, batch.begin() + from + count);
  else if constexpr (narrows_itself<B>)
    return batch.narrow(from, count);
  else
    return std::apply([&](auto&... tensors) { return B{tensors.narrow(0, from, count)...}; }, tied_tensors(batch));
}

std::vector<std::int64_t> rows_of_parts(std::int64_t rows, std::int64_t steps);

/// Splits rows as evenly as they go: the first parts have one more.
struct SplitRows {
  template <has_rows B>
  std::vector<B> operator()(const B& batch, std::int64_t steps) const {
    std::vector<B> parts;
    std::int64_t from = 0;
    for (auto count : rows_of_parts(rows_of(batch), steps)) {
      parts.push_back(narrowed(batch, from, count));
      from += count;
    }
    return parts;
  }
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/verification/split.ipp>
#endif
