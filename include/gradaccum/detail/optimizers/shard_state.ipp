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

GRADACCUM_INLINE at::Tensor own_part(const Pieces& state, const Shards& shards, std::size_t place,
                                     const std::string& name) {
  if (!shards.is_cut(place) || state.is_number()) return state.whole();
  const auto& parameter = shards.parameters()[place];
  TORCH_CHECK(state.sizes() == parameter.sizes() && state.elements_of_number() > 0, "load_named_state: ", name,
              " must be of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got pieces of ", state.sizes());
  const auto piece = shards.own_piece(place);
  return state.part(piece.begin, piece.end);
}

/// Returns this rank's part of a tensor that was saved whole.
GRADACCUM_INLINE at::Tensor own_part(const at::Tensor& whole, const Shards& shards, std::size_t place,
                                     const std::string& name) {
  if (!shards.is_cut(place) || !whole.defined() || whole.dim() == 0) return whole;
  const auto& parameter = shards.parameters()[place];
  const auto blocks = eight_bit_blocks(parameter.numel());
  TORCH_CHECK(whole.layout() == at::kStrided &&
                  (whole.sizes() == parameter.sizes() || whole.sizes() == at::IntArrayRef{blocks}),
              "load_named_state: ", name, " must be dense, of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got ", whole.sizes());
  Pieces one(name);
  one.add({name, 0, parameter.numel(), at::DimVector(parameter.sizes())}, whole);
  return own_part(one, shards, place, name);
}

/// Returns the parameters' indices by name.
GRADACCUM_INLINE std::map<std::string, std::size_t> places_by_name(const Shards& shards,
                                                                   const NamedParameters& parameters) {
  const NameOf name_of(parameters);
  std::map<std::string, std::size_t> places;
  for (std::size_t place = 0; place < shards.size(); ++place) places[name_of(shards.parameters()[place])] = place;
  return places;
}

GRADACCUM_INLINE NamedTensors own_part(NamedTensors state, const Shards& shards, const NamedParameters& parameters,
                                       bool lenient) {
  const auto places = places_by_name(shards, parameters);
  const auto pieces = take_pieces(state);
  NamedTensors own;
  const auto take = [&](const std::string& full, const auto& saved) {
    const auto dot = full.find('.');  // exp_avg.0.weight
    const auto found = dot == full.npos ? places.end() : places.find(full.substr(dot + 1));
    TORCH_CHECK(lenient || found != places.end(), "OptimizerState: there is no parameter, or no such state, for ",
                full);
    if (found == places.end() || shards.own_piece(found->second).size() == 0) return;
    try {
      own.emplace(full.substr(0, dot + 1) + name_of_piece(shards, found->second, found->first),
                  own_part(saved, shards, found->second, full));
    } catch (const c10::Error&) {  // has another shape
      if (!lenient) throw;
    }
  };
  for (auto& [full, tensor] : state) take(full, tensor);
  for (auto& [full, saved] : pieces) take(full, saved);
  return own;
}

GRADACCUM_INLINE NamedTensors whole_state(NamedTensors state) {
  for (auto& [full, pieces] : take_pieces(state)) state.emplace(full, pieces.whole());
  return state;
}

}  // namespace gradaccum::detail
