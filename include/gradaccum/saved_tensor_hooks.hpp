// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/checkpoint/saving_scope.hpp>
#include <gradaccum/detail/checkpoint/tensor_traits.hpp>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace gradaccum {

namespace detail {

/// One tensor that is packed until backward, and must come back as it was.
class PackedTensor : public torch::autograd::SavedVariableHooks {
 public:
  GRADACCUM_INLINE void call_pack_hook(const at::Tensor& tensor) override;
  GRADACCUM_INLINE at::Tensor call_unpack_hook() override;

 private:
  virtual void pack(at::Tensor tensor) = 0;
  virtual at::Tensor unpack() = 0;

  TensorVersion version_;
  TensorTraits traits_;
};

}  // namespace detail

/// torch.autograd.graph.saved_tensors_hooks as a scope: says how the tensors that backward needs are kept until then.
///
///     auto pack = [](const at::Tensor& t) { return std::pair(t.device(), t.to(torch::kCPU)); };
///     auto unpack = [](const auto& packed) { return packed.second.to(packed.first); };
///     auto loss = [&] {
///       ga::SavedTensorHooks hooks(pack, unpack);           // activations wait on the CPU
///       return torch::mse_loss(model->forward(x), y);
///     }();
///     loss.backward();                                      // may be outside: it unpacks what was packed
///
/// In 16 bits instead, but for the parameters, which take no memory of their own:
///
///     auto pack = [](const at::Tensor& t) {
///       const bool narrow = t.scalar_type() == torch::kFloat && !t.requires_grad();
///       return std::pair(t.scalar_type(), narrow ? t.to(torch::kBFloat16) : t);
///     };
///     auto unpack = [](const auto& packed) { return packed.second.to(packed.first); };
///     ga::SavedTensorHooks hooks(pack, unpack);
///
/// `pack` takes each tensor that an operation saves, in the forward pass, without gradients, and returns anything;
/// it must not change the tensor. Parameters and other leaves come as they are, so `requires_grad()` tells them;
/// results come detached. `unpack` takes that and returns a tensor of the same shape, dtype and device, once for each
/// backward that needs it, on the thread of that backward. Both are kept, by value, as long as the graph is.
///
/// Scopes belong to their thread and nest; the innermost pair alone is asked. As without hooks, a tensor that was
/// changed in place after it was saved is an error in backward, though a copy might have been right.
///
/// LibTorch's C++ side has no such hooks: an engine of our own, put in place by the first scope of the process, answers
/// for them. With Python's engine loaded in the process the constructor throws.
///
/// @note Does not wait for the device. A small allocation on the heap for each saved tensor.
template <class Pack, class Unpack>
class [[nodiscard]] SavedTensorHooks final : detail::SavingScope {
  using Packed = std::decay_t<std::invoke_result_t<Pack&, const at::Tensor&>>;
  static_assert(std::is_invocable_r_v<at::Tensor, Unpack&, const Packed&>,
                "SavedTensorHooks: unpack must take what pack returns, and return a tensor");

 public:
  SavedTensorHooks(Pack pack, Unpack unpack)
      : SavingScope("SavedTensorHooks"), pair_(std::make_shared<Pair>(std::move(pack), std::move(unpack))) {}
  static void* operator new(std::size_t) = delete;  // a scope: ends on its thread, before those around it

 private:
  struct Pair {
    Pair(Pack p, Unpack u) : pack(std::move(p)), unpack(std::move(u)) {}
    Pack pack;
    Unpack unpack;
  };

  class Hooks final : public detail::PackedTensor {
   public:
    explicit Hooks(std::shared_ptr<Pair> pair) : pair_(std::move(pair)) {}

   private:
    void pack(at::Tensor tensor) override { packed_.emplace(pair_->pack(std::move(tensor))); }
    at::Tensor unpack() override { return pair_->unpack(std::as_const(*packed_)); }

    std::shared_ptr<Pair> pair_;
    std::optional<Packed> packed_;
  };

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(pair_); }

  std::shared_ptr<Pair> pair_;
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/saved_tensor_hooks.ipp>
#endif
