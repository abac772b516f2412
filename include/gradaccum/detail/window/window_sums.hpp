// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gradaccum::detail {

class NameOf;

/// The sum of each parameter's gradients: in its `.grad`, or separately in a wider dtype.
class WindowSums {
 public:
  /// Sums by name: `grad.0.weight`, or `sum.0.weight` if stored separately; for a sparse sum its indices and values.
  using Named = std::map<std::string, at::Tensor>;
  /// Saved sums of each parameter; undefined if there is none.
  struct Loaded {
    std::vector<at::Tensor> in_grad, apart;
  };

  /// Sets the parameters, without duplicates. Parameters that were set before keep their sums.
  void set_parameters(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }

  const at::Tensor& operator[](std::size_t place) const {
    return apart_[place].defined() ? apart_[place] : parameters_[place].grad();
  }
  /// Sets the sum of a parameter without one.
  void set(std::size_t place, const at::Tensor& sum) {
    const bool apart = sum.scalar_type() != parameters_[place].scalar_type();
    (apart ? apart_[place] : parameters_[place].mutable_grad()) = sum;
  }
  void forget(std::size_t place) { apart_[place].reset(), parameters_[place].mutable_grad().reset(); }
  std::vector<std::size_t> places() const {
    std::vector<std::size_t> places;
    for (std::size_t place = 0; place < size(); ++place)
      if ((*this)[place].defined()) places.push_back(place);
    return places;
  }

  /// Adds a gradient to its separate sum; if there is none, a gradient narrower than `dtype` starts one in that dtype.
  /// Frees `.grad`, so that the next backward does not add to it.
  void fold(std::size_t place, std::optional<at::ScalarType> dtype);
  /// Moves all sums out of `.grad`, where other code could clear them.
  void move_apart() {
    for (std::size_t place = 0; place < size(); ++place) {
      auto& gradient = parameters_[place].mutable_grad();
      if (!gradient.defined() || apart_[place].defined()) continue;
      apart_[place] = gradient.detach();
      gradient.reset();
    }
  }
  /// Moves separate sums to `.grad` after the factor was applied. Any code may read and change them there.
  void become_gradients() {
    for (std::size_t i = 0; i < size(); ++i) {
      if (!apart_[i].defined()) continue;
      parameters_[i].mutable_grad() = apart_[i].to(parameters_[i].scalar_type());
      apart_[i].reset();
    }
  }
  /// Returns the sums of these parameters. Moves separate sums out of this object.
  WindowSums part(const std::vector<std::size_t>& places) {
    WindowSums part;
    for (auto place : places) {
      part.parameters_.push_back(parameters_[place]);
      part.apart_.push_back(std::move(apart_[place]));
    }
    return part;
  }

  Named named(const NameOf& name_of) const;
  /// Checks a result of `named`. `lenient`: leaves out sums that do not fit.
  Loaded load(Named named, const NameOf& name_of, bool lenient) const;
  void set(const Loaded& sums) {
    for (std::size_t i = 0; i < size(); ++i) parameters_[i].mutable_grad() = sums.in_grad[i];
    apart_ = sums.apart;
  }
  Loaded copies() const;

 private:
  std::vector<at::Tensor> parameters_, apart_;  // apart_: separate sums; if undefined, `.grad` is the sum
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/window/window_sums.ipp>
#endif
