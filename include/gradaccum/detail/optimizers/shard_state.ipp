// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/optimizers/shard_state.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/state/pieces.hpp>

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string name_of_piece(const Shards& shards, std::size_t place, const std::string& parameter) {
  const auto piece = shards.own_piece(place);
  return PieceName{parameter, piece.begin, piece.end, at::DimVector(shards.parameters()[place].sizes())}.text();
}

GRADACCUM_INLINE NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters) {
  const NameOf name_of(parameters);
  NamedParameters pieces;
  for (std::size_t place = 0; place < shards.size(); ++place)
    pieces.insert(name_of_piece(shards, place, name_of(shards.parameters()[place])), shards.own(place));
  return pieces;
}

/// A tensor has a number for each element of its parameter, one for each block of them, or one for all.
GRADACCUM_INLINE at::Tensor own_part(const at::Tensor& whole, const Shards& shards, std::size_t place,
                                     const std::string& name) {
  if (!shards.is_cut(place) || !whole.defined() || whole.dim() == 0) return whole;
  const auto& parameter = shards.parameters()[place];
  const bool of_elements = whole.sizes() == parameter.sizes();
  const auto per_number = of_elements ? std::int64_t{1} : eight_bit_block;
  const auto blocks = (parameter.numel() + eight_bit_block - 1) / eight_bit_block;
  TORCH_CHECK(whole.layout() == at::kStrided && (of_elements || whole.sizes() == at::IntArrayRef{blocks}),
              "load_named_state: ", name, " must be dense, of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got ", whole.sizes());
  const auto piece = shards.own_piece(place);
  const auto begin = piece.begin / per_number, end = (piece.end + per_number - 1) / per_number;
  return whole.reshape({-1}).narrow(0, begin, end - begin).clone();
}

/// The parameters' places by their names.
GRADACCUM_INLINE std::map<std::string, std::size_t> places_by_name(const Shards& shards,
                                                                   const NamedParameters& parameters) {
  const NameOf name_of(parameters);
  std::map<std::string, std::size_t> places;
  for (std::size_t place = 0; place < shards.size(); ++place) places[name_of(shards.parameters()[place])] = place;
  return places;
}

GRADACCUM_INLINE NamedTensors own_part(const NamedTensors& state, const Shards& shards,
                                       const NamedParameters& parameters, bool lenient) {
  const auto places = places_by_name(shards, parameters);
  NamedTensors own;
  for (auto& [full, tensor] : state) {
    const auto dot = full.find('.');  // exp_avg.0.weight
    const auto found = dot == full.npos ? places.end() : places.find(full.substr(dot + 1));
    TORCH_CHECK(lenient || found != places.end(), "OptimizerState: there is no parameter, or no such state, for ",
                full);
    if (found == places.end() || shards.own_piece(found->second).size() == 0) continue;
    try {
      own.emplace(full.substr(0, dot + 1) + name_of_piece(shards, found->second, found->first),
                  own_part(tensor, shards, found->second, full));
    } catch (const c10::Error&) {  // of another shape
      if (!lenient) throw;
    }
  }
  return own;
}

}  // namespace gradaccum::detail
