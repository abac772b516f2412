// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/detail/window/late_tensors.hpp>

#include <ATen/record_function.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using gradaccum::detail::LateTensors;

namespace {

constexpr auto advice = "call wait() first";

/// Tensors of 1, 2, …, that become 10 times as large when they arrive.
class Late {
 public:
  explicit Late(std::vector<at::Tensor> given) : tensors(std::move(given)) {
    for (auto& tensor : tensors) memory_.push_back(tensor.detach());
    begin();
  }
  explicit Late(std::size_t number) : Late(numbers(number)) {}

  void begin() {
    late_.emplace(
        tensors,
        [this](std::size_t i) {
          if (i == fails_at) throw std::runtime_error("the cable is cut");
          arrived.push_back(i);
          memory_[i].mul_(10);
        },
        advice);
  }
  void wait() { late_->wait(); }
  void forget() { late_.reset(); }

  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> arrived;
  std::optional<std::size_t> fails_at;

 private:
  static std::vector<at::Tensor> numbers(std::size_t number) {
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < number; ++i) all.push_back(torch::full({2, 2}, 1.0 + static_cast<double>(i)));
    return all;
  }

  std::vector<at::Tensor> memory_;
  std::optional<LateTensors> late_;
};

using Places = std::vector<std::size_t>;

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("LateTensors: an operation waits for those that it is given, and for no others") {
  Late late(3);
  CHECK(torch::equal(late.tensors[1] + 1, torch::full({2, 2}, 21.0)));
  CHECK(late.arrived == Places{1});
  CHECK(late.tensors[1].data_ptr<float>()[3] == 20);
  CHECK(torch::ones({2}).sum().item<float>() == 2);
  CHECK(late.arrived == Places{1});
  late.wait();
  CHECK(late.arrived == Places{1, 0, 2});
  late.wait();
  CHECK(late.arrived.size() == 3);
  CHECK(late.tensors[2].data_ptr<float>()[0] == 30);
  CHECK_FALSE(at::hasThreadLocalCallbacks());
}

TEST_CASE("LateTensors: in whatever form an operation is given one") {
  Late late(1);
  auto& x = late.tensors[0];
  const auto ten = torch::full({2, 2}, 10.0);
  SECTION("of a list") { CHECK(torch::equal(torch::cat({ten, x}), torch::full({4, 2}, 10.0))); }
  SECTION("of many at once") { CHECK(torch::equal(at::_foreach_add({ten, x}, 1)[1], ten + 1)); }
  SECTION("in place") { CHECK(torch::equal(x.add_(1), ten + 1)); }
  SECTION("as what is written to") {
    at::add_out(x, ten, ten);
    CHECK(torch::equal(x, ten * 2));
  }
  SECTION("as an optional weight") {
    CHECK(at::layer_norm(torch::zeros({2, 2}), {2, 2}, x, x).sum().item<float>() == 40);
  }
  SECTION("a view") { CHECK(x.t().contiguous().sum().item<float>() == 40); }
  SECTION("a number of it") { CHECK(x[0][1].item<float>() == 10); }
  SECTION("a copy") { CHECK(x.to(at::kDouble).sum().item<double>() == 40); }
  SECTION("without gradients") {
    const torch::NoGradGuard no_grad;
    CHECK(torch::equal(x * 1, ten));
  }
  SECTION("for inference alone") {
    const c10::InferenceMode inference;
    CHECK(torch::equal(x * 1, ten));
  }
  SECTION("in a module") {
    torch::nn::Linear linear(2, 2);
    linear->weight.set_data(x.clone());
    Late of_module({linear->weight, linear->bias});
    const auto y = linear->forward(torch::ones({1, 2}));
    CHECK(of_module.arrived.size() == 2);
    y.sum().backward();
    CHECK(torch::equal(linear->weight.grad(), torch::ones({2, 2})));
  }
  CHECK(late.arrived == Places{0});
}

TEST_CASE("LateTensors: whoever has the same memory waits, too") {
  auto whole = torch::arange(1, 7).to(at::kFloat);
  const auto seen_before = whole.narrow(0, 3, 3);
  Late late({whole.narrow(0, 0, 3), whole.narrow(0, 3, 3)});
  CHECK(seen_before.sum().item<float>() == 150);
  CHECK(late.arrived == Places{0, 1});
}

TEST_CASE("LateTensors: nobody gets an address before") {
  Late late(2);
  const auto expect_advice = [&](const std::function<void()>& work) {
    CHECK_THAT(error_of(work), Catch::Contains(advice));
    CHECK(late.arrived.empty());
  };
  auto& x = late.tensors[0];
  expect_advice([&] { x.data_ptr<float>(); });
  expect_advice([&] { x.const_data_ptr(); });
  expect_advice([&] { x.storage().data(); });
  expect_advice([&] { x.accessor<float, 2>()[0][0] = 1; });
  expect_advice([&] {
    std::ostringstream file;
    torch::save(x, file);
  });
  SECTION("nor an operation of another thread") {
    std::string error;
    std::thread([&] { error = error_of([&] { static_cast<void>(x + 1); }); }).join();
    CHECK_THAT(error, Catch::Contains(advice));
  }
  SECTION("nor one that nobody may watch") {
    const at::DisableRecordFunctionGuard unwatched;
    expect_advice([&] { static_cast<void>(x + 1); });
  }
  CHECK(x.sizes() == at::IntArrayRef{2, 2});  // that is known
  CHECK(x.nbytes() == 16);
  CHECK(x.storage().nbytes() == 16);
  late.wait();
  CHECK(x.data_ptr<float>()[0] == 10);
}

TEST_CASE("LateTensors: what cannot arrive is an error for whoever reads it, and so is all that has not arrived yet") {
  Late late(3);
  late.fails_at = 1;
  CHECK(late.tensors[0].sum().item<float>() == 40);
  for (std::size_t i : {1, 2, 1}) {
    const auto error = error_of([&] { static_cast<void>(late.tensors[i] + 1); });
    CHECK_THAT(error, Catch::Contains("the cable is cut"));
    CHECK_THAT(error_of([&] { late.tensors[i].t().contiguous(); }), Catch::Contains("the cable is cut"));
  }
  CHECK(late.tensors[0].sum().item<float>() == 40);
  CHECK_THROWS_WITH(late.wait(), "the cable is cut");
  CHECK_THROWS_WITH(late.wait(), "the cable is cut");
  late.forget();
  CHECK_THAT(error_of([&] { late.tensors[2].data_ptr(); }), Catch::Contains("the cable is cut"));
  CHECK_FALSE(at::hasThreadLocalCallbacks());
}

TEST_CASE("LateTensors: those that nobody waits for stay without an address") {
  Late late(1);
  late.forget();
  CHECK_THAT(error_of([&] { static_cast<void>(late.tensors[0] + 1); }), Catch::Contains(advice));
  CHECK(late.arrived.empty());
  CHECK_FALSE(at::hasThreadLocalCallbacks());
}

TEST_CASE("LateTensors: a graph from before has other numbers, one from after has these") {
  auto w = torch::full({2, 2}, 1.0).requires_grad_();
  const auto before = (w * w).sum();
  Late late({w});
  const auto after = (w * w).sum();
  CHECK(after.item<float>() == 400);
  CHECK_THAT(error_of([&] { before.backward(); }), Catch::Contains("modified by an inplace operation"));
  late.wait();
  after.backward();
  CHECK(torch::equal(w.grad(), torch::full({2, 2}, 20.0)));
}

TEST_CASE("LateTensors: a backward pass waits for what it reads first") {
  struct ReadsLater : torch::autograd::Function<ReadsLater> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Late* late) {
      context->saved_data["late"] = reinterpret_cast<std::int64_t>(late);
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      const auto* const late = reinterpret_cast<const Late*>(context->saved_data["late"].toInt());
      return {gradients[0] * late->tensors[0], at::Tensor()};
    }
  };
  Late late(1);
  auto x = torch::ones({2, 2}).requires_grad_();
  const auto y = ReadsLater::apply(x, &late).sum();
  CHECK(late.arrived.empty());
  y.backward();
  CHECK(torch::equal(x.grad(), torch::full({2, 2}, 10.0)));
}

TEST_CASE("LateTensors: several at once, and one after another") {
  auto first = std::make_unique<Late>(2);
  Late second(1);
  CHECK(second.tensors[0].sum().item<float>() == 40);
  CHECK(first->tensors[1].sum().item<float>() == 80);
  first->wait();
  first.reset();
  CHECK(at::hasThreadLocalCallbacks());
  second.wait();
  CHECK_FALSE(at::hasThreadLocalCallbacks());
  second.begin();
  CHECK(second.tensors[0].sum().item<float>() == 400);
  gradaccum::detail::wait_for_late_tensors();
  CHECK(second.arrived.size() == 2);
}
