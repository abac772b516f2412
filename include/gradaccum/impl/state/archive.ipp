// SPDX-License-Identifier: Apache-2.0
// Implements an archive of values by name, which saves and loads with the same code.
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <array>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum {

/// Throws unless a value has the type of the alternative `type` of `Archive::Value`.
GRADACCUM_INLINE void check_type(const std::string& name, const Archive::Value& value, std::size_t type) {
  constexpr std::array names{"a flag", "a whole number", "a floating-point number", "a text", "a tensor"};
  static_assert(names.size() == std::variant_size_v<Archive::Value>);
  TORCH_CHECK(value.index() == type, "Archive: the value '", name, "' must be ", names.at(type), ", got ",
              names.at(value.index()));
}

GRADACCUM_INLINE Archive Archive::of_references() {
  Archive archive;
  archive.copies_ = false;
  return archive;
}

GRADACCUM_INLINE void Archive::tensors(Tensors& tensors) {
  if (!loading_) {
    for (auto& [name, tensor] : tensors) values_[full_name(name)] = saved(tensor);
    return;
  }
  tensors.clear();
  for (auto value = values_.lower_bound(prefix_); value != values_.end() && value->first.starts_with(prefix_); ++value)
    if (auto* const tensor = std::get_if<at::Tensor>(&value->second); tensor && used_.insert(value->first).second)
      tensors.emplace(value->first.substr(prefix_.size()), std::move(*tensor));
}

GRADACCUM_INLINE void Archive::together(c10::function_ref<void()> load) {
  const auto waiting = changes_.size(), changed = undo_.size();
  ++depth_;
  try {
    load();
  } catch (...) {
    --depth_;
    changes_.resize(waiting);
    for (; undo_.size() > changed; undo_.pop_back()) undo_.back()();
    throw;
  }
  if (--depth_ > 0) return;
  undo_.clear();
  for (auto& change : std::exchange(changes_, {})) change();
}

GRADACCUM_INLINE void Archive::when_all_fit(std::function<void()> change) {
  if (depth_ == 0) return change();
  changes_.push_back(std::move(change));
}

GRADACCUM_INLINE void Archive::if_not_all_fit(std::function<void()> undo) {
  if (loading_ && depth_ > 0) undo_.push_back(std::move(undo));
}

GRADACCUM_INLINE Archive Archive::to_go_back(const Archive& before) {
  Archive archive(before.values());
  ++archive.depth_;  // for good: deferred changes are never made
  return archive;
}

GRADACCUM_INLINE bool Archive::has(const std::string& part) const {
  const auto [first, last] = values_of_part(part);
  return loading_ && first != last;
}

GRADACCUM_INLINE void Archive::leave_out(const std::string& part) {
  const auto [first, last] = values_of_part(part);
  for (auto value = first; value != last; ++value) used_.insert(value->first);
}

GRADACCUM_INLINE void Archive::check_all_used() const {
  for (auto& [name, value] : values_)
    TORCH_CHECK(used_.contains(name), "Archive: nothing loads the value '", name, "'; it is from another program");
}

GRADACCUM_INLINE const Archive::Value& Archive::of_rank(std::int64_t rank, std::string_view name,
                                                        std::size_t type) const {
  const auto full = prefix_ + std::string(name);
  const auto& all = ranks_.values.empty() ? values_ : ranks_.values;
  auto value = all.find("rank_" + std::to_string(rank) + "." + full);
  if (value == all.end()) value = all.find(full);
  TORCH_CHECK(value != all.end(), "Archive: must have a value '", full, "', but does not");
  check_type(value->first, value->second, type);
  return value->second;
}

GRADACCUM_INLINE std::string Archive::full_name(std::string_view name) {
  auto full = prefix_ + std::string(name);
  TORCH_CHECK(used_.insert(full).second, "Archive: two values are named '", full, "'; give each part another name");
  return full;
}

GRADACCUM_INLINE std::pair<Archive::Values::const_iterator, Archive::Values::const_iterator> Archive::values_of_part(
    const std::string& part) const {
  return std::pair(values_.lower_bound(prefix_ + part + '.'), values_.lower_bound(prefix_ + part + char('.' + 1)));
}

GRADACCUM_INLINE at::Tensor Archive::saved(const at::Tensor& tensor) const {
  return tensor.defined() && copies_ ? tensor.detach().clone() : tensor;
}

/// If changes are allowed, a part without saved values keeps its state, and so does a single value.
GRADACCUM_INLINE void Archive::part(std::string_view name, c10::function_ref<void()> state) {
  auto inner = full_name(name) + '.';
  if (loading_ && changes_allowed_ && !has(std::string(name))) return;
  const auto leave =
      c10::make_scope_exit([this, outer = std::exchange(prefix_, std::move(inner))] { prefix_ = outer; });
  together(state);
}

GRADACCUM_INLINE bool Archive::save_or_load(std::string_view name, Value& value) {
  const auto full = full_name(name);
  auto* const tensor = std::get_if<at::Tensor>(&value);
  if (!loading_) {
    if (tensor) *tensor = saved(*tensor);
    values_[full] = std::move(value);
    return false;
  }
  const auto found = values_.find(full);
  if (found == values_.end() && changes_allowed_) return false;
  TORCH_CHECK(found != values_.end(), "Archive: must have a value '", full, "', but does not");
  check_type(full, found->second, value.index());
  if (tensor)
    *tensor = detail::owned(std::get<at::Tensor>(std::move(found->second)));
  else
    value = found->second;
  return true;
}

GRADACCUM_INLINE void Archive::does_not_fit(std::string_view name, const std::string& held) const {
  TORCH_CHECK(false, "Archive: the value '", prefix_, name, "' does not fit, got ", held);
}

GRADACCUM_INLINE void Archive::differs(std::string_view name, const std::string& before,
                                       const std::string& here) const {
  TORCH_CHECK(changes_allowed_, "Archive: the state was saved with ", prefix_, name, " = ", before, ", but here it is ",
              here, "; use the same value, or load with {.allow_changes = true}");
}

}  // namespace gradaccum

namespace gradaccum::detail {

/// Returns true for a tensor that spans all of its CPU storage, allocated by LibTorch rather than borrowed.
GRADACCUM_INLINE bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.has_storage() && tensor.storage().resizable() &&
         tensor.storage().allocator() == c10::GetAllocator(c10::kCPU) && tensor.storage_offset() == 0 &&
         tensor.is_contiguous() && tensor.nbytes() == tensor.storage().nbytes();
}

/// Returns true if the caller holds the only reference to the tensor and its memory.
GRADACCUM_INLINE bool is_alone(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && has_plain_memory(tensor) && tensor.storage().use_count() == 1;
}

GRADACCUM_INLINE at::Tensor owned(at::Tensor tensor) {
  if (!tensor.defined() || (is_alone(tensor) && !tensor.requires_grad())) return tensor;
  return tensor.detach().clone();
}

GRADACCUM_INLINE void load_into(const at::Tensor& to, const at::Tensor& loaded) {
  const at::NoGradGuard no_grad;
  const bool can_swap = is_alone(loaded) && has_plain_memory(to) && !to.is_inference() &&
                        to.dtype() == loaded.dtype() && to.sizes() == loaded.sizes();
  if (!can_swap) {
    to.copy_(loaded);
    return;
  }
  auto &here = *to.storage().unsafeGetStorageImpl(), &there = *loaded.storage().unsafeGetStorageImpl();
  there.set_data_ptr_noswap(here.set_data_ptr(there.set_data_ptr({})));
  to.unsafeGetTensorImpl()->bump_version();  // like copy_(): autograd must notice if it has saved the tensor
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
