// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/samples_of.hpp>
#include <gradaccum/detail/data/tensors_of.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <concepts>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <typeinfo>

namespace gradaccum::detail {

/// Returns the tensor on `device`. A copy from the host to CUDA uses pinned memory, and does not wait for the device.
at::Tensor brought_to(c10::Device device, const at::Tensor& tensor);

/// Throws an error that names the type.
[[noreturn]] void cannot_be_brought(const std::type_info& type);

template <class B>
concept is_data_alone = has_data<B> && requires(const B& batch) {
  requires sizeof(B) == sizeof(batch.data);
};
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
  } else if constexpr (maps_names<B>) {
    for (auto& [name, part] : batch) bring_to(device, part);
  } else if constexpr (std::ranges::forward_range<B> && !is_text<B>) {
    for (auto& part : batch) bring_to(device, part);
  } else if constexpr (is_data_with_target<B>) {
    bring_to(device, batch.data);
    bring_to(device, batch.target);
  } else if constexpr (is_data_alone<B>) {
    bring_to(device, batch.data);
  } else if constexpr (is_tuple<B>) {
    std::apply([&](auto&... parts) { (bring_to(device, parts), ...); }, batch);
  } else if constexpr (!std::is_arithmetic_v<B> && !std::is_enum_v<B> && !is_text<B>) {
    cannot_be_brought(typeid(B));
  }
}

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/data/batch_on_device.ipp>
#endif
