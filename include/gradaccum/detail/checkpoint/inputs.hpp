// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/checkpoint/tensor_version.hpp>
#include <gradaccum/detail/checkpoint/tensors_of.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace gradaccum::detail {

/// A copy that lasts: of what only looks at memory of the caller's, that memory too.
template <class Input>
std::decay_t<const Input&> lasting_copy(const Input& input) {
  return input;
}
template <class T>
std::vector<T> lasting_copy(const c10::ArrayRef<T>& input) {
  return input.vec();
}
template <class T>
std::vector<std::remove_cv_t<T>> lasting_copy(const std::span<T>& input) {
  return {input.begin(), input.end()};
}
template <class Input>
using kept_t = decltype(lasting_copy(std::declval<const std::remove_reference_t<Input>&>()));

/// The arguments of a call that will be made again.
///
/// Tensors are kept as an operation of autograd keeps what it saves: hooks around the checkpoint see them, checkpoints
/// around it forget them, and a change in place is noticed.
template <class... Inputs>
class CheckpointInputs {
  static_assert((std::is_copy_constructible_v<kept_t<Inputs>> && ...),
                "checkpoint: inputs must be copyable, since the function is called with them again");

 public:
  explicit CheckpointInputs(const std::remove_reference_t<Inputs>&... inputs) : values_(lasting_copy(inputs)...) {
    auto keep = [this](at::Tensor& tensor) {
      versions_.emplace_back(tensor);
      tensors_.emplace_back(std::exchange(tensor, at::Tensor()), /*is_output=*/false);
    };
    for_each_tensor(values_, keep);
  }

  /// `function(inputs...)`, with inputs of the same kinds as before.
  template <class Function>
  void call(Function& function) const {
    auto values = values_;
    std::size_t next = 0;
    auto bring_back = [&](at::Tensor& tensor) {
      tensor = tensors_[next++].unpack();
      // Another handle: a hook that the function puts on its input has been put there before.
      if (tensor.requires_grad() && tensor.layout() == at::kStrided) tensor = tensor.alias();
    };
    for_each_tensor(values, bring_back);
    std::apply([&](auto&... value) { function(as<Inputs>(value)...); }, values);
  }

  /// The function, just done, has left its inputs as they were: it could not be repeated otherwise.
  void check_unchanged() {
    const auto changed = std::ranges::find_if(versions_, &TensorVersion::changed);
    if (changed == versions_.end()) return;
    for (auto& tensor : tensors_) tensor.reset_data();  // now owned by an operation that owns it
    TORCH_CHECK(false, "checkpoint: the function must leave its inputs as they are, and changes tensor ",
                changed - versions_.begin(),
                " of them in place, so that running it again would start from something else; let it clone that "
                "input first (an inplace activation at its beginning: without inplace)");
  }

 private:
  template <class Input>
  static decltype(auto) as(kept_t<Input>& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<Input>, kept_t<Input>>) {
      return static_cast<Input&&>(value);
    } else {
      return (value);
    }
  }

  std::tuple<kept_t<Inputs>...> values_;
  std::vector<torch::autograd::SavedVariable> tensors_;
  std::vector<TensorVersion> versions_;
};

}  // namespace gradaccum::detail
