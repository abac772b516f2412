// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

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
template <class B>
concept is_collection = maps_names<B> ||(std::ranges::forward_range<B> && !is_text<B>);

/// Calls `visit(part)` by reference for the values of a map, the elements of a range, or the members of a tuple.
template <class B>
requires(is_collection<B> || is_tuple<B>) void for_each_part(B& batch, auto&& visit) {
  if constexpr (maps_names<B>) {
    for (auto& [name, part] : batch) visit(part);
  } else if constexpr (is_collection<B>) {
    for (auto& part : batch) visit(part);
  } else {
    std::apply([&](auto&... parts) { (visit(parts), ...); }, batch);
  }
}

/// Returns the number of samples in a batch: `batch_size(batch)` if there is one; the rows of a tensor, of
/// `batch.data`, of a tuple's first element or of a map's first entry; else its `size()`, or 1 for text; else 1.
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

/// Returns the number of batches in an epoch, if the range has a `size()`.
template <class Batches>
std::optional<std::int64_t> batches_of(const Batches& batches) {
  if constexpr (is_sized<Batches>)
    return static_cast<std::int64_t>(batches.size());
  else
    return std::nullopt;
}

/// Describes a tensor by dtype, shape and a checksum of its values: `Float [64, 784] #1b2c3d4e`.
std::string fingerprint_of(const at::Tensor& tensor);

template <class T>
void add_fingerprint(std::string& text, const T& value) {
  if constexpr (std::derived_from<T, at::Tensor>) {
    text += fingerprint_of(static_cast<const at::Tensor&>(value));
  } else if constexpr (has_data<T> && !is_collection<const T>) {
    add_fingerprint(text, value.data);
    if constexpr (requires { value.target; }) add_fingerprint(text += ", ", value.target);
  } else if constexpr (is_collection<const T> || is_tuple<T>) {
    for_each_part(value, [&text](const auto& part) {
      add_fingerprint(text, part);
      text += "; ";
    });
  }
}

/// Returns a text that identifies a batch by the contents of its tensors; empty for a type without tensors.
template <class T>
std::string fingerprint_of(const T& value) {
  std::string text;
  add_fingerprint(text, value);
  return text;
}

void batch_tensors() = delete;  // hides a global variable of that name: only the batch's own namespace counts

template <class B>
concept tells_its_tensors = requires(const B& batch) {  // found where the batch's class is declared
  { batch_tensors(batch) } -> std::convertible_to<std::vector<at::Tensor>>;
};
template <class B>
concept is_data_alone = requires(const B& batch) {
  requires sizeof(B) == sizeof(batch.data);
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
  } else if constexpr (is_data_with_target<Value> && !is_collection<T>) {
    for_each_of_batch(value.data, visit);
    for_each_of_batch(value.target, visit);
  } else {
    static_assert(
        is_collection<T> || is_tuple<Value>,
        "a batch must consist of tensors: one, a tuple, a range or a map of them, or .data and .target and nothing "
        "else; for a class of your own declare std::vector<at::Tensor> batch_tensors(const Batch&) beside it");
    if constexpr (is_collection<T> || is_tuple<Value>)
      for_each_part(value, [&visit](auto& part) { for_each_of_batch(part, visit); });
  }
}

/// Returns the tensors of which a batch consists.
template <class Batch>
std::vector<at::Tensor> parts_of(const Batch& batch) {
  std::vector<at::Tensor> all;
  for_each_of_batch(batch, [&all](const at::Tensor& tensor) { all.push_back(tensor); });
  return all;
}

/// Returns the tensors of a batch, by `batch_tensors(batch)` if there is one.
template <class Batch>
std::vector<at::Tensor> tensors_of(const Batch& batch) {
  if constexpr (tells_its_tensors<Batch>)
    return batch_tensors(batch);
  else
    return parts_of(batch);
}

void slice() = delete;  // hides a global variable of that name: only the batch's own namespace counts

template <class B>
concept slices_itself = !std::same_as<B, at::Tensor> && requires(const B& batch, std::int64_t i) {
  { slice(batch, i, i) } -> std::convertible_to<B>;  // found where the batch's class is declared
};

/// Two tensors and nothing else, since other members would not be split.
template <class B>
concept is_data_and_target = is_data_with_target<B> && std::copyable<B> && !is_collection<B> && requires(B & batch) {
  requires std::same_as<decltype(batch.data), at::Tensor>;
  requires std::same_as<decltype(batch.target), at::Tensor>;
};

template <class B>
constexpr bool holds_tensors_only = std::same_as<B, at::Tensor> || is_data_and_target<B>;
template <class... T>
constexpr bool holds_tensors_only<std::tuple<T...>> = sizeof...(T) > 0 && (std::same_as<T, at::Tensor> && ...);
template <>
inline constexpr bool holds_tensors_only<std::pair<at::Tensor, at::Tensor>> = true;
template <>
inline constexpr bool holds_tensors_only<std::map<std::string, at::Tensor>> = true;

template <class B>
constexpr bool is_vector = false;
template <class T>
constexpr bool is_vector<std::vector<T>> = std::copyable<T>;

template <class B>
concept has_rows = slices_itself<B> || holds_tensors_only<B> || is_vector<B>;

std::int64_t rows_of_all(const std::vector<at::Tensor>& tensors);

/// Returns the number of rows that can be split. For a class with its own `slice`, the number of samples.
template <has_rows B>
std::int64_t rows_of(const B& batch) {
  if constexpr (slices_itself<B>)
    return samples_of(batch);
  else if constexpr (is_vector<B>)
    return static_cast<std::int64_t>(batch.size());
  else
    return rows_of_all(parts_of(batch));
}

/// Returns the rows [from, from + count).
template <has_rows B>
B narrowed(const B& batch, std::int64_t from, std::int64_t count) {
  if constexpr (slices_itself<B>) {
    return slice(batch, from, from + count);
  } else if constexpr (is_vector<B>) {
    return B(batch.begin() + from, batch.begin() + from + count);
  } else {
    B rows = batch;
    for_each_of_batch(rows, [&](at::Tensor& tensor) { tensor = tensor.narrow(0, from, count); });
    return rows;
  }
}

/// Describes a tensor as `Float [64, 784]`, with its device unless CPU, and its strides unless contiguous.
std::string layout_text(const at::Tensor& tensor);
/// Describes several tensors, separated by commas. With `any_rows`, the first dimension of each is `*`.
std::string layout_text(const std::vector<at::Tensor>& tensors, bool any_rows = false);

/// Sequences of different lengths. Any of them can be padded to the longest of these and joined to one tensor.
class PaddedSequences {
 public:
  /// Pads lengths to a multiple of `multiple`, >= 1. `what` names the sequences in error messages. `padding_option`
  /// names the option to change if the padding does not fit the dtype.
  PaddedSequences(const char* what, const char* padding_option, std::vector<at::Tensor> sequences,
                  const at::Scalar& padding, std::int64_t multiple);

  std::int64_t size() const { return static_cast<std::int64_t>(sequences_.size()); }
  std::int64_t length(std::int64_t i) const { return lengths_[static_cast<std::size_t>(i)]; }

  /// Returns the padded length of a batch whose longest sequence is this one.
  std::int64_t padded_length(std::int64_t i) const { return (length(i) + multiple_ - 1) / multiple_ * multiple_; }

  /// Returns the lengths of sequences: int64 [n], on the CPU.
  at::Tensor lengths(const std::vector<std::int64_t>& rows) const;
  /// Returns sequences as one tensor: [n, longest padded length, …]. Takes two operations for any number of sequences.
  at::Tensor padded(const std::vector<std::int64_t>& rows) const;

 private:
  std::vector<at::Tensor> sequences_;
  std::vector<std::int64_t> lengths_;
  at::Tensor padding_;  // one element of a sequence: [1, …]
  std::int64_t multiple_;
};

/// Returns the tensor on `device`. A copy from the host to CUDA uses pinned memory, and does not synchronize.
at::Tensor brought_to(c10::Device device, const at::Tensor& tensor);

[[noreturn]] void cannot_be_brought(const std::type_info& type);

template <class B>
concept goes_to_device = requires(const B& batch, c10::Device device) {
  { batch.to(device) } -> std::convertible_to<B>;
};

/// Moves the tensors of a batch to a device, by `batch.to(device)` if there is one.
template <class B>
void bring_to(c10::Device device, B& batch) {
  if constexpr (std::same_as<B, at::Tensor>) {
    batch = brought_to(device, batch);
  } else if constexpr (goes_to_device<B>) {
    batch = batch.to(device);
  } else if constexpr (!is_collection<B> && (is_data_alone<B> || is_data_with_target<B>)) {
    bring_to(device, batch.data);
    if constexpr (is_data_with_target<B>) bring_to(device, batch.target);
  } else if constexpr (is_collection<B> || is_tuple<B>) {
    for_each_part(batch, [device](auto& part) { bring_to(device, part); });
  } else if constexpr (!std::is_arithmetic_v<B> && !std::is_enum_v<B> && !is_text<B>) {
    cannot_be_brought(typeid(B));
  }
}

/// The properties of a batch's rows on which their memory depends.
struct RowKind {
  std::string form = {};                 ///< dtypes and numbers of dimensions
  std::vector<std::int64_t> sizes = {};  ///< sizes of a row, one tensor after the other
  std::int64_t elements = 0;             ///< elements per row
  std::string text = {};                 ///< description: `Float [*, 784], Long [*]`

  /// Returns true if rows of this kind take at least the memory of rows of `other`.
  bool covers(const RowKind& other) const;
  bool operator==(const RowKind& other) const { return form == other.form && sizes == other.sizes; }
};

RowKind kind_of(const std::vector<at::Tensor>& tensors, std::int64_t rows);

/// Returns the kind of a batch's rows. A vector of samples, and a class with unknown tensors, have a single kind.
template <has_rows B>
RowKind kind_of_rows(const B& batch) {
  if constexpr (tells_its_tensors<B> || holds_tensors_only<B>)
    return kind_of(tensors_of(batch), rows_of(batch));
  else
    return {.text = "rows"};
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/data/samples.ipp>
#endif
