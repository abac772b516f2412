// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/replicas.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/data/fingerprint.hpp>
#include <gradaccum/detail/state/generator_states.hpp>
#include <gradaccum/detail/window/shards.hpp>

#include <c10/util/Exception.h>

#include <cstddef>
#include <mutex>
#include <sstream>
#include <string>

namespace gradaccum {
namespace detail {

/// Returns a line for each tensor. `describe` returns what must be the same on all ranks.
template <class Named, class Describe>
std::string described(const Named& tensors, const Describe& describe) {
  std::string lines;
  for (auto& tensor : tensors) lines += tensor.key() + ": " + describe(tensor.value()) + "\n";
  return lines;
}

/// Throws on all ranks if their lines are not equal, and names the first that differs.
GRADACCUM_INLINE void check_same_lines(const ProcessGroup& group, const std::string& lines, const char* what) {
  const auto all = group.all_gather(lines);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    std::istringstream first(all[0]), other(all[rank]);
    std::string expected, got;
    do {
      expected.clear(), got.clear();
      std::getline(first, expected), std::getline(other, got);
    } while (expected == got);
    TORCH_CHECK(false, "Replicas: ", what, " must be the same on all ranks, but rank 0 has '", expected, "', and rank ",
                rank, " has '", got, "'");
  }
}

/// Returns the dtype and shape, and whether the tensor is frozen.
GRADACCUM_INLINE std::string shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), tensor.requires_grad() ? "" : " frozen");
}

}  // namespace detail

GRADACCUM_INLINE std::shared_ptr<detail::ReplicaPeers> Replicas::peers_of(const ProcessGroup& group,
                                                                          const ReplicasOptions& options) {
  TORCH_CHECK(options.bucket_bytes >= 1, "Replicas: bucket_bytes must be >= 1, got ", options.bucket_bytes);
  return group.links() ? std::make_shared<detail::ReplicaPeers>(group.links(), options) : nullptr;
}

GRADACCUM_INLINE Replicas::~Replicas() {
  if (peers_) peers_->disconnect();
}

GRADACCUM_INLINE void Replicas::begin(const ReplicasOptions& options,
                                      const std::vector<at::Tensor>& of_optimizer) const {
  auto lines = detail::described(model_->named_parameters(), detail::shape_of) +
               detail::described(model_->named_buffers(), detail::shape_of);
  for (auto& parameter : of_optimizer) lines += "in the optimizer: " + detail::shape_of(parameter) + "\n";
  lines += c10::str("in the optimizer, pieces: ", peers_->shards() ? peers_->shards()->number_of_pieces() : 0, "\n");
  detail::check_same_lines(group_, lines, "the model's parameters and buffers, and what is divided");
  broadcast(model_->parameters());
  broadcast(model_->buffers());
  peers_->connect(model_->parameters());
  if (!options.seed_by_rank || group_.rank() == 0) return;
  for (auto& [name, generator] : detail::default_generators()) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(generator.current_seed() + static_cast<std::uint64_t>(group_.rank()));
  }
}

GRADACCUM_INLINE void Replicas::broadcast(const std::vector<at::Tensor>& tensors) const {
  for (auto& tensor : tensors)
    if (tensor.defined()) group_.broadcast(tensor);
}

GRADACCUM_INLINE void Replicas::broadcast_buffers() const { broadcast(model_->buffers()); }

GRADACCUM_INLINE void Replicas::check_equal() const {
  if (!group_.links()) return;
  const auto numbers = [](const at::Tensor& tensor) { return detail::fingerprint_of(tensor); };
  detail::check_same_lines(group_, detail::described(model_->named_parameters(), numbers),
                           "the parameters (dtype, shape, checksum)");
  detail::check_same_lines(group_, peers_->settings_of_divided(), "the settings of an optimizer that is divided");
}

}  // namespace gradaccum
