// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/checkpoint_options.hpp>
#include <gradaccum/detail/checkpoint/frame.hpp>
#include <gradaccum/detail/checkpoint/frozen_statistics.hpp>
#include <gradaccum/detail/checkpoint/function.hpp>
#include <gradaccum/detail/checkpoint/inputs.hpp>
#include <gradaccum/detail/checkpoint/recomputation.hpp>

#include <ATen/core/grad_mode.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace gradaccum::detail {

template <class Function>
concept not_options = !std::same_as<std::remove_cvref_t<Function>, CheckpointOptions>;

/// `function(inputs...)`, with a frame in place of what its operations save for backward.
template <class Function, class... Inputs>
auto run_checkpointed(const CheckpointOptions& options, Function&& function, Inputs&&... inputs) {
  static_assert(
      !plain_module<Function> || std::is_lvalue_reference_v<Function>,
      "checkpoint: a module without an owner must outlive backward, and this one is temporary; use a holder or a "
      "shared_ptr");
  auto call = callable(function);
  if (!at::GradMode::is_enabled()) return call(std::forward<Inputs>(inputs)...);

  const auto kept = std::make_shared<CheckpointInputs<Inputs...>>(inputs...);
  const auto again = [kept, call] {
    auto as_it_was = call;  // it may count its calls
    kept->call(as_it_was);
  };
  const auto modules = modules_of(function);
  const auto frame = std::make_shared<CheckpointFrame>(options, modules, again);
  const auto forward = [&] {
    const FrozenStatistics frozen(Recomputation::active() ? modules : decltype(modules){});
    const CheckpointScope scope(frame);
    return call(std::forward<Inputs>(inputs)...);
  };
  const auto complete = [&] {
    kept->check_unchanged();
    frame->complete();
  };
  if constexpr (std::is_void_v<decltype(forward())>) {
    forward();
    complete();
  } else {
    auto outputs = forward();
    complete();
    return outputs;
  }
}

}  // namespace gradaccum::detail
