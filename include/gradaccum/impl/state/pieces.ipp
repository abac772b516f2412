// SPDX-License-Identifier: Apache-2.0
// Archives tensors and random states, which are all checked before any is changed.
#pragma once

#include <gradaccum/detail/state/pieces.hpp>

#include <gradaccum/detail/kernels/dynamic_map.hpp>
#include <gradaccum/detail/types/types.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <charconv>
#include <mutex>
#include <variant>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

GRADACCUM_INLINE std::string PieceName::text() const {
  auto text = plain_text(parameter, "[", begin, ":", end, " of ");
  for (std::size_t i = 0; i < sizes.size(); ++i) text += plain_text(i > 0 ? "x" : "", sizes[i]);
  return text + "]";
}

GRADACCUM_INLINE std::optional<PieceName> PieceName::of(std::string_view text) {
  const auto bracket = text.rfind('[');
  if (bracket == text.npos) return {};
  auto numbers = text.substr(bracket + 1);
  const auto next = [&numbers](std::string_view separator) {
    std::int64_t number = -1;
    const auto* const last = std::from_chars(numbers.data(), numbers.data() + numbers.size(), number).ptr;
    const auto digits = static_cast<std::size_t>(last - numbers.data());
    numbers.remove_prefix(std::min(numbers.size(), digits + separator.size()));
    return number;
  };
  PieceName name{.parameter = std::string(text.substr(0, bracket)), .begin = next(":"), .end = next(" of ")};
  bool counts = name.begin >= 0 && name.end >= 0;
  while (counts && !numbers.empty() && numbers != "]") counts = name.sizes.emplace_back(next("x")) >= 0;
  if (!counts || name.text() != text) return {};  // checks the separators, too
  return name;
}

GRADACCUM_INLINE std::string without_rank(const std::string& name) {
  if (!name.starts_with("rank_")) return name;
  const auto digits = name.find_first_not_of("0123456789", 5);
  return digits != name.npos && digits > 5 && name[digits] == '.' ? name.substr(digits + 1) : name;
}

GRADACCUM_INLINE void Pieces::add(PieceName piece, at::Tensor tensor) {
  TORCH_CHECK(by_begin_.empty() || sizes_ == piece.sizes, "Archive: the pieces of ", name_,
              " must be of one shape, got ", at::IntArrayRef(sizes_), " and ", at::IntArrayRef(piece.sizes));
  sizes_ = std::move(piece.sizes);
  const bool is_new = by_begin_.emplace(piece.begin, Piece{piece.begin, piece.end, std::move(tensor)}).second;
  TORCH_CHECK(is_new, "Archive: two pieces of ", name_, " begin at ", piece.begin);
}

GRADACCUM_INLINE void Pieces::check() const {
  std::int64_t elements = 1, filled = 0;
  for (auto size : sizes_)
    TORCH_CHECK(!__builtin_mul_overflow(elements, size, &elements), "Archive: ", name_, " is too large");
  for (auto& [begin, piece] : by_begin_) {
    TORCH_CHECK(begin == filled && piece.end >= begin, "Archive: the pieces of ", name_,
                " must follow each other, got one from ", begin, " to ", piece.end, " after one to ", filled);
    filled = piece.end;
  }
  TORCH_CHECK(filled == elements, "Archive: the pieces of ", name_, " must be of all ", elements, " elements, got ",
              filled);
  if (by_begin_.size() == 1) return;  // any shape is valid
  const auto& one = first().tensor;
  for (auto& [begin, piece] : by_begin_)
    TORCH_CHECK(piece.tensor.defined() && one.defined() && piece.tensor.dim() <= 1 && piece.tensor.dim() == one.dim() &&
                    piece.tensor.scalar_type() == one.scalar_type(),
                "Archive: the pieces of ", name_, " must be rows of one dtype");
  const auto block = elements_of_number();
  for (auto& [begin, piece] : by_begin_) {
    TORCH_CHECK(
        is_number() || (block > 0 && begin % block == 0 && piece.tensor.numel() == numbers_of(piece.end - begin)),
        "Archive: the piece of ", name_, " from ", begin, " to ", piece.end, " has ", piece.tensor.numel(),
        " numbers, and the first one has ", one.numel(), " for ", first().end - first().begin);
    TORCH_CHECK(!is_number() || at::equal(piece.tensor, one), "Archive: the pieces of ", name_,
                " must have the same number");
  }
}

GRADACCUM_INLINE bool Pieces::is_number() const { return first().tensor.defined() && first().tensor.dim() == 0; }

GRADACCUM_INLINE std::int64_t Pieces::elements_of_number() const {
  const auto& [begin, end, tensor] = first();
  const auto elements = end - begin, numbers = tensor.numel();
  if (numbers == elements) return 1;
  return numbers == eight_bit_blocks(elements) ? eight_bit_block : 0;
}

GRADACCUM_INLINE std::int64_t Pieces::numbers_of(std::int64_t elements) const {
  return elements_of_number() == 1 ? elements : eight_bit_blocks(elements);
}

GRADACCUM_INLINE at::Tensor Pieces::whole() const {
  const at::NoGradGuard no_grad;
  const auto& one = first().tensor;
  if (!one.defined()) return one;
  if (by_begin_.size() == 1 || is_number()) return one.clone();
  check();
  const auto row = part(0, by_begin_.rbegin()->second.end);
  return elements_of_number() == 1 ? row.view(sizes_) : row;
}

GRADACCUM_INLINE at::Tensor Pieces::part(std::int64_t begin, std::int64_t end) const {
  const at::NoGradGuard no_grad;
  const auto block = elements_of_number();
  TORCH_CHECK(block > 0, "Archive: the pieces of ", name_, " must have a number for each element or block of it");
  std::vector<at::Tensor> rows;
  for (auto& [unused, piece] : by_begin_) {
    const auto from = std::max(begin, piece.begin), to = std::min(end, piece.end);
    if (from >= to) continue;
    rows.push_back(piece.tensor.reshape({-1}).narrow(0, (from - piece.begin) / block, numbers_of(to - from)));
  }
  return at::cat(rows);
}

GRADACCUM_INLINE std::map<std::string, Pieces> take_pieces(std::map<std::string, at::Tensor>& tensors) {
  std::map<std::string, Pieces> all;
  std::erase_if(tensors, [&all](auto& item) {
    auto name = PieceName::of(item.first);
    if (!name) return false;
    const auto whole = name->parameter;
    all.try_emplace(whole, whole).first->second.add(std::move(*name), std::move(item.second));
    return true;
  });
  return all;
}

GRADACCUM_INLINE Archive::Values take_shared_pieces(Archive::Values& values) {
  Archive::Values shared;
  std::map<std::string, at::Tensor> tensors;
  std::erase_if(values, [&](auto& value) {
    auto* const tensor = std::get_if<at::Tensor>(&value.second);
    if (tensor == nullptr || !PieceName::of(value.first)) return false;
    const auto [same, is_new] = shared.emplace(without_rank(value.first), *tensor);
    TORCH_CHECK(is_new, "Archive: two ranks have saved the piece ", same->first);
    tensors.emplace(same->first, *tensor);
    return true;
  });
  for (auto& [name, pieces] : take_pieces(tensors)) {
    pieces.check();
    TORCH_CHECK(!values.contains(name), "Archive: ", name, " is stored both whole and in pieces");
  }
  return shared;
}

GRADACCUM_INLINE NameOf::NameOf(const NamedParameters& parameters) {
  for (auto& item : parameters) names_.emplace(item.value().unsafeGetTensorImpl(), item.key());
}

GRADACCUM_INLINE const std::string& NameOf::operator()(const at::Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  TORCH_CHECK(found != names_.end(), "optimizer state: a parameter of shape ", parameter.sizes(),
              " has no name; pass the named_parameters() of the model that the optimizer steps");
  return found->second;
}

GRADACCUM_INLINE Archive::Tensors tensors_of_module(const torch::nn::Module& module) {
  Archive::Tensors all;
  const auto add = [&](const auto& named) {
    for (auto& item : named)
      if (item.value().defined()) all.emplace(item.key(), item.value());
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return all;
}

/// Describes a tensor: `weight, Float [2, 3]`.
GRADACCUM_INLINE std::string described(const std::string& name, const at::Tensor& tensor) {
  return c10::str(name, ", ", tensor.scalar_type(), " ", tensor.sizes());
}

GRADACCUM_INLINE std::string first_of(const std::vector<std::string>& lines) {
  constexpr std::size_t shown = 10;
  std::string text;
  for (std::size_t i = 0; i < std::min(lines.size(), shown); ++i) text += "\n  " + lines[i];
  if (lines.size() > shown) text += c10::str("\n  and ", lines.size() - shown, " more");
  return text;
}

GRADACCUM_INLINE void check_can_be_loaded(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_meta() && at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "the module's ", name,
              " must have memory for each of its elements, got ",
              tensor.is_meta() ? "a meta tensor" : "an expanded tensor", "; give it its own memory");
}

/// Lists the first differences between the names, dtypes and shapes of two sets of tensors.
GRADACCUM_INLINE std::string differences(const Archive::Tensors& saved, const Archive::Tensors& here) {
  std::vector<std::string> all;
  for (auto& [name, tensor] : saved) {
    const auto other = here.find(name);
    if (other == here.end())
      all.push_back("the state alone has " + described(name, tensor));
    else if (described(name, tensor) != described(name, other->second))
      all.push_back("the state has " + described(name, tensor) + ", the model " + described(name, other->second));
  }
  for (auto& [name, tensor] : here)
    if (!saved.contains(name)) all.push_back("the model alone has " + described(name, tensor));
  return first_of(all);
}

GRADACCUM_INLINE std::string frozen_parameters(const torch::nn::Module& module) {
  std::string frozen;
  for (auto& item : module.named_parameters())
    if (item.value().defined() && !item.value().requires_grad()) frozen += item.key() + "\n";
  return frozen;
}

/// Saves or loads which parameters are frozen. If changes are allowed, loading keeps the program's choice.
GRADACCUM_INLINE void archive_frozen(Archive& archive, torch::nn::Module& module) {
  std::optional frozen = frozen_parameters(module);
  archive("(frozen)", frozen);  // no tensor can have this name
  if (!archive.loading() || !frozen || archive.changes_allowed()) return;
  archive.when_all_fit([&module, lines = "\n" + *frozen] {
    for (auto& item : module.named_parameters()) {
      const bool learns = lines.find("\n" + item.key() + "\n") == lines.npos;
      if (item.value().defined() && item.value().requires_grad() != learns) item.value().set_requires_grad(learns);
    }
  });
}

GRADACCUM_INLINE void archive_module(Archive& archive, torch::nn::Module& module,
                                     const std::vector<std::string>& leave_out) {
  archive_frozen(archive, module);
  auto here = tensors_of_module(module);
  for (auto& name : leave_out)
    TORCH_CHECK(module.named_buffers().contains(name) && here.erase(name) > 0,
                "ModelState: leave_out must name buffers of the model, each once, got '", name, "'");
  if (!archive.loading()) return archive.tensors(here);
  Archive::Tensors saved;
  archive.tensors(saved);
  for (auto& name : leave_out) saved.erase(name);
  const auto different = differences(saved, here);
  TORCH_CHECK(different.empty() || archive.changes_allowed(),
              "ModelState: the state is from another model; {.allow_changes = true} loads what fits:", different);
  std::vector<std::pair<at::Tensor, at::Tensor>> loads;
  for (auto& [name, tensor] : saved) {
    const auto to = here.find(name);
    if (to == here.end() || described(name, tensor) != described(name, to->second)) continue;
    check_can_be_loaded(name, to->second);
    loads.emplace_back(to->second, tensor);
  }
  saved.clear();
  archive.when_all_fit([loads = std::move(loads)] {
    for (auto& [to, from] : loads) load_into(to, from);
  });
}

GRADACCUM_INLINE std::map<std::string, at::Generator> default_generators() {
  std::map<std::string, at::Generator> all{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (!at::globalContext().hasCUDA()) return all;
  auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex index = 0; index < cuda.getNumGPUs(); ++index) {
    const at::Device device(at::kCUDA, index);
    if (cuda.hasPrimaryContext(index)) all.emplace(device.str(), at::globalContext().defaultGenerator(device));
  }
  return all;
}

GRADACCUM_INLINE Archive::Tensors states_of_generators() {
  Archive::Tensors states;
  for (auto& [name, generator] : default_generators()) {
    const std::lock_guard lock(generator.mutex());
    states.emplace(name, generator.get_state());
  }
  return states;
}

GRADACCUM_INLINE void check_generators(const Archive::Tensors& states, bool changes_allowed) {
  auto generators = default_generators();
  TORCH_CHECK(changes_allowed || states.contains("cpu"), "RandomState: the state must have the CPU's generator");
  for (auto& [name, state] : states) {
    const auto known = generators.find(name);
    TORCH_CHECK(changes_allowed || known != generators.end(), "RandomState: the state has the generator of ", name,
                ", which this program does not use; move the model there first");
    if (known == generators.end()) continue;
    const std::lock_guard lock(known->second.mutex());
    auto probe = known->second.clone();
    probe.set_state(state.clone());
  }
}

GRADACCUM_INLINE void set_generators(const Archive::Tensors& states) {
  for (auto& [name, generator] : default_generators()) {
    const auto state = states.find(name);
    if (state == states.end()) continue;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state->second.clone());
  }
}

GRADACCUM_INLINE void archive_generators(Archive& archive) {
  auto states = archive.loading() ? Archive::Tensors() : states_of_generators();
  archive.tensors(states);
  if (!archive.loading()) return;
  check_generators(states, archive.changes_allowed());
  archive.when_all_fit([states] { set_generators(states); });
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
