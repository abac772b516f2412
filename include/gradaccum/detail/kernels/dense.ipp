// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/kernels/dense.hpp>

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zero.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

namespace gradaccum::detail {

GRADACCUM_INLINE bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (std::int64_t i = 0; i < a.dim(); ++i)
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  return true;
}

GRADACCUM_INLINE bool is_plain(const at::Tensor& t) {
  return t.is_non_overlapping_and_dense() && !t._is_zerotensor() && !t.is_neg() && !t.is_conj();
}

GRADACCUM_INLINE at::Tensor plain_layout_of(const at::Tensor& t) {
  return is_plain(t) ? t : at::empty_like(t, t.options().device(at::kMeta));
}

GRADACCUM_INLINE at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype && is_plain(t) && same_order(like, t)) return t;
  return at::empty_strided(like.sizes(), like.strides(), t.options().dtype(dtype)).copy_(t);
}

GRADACCUM_INLINE at::Tensor row_major(const at::Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype && is_plain(t) && t.is_contiguous()) return t;
  return at::empty(t.sizes(), t.options().dtype(dtype)).copy_(t);
}

GRADACCUM_INLINE bool has_kernels(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

GRADACCUM_INLINE at::ScalarType state_type(const at::Tensor& parameter) {
  return at::toOpMathType(parameter.scalar_type());
}

GRADACCUM_INLINE at::Tensor settled(const at::Tensor& state, const at::Tensor& parameter, const char* name) {
  const auto like = plain_layout_of(parameter);
  if (!state.defined()) {
    const auto options = parameter.options().dtype(state_type(parameter));
    return at::empty_strided(like.sizes(), like.strides(), options).zero_();
  }
  TORCH_CHECK(state.layout() == at::kStrided && state.sizes() == parameter.sizes() &&
                  state.device() == parameter.device() && state.is_complex() == parameter.is_complex(),
              "optimizer state: ", name, " must have the shape and device of its parameter, ", parameter.sizes(),
              " on ", parameter.device(), ", got ", state.sizes(), " on ", state.device(), " (", state.scalar_type(),
              "); the state was loaded for another model");
  return in_order_of(like, state, state_type(parameter));
}

GRADACCUM_INLINE void check_can_be_stepped(const char* optimizer, const at::Tensor& parameter,
                                           const at::Tensor& gradient) {
  TORCH_CHECK(gradient.sizes() == parameter.sizes() && gradient.device() == parameter.device(), optimizer,
              ": a gradient must have the shape and device of its parameter, ", parameter.sizes(), " on ",
              parameter.device(), ", got ", gradient.sizes(), " on ", gradient.device());
  TORCH_CHECK(parameter.layout() == at::kStrided && (gradient.layout() == at::kStrided || gradient.is_sparse()),
              optimizer, ": a parameter must be dense, and its gradient dense or sparse COO, got layouts ",
              parameter.layout(), " and ", gradient.layout());
  const auto number = at::toRealValueType(parameter.scalar_type());
  TORCH_CHECK(number == at::kDouble || number == at::kFloat || number == at::kHalf || number == at::kBFloat16,
              optimizer, ": a parameter must be floating or complex, of 16 bits or more, got ",
              parameter.scalar_type());
  TORCH_CHECK(!parameter._is_zerotensor() && (!parameter.is_inference() || c10::InferenceMode::is_enabled()), optimizer,
              ": a parameter must be a tensor that can be written to, got an inference tensor or a lazy zero");
  if (!is_plain(parameter)) at::assert_no_internal_overlap(parameter);  // expanded: several elements share one number
}

GRADACCUM_INLINE void check_can_be_stepped_densely(const char* optimizer, const at::Tensor& parameter,
                                                   const at::Tensor& gradient) {
  TORCH_CHECK(!gradient.is_sparse(), optimizer,
              ": a gradient must be dense, got a sparse one for a parameter of shape ", parameter.sizes(),
              "; use AdamW, or an embedding that is not sparse");
  check_can_be_stepped(optimizer, parameter, gradient);
}

GRADACCUM_INLINE at::Tensor as_real(const at::Tensor& t) { return t.is_complex() ? at::view_as_real(t) : t; }

GRADACCUM_INLINE void write_back(const at::Tensor& parameter, const at::Tensor& stepped) {
  if (!stepped.is_same(parameter))
    parameter.copy_(stepped);
  else if (!parameter.is_inference())
    parameter.unsafeGetTensorImpl()->bump_version();
}

GRADACCUM_INLINE DenseOperands::DenseOperands(const at::Tensor& parameter, const at::Tensor& gradient,
                                              at::ScalarType dtype)
    : owner_(parameter), parameter_(parameter) {
  if (!is_plain(parameter) || parameter.scalar_type() != dtype)
    parameter_ = at::empty_like(parameter, parameter.options().dtype(dtype)).copy_(parameter);
  const bool same = gradient.scalar_type() == dtype;  // otherwise float32, as sums of 16-bit gradients may be
  gradient_ = in_order_of(parameter_, gradient, same ? dtype : state_type(parameter_));
  copied_ =
      (parameter_.is_same(parameter) ? 0 : parameter.numel()) + (gradient_.is_same(gradient) ? 0 : gradient.numel());
}

}  // namespace gradaccum::detail
