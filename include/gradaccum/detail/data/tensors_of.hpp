// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/data/samples_of.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <vector>

namespace gradaccum::detail {

void batch_tensors() = delete;  // hides a global variable of that name: only the batch's own namespace counts

template <class B>
concept tells_its_tensors = requires(const B& batch) {  // found where the batch's class is declared
  { batch_tensors(batch) } -> std::convertible_to<std::vector<at::Tensor>>;
};
template <class B>
concept is_data_with_target = requires(const B& batch) {
  batch.data;
  batch.target;
  requires sizeof(B) == sizeof(batch.data) + sizeof(batch.target);  // and nothing else
};

/// Calls `visit(tensor)` by reference for each tensor of a batch, in the order of its members.
template <class T>
void for_each_of_batch(T& value, auto&& visit) {
  using Value = std::remove_const_t<T>;
  if constexpr (std::derived_from<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (maps_names<Value>) {
    for (auto& [name, part] : value) for_each_of_batch(part, visit);
  } else if constexpr (std::ranges::forward_range<T> && !is_text<Value>) {
    for (auto& part : value) for_each_of_batch(part, visit);
  } else if constexpr (is_data_with_target<Value>) {
    for_each_of_batch(value.data, visit);
    for_each_of_batch(value.target, visit);
  } else {
    static_assert(
        is_tuple<Value>,
        "a batch must consist of tensors: one, a tuple, a range or a map of them, or .data and .target and nothing "
        "else; for a class of your own declare std::vector<at::Tensor> batch_tensors(const Batch&) beside it");
    if constexpr (is_tuple<Value>) std::apply([&](auto&... parts) { (for_each_of_batch(parts, visit), ...); }, value);
  }
}

/// The tensors of a batch, by `batch_tensors(batch)` if there is one.
template <class Batch>
std::vector<at::Tensor> tensors_of(const Batch& batch) {
  if constexpr (tells_its_tensors<Batch>) {
    return batch_tensors(batch);
  } else {
    std::vector<at::Tensor> all;
    for_each_of_batch(batch, [&all](const at::Tensor& tensor) { all.push_back(tensor); });
    return all;
  }
}

}  // namespace gradaccum::detail
