// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum::detail {

class NameOf;

/// What backward has summed up for each parameter: in its `.grad`, or apart from it in a wider dtype.
class WindowSums {
 public:
  /// With names: `grad.0.weight`, or `sum.0.weight` where it is kept apart; of a sparse one its indices and values.
  using Named = std::map<std::string, at::Tensor>;
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
  void set(std::size_t place, const at::Tensor& sum);
  /// There is none any more.
  void forget(std::size_t place);
  /// Those that there are.
  std::vector<std::size_t> places() const;

  /// Adds a gradient to its sum that is kept apart; if there is none, one narrower than `dtype` begins it, in that
  /// dtype. `.grad` is free again: the next backward need not add to it.
  void fold(std::size_t place, std::optional<at::ScalarType> dtype);
  /// No sum stays in `.grad`, where somebody could clear it.
  void move_apart();
  /// Those that were kept apart, too, once they have their true size: any code may read and change them there.
  void become_gradients();
  /// Of these parameters alone; what is kept apart moves there.
  WindowSums part(const std::vector<std::size_t>& places);

  Named named(const NameOf& name_of) const;
  /// What `named` gave, checked; if `lenient`, what does not fit is left out.
  Loaded take(Named named, const NameOf& name_of, bool lenient) const;
  void set(const Loaded& sums);
  Loaded copies() const;

 private:
  std::vector<at::Tensor> parameters_, apart_;  // apart: where undefined, `.grad` is the sum
};

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/window/window_sums.ipp>
#endif
