// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/archive.hpp>

#include <ATen/core/Generator.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace gradaccum::detail {

/// The name of a part of a parameter in a state of several ranks. `0.weight[4096:8192 of 64x128]` has the elements
/// [4096, 8192) in memory order.
struct PieceName {
  std::string parameter;
  std::int64_t begin = 0, end = 0;
  at::DimVector sizes = {};  ///< sizes of the whole parameter

  std::string text() const;
  /// Parses a name; nullopt unless `text()` gives exactly `text`.
  static std::optional<PieceName> of(std::string_view text);
};

/// Removes the prefix of a value of one rank: `rank_12.seed` becomes `seed`. Other names are unchanged.
std::string without_rank(const std::string& name);

/// A tensor that several ranks have saved in pieces. It has one number for each element of a parameter, for each block
/// of elements, or for the whole parameter. Nothing is copied before whole() or part().
class Pieces {
 public:
  explicit Pieces(std::string name) : name_(std::move(name)) {}

  void add(PieceName piece, at::Tensor tensor);
  /// Throws if a piece is missing or does not fit the others.
  void check() const;

  at::IntArrayRef sizes() const { return sizes_; }  ///< the sizes of the whole parameter
  bool is_number() const;                           ///< true if there is a single number for the whole parameter
  /// Returns the number of elements per number: 1, or the size of a block of 8-bit moments; 0 for anything else.
  std::int64_t elements_of_number() const;

  /// Returns a new tensor: the whole, or elements [begin, end) as a row; `begin` must start a number's elements.
  at::Tensor whole() const;
  at::Tensor part(std::int64_t begin, std::int64_t end) const;

 private:
  struct Piece {
    std::int64_t begin, end;
    at::Tensor tensor;
  };

  std::int64_t numbers_of(std::int64_t elements) const;
  const Piece& first() const { return by_begin_.begin()->second; }

  std::string name_;
  at::DimVector sizes_;
  std::map<std::int64_t, Piece> by_begin_;
};

/// Removes all pieces from `tensors` and returns them by the whole's name.
std::map<std::string, Pieces> take_pieces(std::map<std::string, at::Tensor>& tensors);

/// Removes all pieces from a state and returns them without the rank in their names. Throws if pieces do not fit.
Archive::Values take_shared_pieces(Archive::Values& values);

/// An optimizer's state as named tensors: `exp_avg.0.weight`.
using NamedTensors = std::map<std::string, at::Tensor>;
using NamedParameters = torch::OrderedDict<std::string, at::Tensor>;  // the type of Module::named_parameters()

/// Looks up a parameter's name.
class NameOf {
 public:
  explicit NameOf(const NamedParameters& parameters);
  const std::string& operator()(const at::Tensor& parameter) const;

 private:
  std::unordered_map<const void*, std::string> names_;
};

template <class Body>
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Body& body) {
  for (auto& group : optimizer.param_groups())
    for (auto& parameter : group.params()) body(parameter);
}

/// Options that serialize themselves.
struct ArchivesItself {
  virtual ~ArchivesItself() = default;
  virtual void state(Archive& archive) = 0;
};

/// Parameters and buffers by their full names; a shared tensor appears under each of its names.
Archive::Tensors tensors_of_module(const torch::nn::Module& module);

/// Returns the first ten lines, each on a new line, and the number of the others.
std::string first_of(const std::vector<std::string>& lines);

/// Throws if the tensor lacks memory for each of its elements (a meta or expanded tensor).
void check_can_be_loaded(const std::string& name, const at::Tensor& tensor);

/// Returns the names of the parameters that do not require gradients, one per line.
std::string frozen_parameters(const torch::nn::Module& module);

/// Saves parameters and buffers by name, and `requires_grad` of parameters. Loading copies into the existing tensors.
void archive_module(Archive& archive, torch::nn::Module& module, const std::vector<std::string>& leave_out = {});

/// Returns the default generators of the CPU and of the CUDA devices in use, by device name. Skips other devices, since
/// getting a device's generator would initialise the device.
std::map<std::string, at::Generator> default_generators();

Archive::Tensors states_of_generators();
/// Throws if a generator is missing (unless `changes_allowed`) or a state does not fit.
void check_generators(const Archive::Tensors& states, bool changes_allowed);
void set_generators(const Archive::Tensors& states);
void archive_generators(Archive& archive);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/state/pieces.ipp>
#endif
