// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/window/window_state.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// What backward has summed up for each parameter: in its `.grad`, or apart from it in a wider dtype.
class WindowSums {
 public:
  /// As they were saved, of each parameter; undefined where there is none.
  struct Loaded {
    std::vector<at::Tensor> in_grad, apart;
  };

  /// A shared parameter counts once, however often it is listed. Those that stay keep their sums.
  void set_parameters(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }

  const at::Tensor& operator[](std::size_t place) const {
    return apart_[place].defined() ? apart_[place] : parameters_[place].grad();
  }
  /// Where there was none.
  void set(std::size_t place, const at::Tensor& sum) {
    const bool apart = sum.scalar_type() != parameters_[place].scalar_type();
    (apart ? apart_[place] : parameters_[place].mutable_grad()) = sum;
  }
  /// Those that there are.
  std::vector<std::size_t> places() const {
    std::vector<std::size_t> places;
    for (std::size_t place = 0; place < size(); ++place)
      if ((*this)[place].defined()) places.push_back(place);
    return places;
  }

  void fold(std::size_t place, at::ScalarType dtype);
  void become_gradients();
  /// Of these parameters alone; what is kept apart moves there.
  WindowSums part(const std::vector<std::size_t>& places);

  SumsByName named(const NameOf& name_of) const;
  /// What `named` gave, checked; if `lenient`, what does not fit is left out.
  Loaded take(SumsByName named, const NameOf& name_of, bool lenient) const;
  void set(const Loaded& sums) {
    for (std::size_t i = 0; i < size(); ++i) parameters_[i].mutable_grad() = sums.in_grad[i];
    apart_ = sums.apart;
  }

 private:
  std::vector<at::Tensor> parameters_, apart_;  // apart: where undefined, `.grad` is the sum
};

inline void WindowSums::set_parameters(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> known;
  std::vector<at::Tensor> distinct, apart;
  for (auto& parameter : parameters) {
    TORCH_CHECK(parameter.defined(), "Gradients: a parameter is an undefined tensor");
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
    distinct.push_back(parameter);
    auto& sum = apart.emplace_back();
    for (std::size_t i = 0; i < size(); ++i)
      if (parameters_[i].is_same(parameter)) sum = apart_[i];
  }
  parameters_ = std::move(distinct);
  apart_ = std::move(apart);
}

/// Adds a gradient narrower than `dtype` to a sum of that dtype. `.grad` is free again: the next backward need not add
/// to it.
inline void WindowSums::fold(std::size_t place, at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  auto& gradient = parameters_[place].mutable_grad();
  auto& sum = apart_[place];
  if (!gradient.defined() || at::elementSize(gradient.scalar_type()) >= at::elementSize(dtype)) return;
  if (!sum.defined())
    sum = gradient.detach().to(dtype);
  else if (sum.is_sparse() && !gradient.is_sparse())  // ATen adds a sparse tensor to a dense one, not the reverse
    sum = gradient.detach().to(dtype).add_(sum);
  else
    sum.add_(gradient);
  gradient.reset();
}

/// Those that were kept apart, too, once they have their true size: any code may read and change them there.
inline void WindowSums::become_gradients() {
  for (std::size_t i = 0; i < size(); ++i) {
    if (!apart_[i].defined()) continue;
    parameters_[i].mutable_grad() = apart_[i].to(parameters_[i].scalar_type());
    apart_[i].reset();
  }
}

inline WindowSums WindowSums::part(const std::vector<std::size_t>& places) {
  WindowSums part;
  for (auto place : places) {
    part.parameters_.push_back(parameters_[place]);
    part.apart_.push_back(std::move(apart_[place]));
  }
  return part;
}

inline SumsByName WindowSums::named(const NameOf& name_of) const {
  SumsByName named;
  for (std::size_t i = 0; i < size(); ++i) {
    named.add("grad", name_of(parameters_[i]), parameters_[i].grad());
    named.add("sum", name_of(parameters_[i]), apart_[i]);
  }
  return named;
}

inline WindowSums::Loaded WindowSums::take(SumsByName named, const NameOf& name_of, bool lenient) const {
  Loaded all;
  for (auto& parameter : parameters_) {
    at::Tensor gradient, sum;
    try {
      const auto& name = name_of(parameter);
      sum = named.take("sum", name, parameter);
      gradient = named.take("grad", name, parameter);
      TORCH_CHECK(!gradient.defined() || gradient.scalar_type() == parameter.scalar_type(),
                  "GradAccumulator: the state's gradient of ", name, " must be ", parameter.scalar_type(), ", got ",
                  gradient.scalar_type());
    } catch (const c10::Error&) {
      if (!lenient) throw;
      gradient.reset();
    }
    all.in_grad.push_back(gradient);
    all.apart.push_back(sum);
  }
  if (!lenient) named.check_all_taken();
  return all;
}

}  // namespace gradaccum::detail
