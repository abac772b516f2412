// SPDX-License-Identifier: Apache-2.0
// Saves and loads the state of an optimizer: whole, or a rank's pieces of a sharded one.
#pragma once

#include <gradaccum/detail/saving/optimizer_state.hpp>

#include <gradaccum/detail/optimizers/one_pass.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/parallel/shards.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <c10/util/Exception.h>

#include <map>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string name_of_piece(const Shards& shards, std::size_t index, const std::string& parameter) {
  const auto piece = shards.own_piece(index);
  return PieceName{parameter, piece.begin, piece.end, at::DimVector(shards.parameters()[index].sizes())}.text();
}

/// Returns the pieces that this rank steps with their names, such as `0.weight[4096:8192 of 64x128]`.
GRADACCUM_INLINE NamedParameters named_pieces(const Shards& shards, const NamedParameters& parameters) {
  const NameOf name_of(parameters);
  NamedParameters pieces;
  for (std::size_t index = 0; index < shards.size(); ++index)
    pieces.insert(name_of_piece(shards, index, name_of(shards.parameters()[index])), shards.own(index));
  return pieces;
}

GRADACCUM_INLINE at::Tensor own_part(const Pieces& state, const Shards& shards, std::size_t index,
                                     const std::string& name) {
  if (!shards.is_cut(index) || state.is_number()) return state.whole();
  const auto& parameter = shards.parameters()[index];
  TORCH_CHECK(state.sizes() == parameter.sizes() && state.elements_of_number() > 0, "load_named_state: ", name,
              " must be of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got pieces of ", state.sizes());
  const auto piece = shards.own_piece(index);
  return state.part(piece.begin, piece.end);
}

/// Returns this rank's part of a tensor that was saved whole.
GRADACCUM_INLINE at::Tensor own_part(const at::Tensor& whole, const Shards& shards, std::size_t index,
                                     const std::string& name) {
  if (!shards.is_cut(index) || !whole.defined() || whole.dim() == 0) return whole;
  const auto& parameter = shards.parameters()[index];
  const auto blocks = eight_bit_blocks(parameter.numel());
  TORCH_CHECK(whole.layout() == at::kStrided &&
                  (whole.sizes() == parameter.sizes() || whole.sizes() == at::IntArrayRef{blocks}),
              "load_named_state: ", name, " must be dense, of the shape of its parameter, ", parameter.sizes(),
              ", or have a number for each block of it, got ", whole.sizes());
  Pieces one(name);
  one.add({name, 0, parameter.numel(), at::DimVector(parameter.sizes())}, whole);
  return own_part(one, shards, index, name);
}

/// Returns the part of a state that belongs to this rank's pieces. The state may have been saved whole or in pieces.
/// Throws for tensors of unknown parameters or other shapes; if `lenient`, omits them.
GRADACCUM_INLINE NamedTensors own_part(NamedTensors state, const Shards& shards, const NamedParameters& parameters,
                                       bool lenient) {
  const NameOf name_of(parameters);
  std::map<std::string, std::size_t> indices;
  for (std::size_t index = 0; index < shards.size(); ++index) indices[name_of(shards.parameters()[index])] = index;
  const auto pieces = take_pieces(state);
  NamedTensors own;
  const auto add = [&](const std::string& full, const auto& saved) {
    const auto dot = full.find('.');  // exp_avg.0.weight
    const auto found = dot == full.npos ? indices.end() : indices.find(full.substr(dot + 1));
    TORCH_CHECK(lenient || found != indices.end(), "OptimizerState: no parameter or state of the optimizer matches ",
                full);
    if (found == indices.end() || shards.own_piece(found->second).size() == 0) return;
    try {
      own.emplace(full.substr(0, dot + 1) + name_of_piece(shards, found->second, found->first),
                  own_part(saved, shards, found->second, full));
    } catch (const c10::Error&) {  // has another shape
      if (!lenient) throw;
    }
  };
  for (auto& [full, tensor] : state) add(full, tensor);
  for (auto& [full, saved] : pieces) add(full, saved);
  return own;
}

/// Checks a loaded state. Returns a function that makes it the optimizer's.
GRADACCUM_INLINE std::function<void()> prepare_state_of(torch::optim::Optimizer& optimizer,
                                                        const NamedParameters& parameters, NamedTensors tensors,
                                                        bool lenient) {
  if (auto* const itself = dynamic_cast<optim::OnePass*>(&optimizer))
    return itself->take_named_state(parameters, std::move(tensors), lenient);
  const auto fresh = new_state_of(optimizer);
  if (!fresh) return {};
  auto become = prepare_states(optimizer, *fresh, NameOf(parameters), tensors, lenient);
  TORCH_CHECK(lenient || tensors.empty(), "OptimizerState: ", type_name(optimizer),
              " has no parameter or state that matches ", tensors.empty() ? "" : tensors.begin()->first);
  return become;
}

/// Calls `work` with the parameters that the optimizer steps: whole ones, or this process's pieces.
GRADACCUM_INLINE void with_stepped(const NamedParameters& parameters, Shards* shards,
                                   c10::function_ref<void(const NamedParameters&)> work) {
  if (shards == nullptr) return work(parameters);
  shards->check();
  shards->with_own([&, pieces = named_pieces(*shards, parameters)] { work(pieces); });
}

GRADACCUM_INLINE void archive_optimizer(Archive& archive, torch::optim::Optimizer& optimizer,
                                        const NamedParameters& parameters, Shards* shards) {
  archive.setting("class", type_name(optimizer));
  archive.setting("groups", static_cast<std::int64_t>(optimizer.param_groups().size()));
  archive_groups(archive, optimizer);

  NamedTensors tensors;
  if (!archive.loading()) {
    auto* const itself = dynamic_cast<optim::OnePass*>(&optimizer);
    with_stepped(parameters, shards, [&](auto& stepped) {
      tensors = itself ? itself->named_state(stepped) : named_state_of(optimizer, NameOf(stepped));
    });
    return archive.tensors(tensors);
  }
  archive.tensors(tensors);
  const bool lenient = archive.changes_allowed();
  if (shards != nullptr)
    tensors = own_part(std::move(tensors), *shards, parameters, lenient);
  else
    for (auto& [full, pieces] : take_pieces(tensors)) tensors.emplace(full, pieces.whole());
  std::function<void()> become;
  with_stepped(parameters, shards,
               [&](auto& stepped) { become = prepare_state_of(optimizer, stepped, std::move(tensors), lenient); });
  archive.when_all_fit(std::move(become));
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
