// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/curve.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace gradaccum {

class Archive;

namespace detail {

/// Curves as three tensors of a state: bytes, whole numbers and others, one after another. Names are bytes, since they
/// may be whatever a program calls its metrics, and texts of a state are UTF-8.
class PackedCurves {
 public:
  void add(std::string_view name, const Curve& curve);
  /// Throws where they are none.
  void for_each(const std::function<void(std::string name, Curve curve)>& take) const;
  void state(Archive& archive);

 private:
  std::vector<std::uint8_t> names_;
  std::vector<std::int64_t> whole_;
  std::vector<double> real_;
};

}  // namespace detail
}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/detail/watching/packed_curves.ipp>
#endif
