// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/samples_of.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

void slice() = delete;  // hides a global variable of that name: only the batch's own namespace counts

template <class T>
concept is_tensor = std::same_as<std::remove_cv_t<T>, at::Tensor>;

template <class B>
concept slices_itself = !is_tensor<B> && requires(const B& batch, std::int64_t i) {
  { slice(batch, i, i) } -> std::convertible_to<B>;  // found where the batch's class is declared
};

/// Satisfied by `data::SequenceBatch`.
template <class B>
concept narrows_itself = !is_tensor<B> && requires(const B& batch, std::int64_t i) {
  { batch.rows() } -> std::convertible_to<std::int64_t>;
  { batch.narrow(i, i) } -> std::convertible_to<B>;
};

/// Two tensors and nothing else, since other members would not be split.
template <class B>
concept is_data_and_target = requires(const B& batch) {
  requires is_tensor<std::remove_cvref_t<decltype(batch.data)>>;
  requires is_tensor<std::remove_cvref_t<decltype(batch.target)>>;
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
constexpr bool is_vector<std::vector<T>> = std::copyable<T>;

template <class B>
concept has_rows = slices_itself<B> || is_tensor<B> || narrows_itself<B> || is_data_and_target<B> ||
    holds_tensors_only<B> || is_vector<B>;

/// References to the tensors of a batch that consists of tensors.
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

/// The number of rows that can be split. For a class with its own `slice`, the number of samples.
template <has_rows B>
std::int64_t rows_of(const B& batch) {
  if constexpr (slices_itself<B>)
    return samples_of(batch);
  else if constexpr (is_vector<B>)
    return static_cast<std::int64_t>(batch.size());
  else if constexpr (narrows_itself<B>)
    return batch.rows();
  else
    return std::apply([](auto&... tensors) { return rows_of_all({tensors...}); }, tied_tensors(batch));
}

/// Returns the rows [from, from + count).
template <has_rows B>
B narrowed(const B& batch, std::int64_t from, std::int64_t count) {
  if constexpr (slices_itself<B>)
    return slice(batch, from, from + count);
  else if constexpr (is_vector<B>)
    return B(batch.begin() + from, batch.begin() + from + count);
  else if constexpr (narrows_itself<B>)
    return batch.narrow(from, count);
  else
    return std::apply([&](auto&... tensors) { return B{tensors.narrow(0, from, count)...}; }, tied_tensors(batch));
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/rows.ipp>
#endif
