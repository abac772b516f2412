// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/archive.hpp>

#include <array>

namespace inner = gradaccum::detail;

namespace {

at::Tensor numbers() { return torch::arange(6, torch::kFloat).view({2, 3}).clone(); }

/// The result of loading a tensor: whether it has the numbers, and whether they were copied into its memory.
struct Loaded {
  bool equal, copied;
};
Loaded load(const at::Tensor& to, at::Tensor from, bool keep = false) {
  const auto expected = from.to(to.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  const auto* const memory = to.const_data_ptr();
  const auto other = keep ? from : at::Tensor();
  inner::load_into(to, from);
  return {to.equal(expected), to.const_data_ptr() == memory};
}

}  // namespace

TEST_CASE("owned: a tensor is kept if nothing else refers to it or its memory, and copied otherwise") {
  const auto kept = [](at::Tensor tensor) {
    const auto* const memory = tensor.defined() ? tensor.const_data_ptr() : nullptr;
    const auto expected = tensor.defined() ? tensor.detach().clone() : at::Tensor();
    const auto result = inner::owned(std::move(tensor));
    CHECK((!expected.defined() || (result.equal(expected) && !result.requires_grad())));
    return result.defined() && result.const_data_ptr() == memory;
  };
  CHECK(kept(numbers()));
  CHECK(kept(torch::tensor(1.5)));
  CHECK_FALSE(kept(at::Tensor()));
  const auto shared = numbers();
  CHECK_FALSE(kept(shared));           // another handle exists
  CHECK_FALSE(kept(shared.detach()));  // its memory is shared
  CHECK_FALSE(kept(numbers().t()));    // strides are not contiguous
  CHECK_FALSE(kept(numbers()[1]));     // the memory is larger than the tensor
  CHECK_FALSE(kept(numbers().requires_grad_()));
  std::array<float, 6> lent{1, 2, 3, 4, 5, 6};
  CHECK_FALSE(kept(at::from_blob(lent.data(), {2, 3})));
}

TEST_CASE("load_into: memory is exchanged if that cannot be observed, and copied otherwise") {
  const auto is = [](Loaded loaded, bool copied) { return loaded.equal && loaded.copied == copied; };
  CHECK(is(load(torch::zeros({2, 3}), numbers()), false));
  CHECK(is(load(torch::zeros({}), torch::tensor(2.5f)), false));
  CHECK(is(load(torch::zeros({2, 3}).requires_grad_(), numbers()), false));

  CHECK(is(load(torch::zeros({2, 3}), numbers(), /*keep=*/true), true));
  CHECK(is(load(torch::zeros({2, 3}), numbers().t().contiguous().t()), true));
  CHECK(is(load(torch::zeros({3, 2}).t(), numbers()), true));
  CHECK(is(load(torch::zeros({4, 3}).slice(0, 2), numbers()), true));
  CHECK(is(load(torch::zeros({4, 3}).slice(0, 0, 2), numbers()), true));
  CHECK(is(load(torch::zeros({2, 3}, torch::kDouble), numbers()), true));
  std::array<float, 6> lent{};
  CHECK(is(load(at::from_blob(lent.data(), {2, 3}), numbers()), true));
  CHECK(lent[5] == 5);
  std::array<float, 6> file{1, 2, 3, 4, 5, 6};
  const auto to = torch::zeros({2, 3});
  CHECK(is(load(to, at::from_blob(file.data(), {2, 3})), true));
  file.fill(0);
  CHECK(to.sum().item<float>() == 21);

  const auto nothing = torch::zeros({0, 3});
  inner::load_into(nothing, torch::zeros({0, 3}));
  CHECK(nothing.numel() == 0);
}

TEST_CASE("load_into: tensors that share the memory change, too, and the loaded tensor stays valid") {
  const auto to = torch::zeros({2, 3}).requires_grad_();
  const auto alias = to.detach(), row = to.detach()[1];
  auto loaded = numbers();
  inner::load_into(to, loaded);
  CHECK(alias.equal(numbers()));
  CHECK(row.equal(numbers()[1]));
  alias.add_(1);
  CHECK(to.equal(numbers() + 1));
  CHECK(loaded.equal(torch::zeros({2, 3})));  // has the old numbers
  CHECK(to.requires_grad());
}

TEST_CASE("load_into: an earlier graph detects the change, as it detects a copy") {
  for (const bool swaps : {true, false}) {
    const auto weight = torch::ones({2, 3}).requires_grad_();
    const auto loss = (weight * weight).sum();
    const auto loaded = numbers(), other = swaps ? at::Tensor() : loaded;
    inner::load_into(weight, loaded);
    CHECK_THROWS_WITH(loss.backward(), Catch::Contains("modified by an inplace operation"));
  }
  const auto weight = torch::ones({2, 3}).requires_grad_();
  (weight * weight).sum().backward();  // without loading, backward succeeds
  CHECK(weight.grad().equal(torch::full({2, 3}, 2)));
}
