// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: checkpoint

#include <gradaccum/checkpoint.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace gradaccum {

/// Decides how tensors that backward needs are kept, for a scope, like torch.autograd.graph.saved_tensors_hooks.
///
///     auto pack = [](const at::Tensor& t) { return std::pair(t.device(), t.to(torch::kCPU)); };
///     auto unpack = [](const auto& packed) { return packed.second.to(packed.first); };
///     auto loss = [&] {
///       ga::SavedTensorHooks hooks(pack, unpack);           // activations wait on the CPU
///       return torch::mse_loss(model->forward(x), y);
///     }();
///     loss.backward();                                      // may be outside: it unpacks what was packed
///
/// Keeps activations in 16 bits instead. Parameters stay as they are, since saving them takes no memory:
///
///     auto pack = [](const at::Tensor& t) {
///       const bool narrow = t.scalar_type() == torch::kFloat && !t.requires_grad();
///       return std::pair(t.scalar_type(), narrow ? t.to(torch::kBFloat16) : t);
///     };
///     auto unpack = [](const auto& packed) { return packed.second.to(packed.first); };
///     ga::SavedTensorHooks hooks(pack, unpack);
///
/// `pack` takes each tensor that an operation saves in the forward pass, without gradients, must not change it, and
/// returns any value. Parameters and other leaves come as they are, so `requires_grad()` identifies them; results come
/// detached. `unpack` takes that value and returns a tensor of the same shape, dtype and device, once for each backward
/// that needs it, on that backward's thread. Both are stored by value while the graph lives.
///
/// Scopes belong to their thread and nest; only the innermost pair is used. As without hooks, changing a tensor in
/// place after it was saved is an error in backward. The process's first scope installs an engine with such hooks,
/// which LibTorch lacks in C++; the constructor throws if Python's engine is loaded.
///
/// @note Does not synchronize. Makes a small heap allocation per saved tensor.
template <class Pack, class Unpack>
class [[nodiscard]] SavedTensorHooks final {
  using Packed = std::decay_t<std::invoke_result_t<Pack&, const at::Tensor&>>;
  static_assert(std::is_invocable_r_v<at::Tensor, Unpack&, const Packed&>,
                "SavedTensorHooks: unpack must take what pack returns, and return a tensor");

 public:
  SavedTensorHooks(Pack pack, Unpack unpack)
      : pair_(std::make_shared<Pair>(Pair{std::move(pack), std::move(unpack)})) {}
  static void* operator new(std::size_t) = delete;  // must end on its thread, before outer scopes

 private:
  struct Pair {
    Pack pack;
    Unpack unpack;
  };

  class PairHooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit PairHooks(std::shared_ptr<Pair> pair) : pair_(std::move(pair)) {}

    void call_pack_hook(const at::Tensor& tensor) override {
      version_ = detail::TensorVersion(tensor);
      traits_ = detail::TensorTraits(tensor);
      // Detaches results: an operation that owned its own result would never be freed.
      packed_.emplace(pair_->pack(tensor.is_leaf() ? tensor : tensor.tensor_data()));
    }
    at::Tensor call_unpack_hook() override {
      TORCH_CHECK(!version_.changed(), "SavedTensorHooks: a tensor that backward needs (", traits_,
                  ") must not change in place after it was saved; change a clone() of it");
      at::Tensor tensor = pair_->unpack(std::as_const(*packed_));
      TORCH_CHECK(tensor.defined() && detail::TensorTraits(tensor) == traits_,
                  "SavedTensorHooks: unpack must return what was packed, ", traits_, ", got ",
                  tensor.defined() ? c10::str(detail::TensorTraits(tensor)) : "an undefined tensor");
      return tensor;
    }

   private:
    std::shared_ptr<Pair> pair_;
    detail::TensorVersion version_;
    detail::TensorTraits traits_;
    std::optional<Packed> packed_;
  };

  std::shared_ptr<Pair> pair_;
  detail::SavingScope scope_{"SavedTensorHooks", [this] { return std::make_unique<PairHooks>(pair_); }};
};

}  // namespace gradaccum
