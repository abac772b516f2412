// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/data/draw_watch.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/types/recorded_inputs.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKey.h>

#include <algorithm>
#include <memory>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string& drawn_on_this_thread() {
  static thread_local std::string operation;
  return operation;
}

/// Returns whether an operation draws from a default generator. One made of other operations, such as a dropout that
/// may be off, does not count: those do.
GRADACCUM_INLINE bool draws_by_default(const at::RecordFunction& operation) {
  const auto name = operation.operator_name();
  if (!name) return false;
  const auto known = c10::Dispatcher::singleton().findSchema(*name);
  if (!known || !known->hasTag(at::Tag::nondeterministic_seeded)) return false;
  if (known->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  const auto inputs = recorded_inputs(operation);
  return std::none_of(inputs.begin(), inputs.end(), [](const c10::IValue& input) { return input.isGenerator(); });
}

GRADACCUM_INLINE std::unique_ptr<at::ObserverContext> note_draw(const at::RecordFunction& operation) {
  auto& drawn = drawn_on_this_thread();
  if (drawn.empty() && draws_by_default(operation)) drawn = operation.name();
  return nullptr;
}

GRADACCUM_INLINE DrawWatch::DrawWatch()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(&note_draw).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {
  drawn_on_this_thread().clear();
}

GRADACCUM_INLINE DrawWatch::~DrawWatch() { at::removeCallback(handle_); }

GRADACCUM_INLINE const std::string& DrawWatch::drawn() const { return drawn_on_this_thread(); }

}  // namespace gradaccum::detail
