// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

int batch_size = 64;  // a user's global variable must not hide batch_size()

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/detail/data/samples.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>
#include <gradaccum/detail/training/loop.hpp>
#include <gradaccum/detail/types/types.hpp>
#include <gradaccum/metrics.hpp>

#include <array>
#include <cmath>
#include <forward_list>
#include <limits>
#include <list>
#include <map>
#include <unordered_map>

namespace ga = gradaccum;
namespace inner = gradaccum::detail;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

struct Net : torch::nn::Module {
  torch::nn::Linear frozen{1, 1};
  torch::nn::Sequential block{torch::nn::Linear(1, 1), torch::nn::Dropout()};
  Net() {
    register_module("frozen", frozen);
    register_module("block", block);
  }
  std::vector<bool> modes() const {
    std::vector<bool> modes{is_training()};
    for (auto& part : this->modules(false)) modes.push_back(part->is_training());
    return modes;
  }
};

const std::vector<bool> all(5, true), none(5, false);

}  // namespace

TEST_CASE("ModeGuard: sets all modules to a mode, and restores each one's own") {
  Net net;  // on the stack: it has no shared_ptr
  net.frozen->eval();
  net.block[1]->as<torch::nn::Dropout>()->eval();
  const auto before = net.modes();
  REQUIRE(before == std::vector<bool>{true, false, true, true, false});
  {
    const inner::ModeGuard evaluation(net, false);
    CHECK(net.modes() == none);
    {
      const inner::ModeGuard training(net, true);
      CHECK(net.modes() == all);
    }
    CHECK(net.modes() == none);
  }
  CHECK(net.modes() == before);
}

TEST_CASE("ModeGuard: a model in that mode keeps its frozen parts") {
  Net net;
  net.frozen->eval();
  const auto before = net.modes();
  {
    const inner::ModeGuard training(net, true);
    CHECK(net.modes() == before);
  }
  CHECK(net.modes() == before);
  {
    const inner::ModeGuard training(net, true);
    net.eval();  // as changed by a callback
  }
  CHECK(net.modes() == before);
}

TEST_CASE("ModeGuard: a part inside of another, in a different mode") {
  Net net;
  net.eval();
  net.block[1]->as<torch::nn::Dropout>()->train();  // Monte Carlo dropout
  const auto before = net.modes();
  {
    const inner::ModeGuard training(net, true);
    CHECK(net.modes() == all);
  }
  CHECK(net.modes() == before);
}

TEST_CASE("ModeGuard: an exception in its scope") {
  Net net;
  net.frozen->eval();
  const auto before = net.modes();
  REQUIRE_ERROR("thrown", [&] {
    const inner::ModeGuard evaluation(net, false);
    TORCH_CHECK(false, "thrown");
  }());
  CHECK(net.modes() == before);
}

TEST_CASE("ModeGuard: a part that two others share") {
  struct Shares : torch::nn::Module {
    torch::nn::Sequential first, second;
    torch::nn::Linear shared{1, 1};
    Shares() {
      first->push_back("shared", shared);
      second->push_back("shared", shared);
      register_module("first", first);
      register_module("second", second);
    }
  } net;
  net.first->eval();
  net.shared->train();
  net.second->eval();
  net.shared->train();
  { const inner::ModeGuard evaluation(net, false); }
  CHECK(net.is_training());
  CHECK_FALSE(net.first->is_training());
  CHECK_FALSE(net.second->is_training());
  CHECK(net.shared->is_training());
}

TEST_CASE("ModeGuard: a part that was replaced in its scope") {
  Net net;
  net.frozen->eval();
  const auto old = net.frozen;
  {
    const inner::ModeGuard evaluation(net, false);
    net.frozen = net.replace_module("frozen", torch::nn::Linear(1, 1));
    net.frozen->eval();
  }
  CHECK_FALSE(old->is_training());
  CHECK(net.frozen->is_training());  // the new one has the model's mode
  CHECK(net.block->is_training());
}

namespace {

// A user's model whose BatchNorm stays frozen.
struct StaysFrozen : Net {
  int called = 0;
  void train(bool on) override {
    ++called;
    Net::train(on);
    frozen->eval();
  }
};

struct Throws : Net {
  int throws_at = 0, called = 0;
  void train(bool on) override {
    Net::train(on);
    TORCH_CHECK(++called != throws_at, "train threw");
  }
};

}  // namespace

TEST_CASE("ModeGuard: calls a user's override of train()") {
  StaysFrozen net;
  net.frozen->eval();
  const auto before = net.modes();
  {
    const inner::ModeGuard evaluation(net, false);
    CHECK(net.called == 1);
  }
  CHECK(net.called == 2);
  CHECK(net.modes() == before);
  { const inner::ModeGuard training(net, true); }
  CHECK(net.called == 2);  // no further call is needed
}

TEST_CASE("ModeGuard: a train() that throws, at the start and at the end") {
  Throws net;
  net.frozen->eval();
  const auto before = net.modes();
  SECTION("at the start") {
    net.throws_at = 1;
    REQUIRE_ERROR("train threw", inner::ModeGuard(net, false));
    CHECK(net.modes() == before);
  }
  SECTION("at the end: the parts come back all the same") {
    net.throws_at = 2;
    { const inner::ModeGuard evaluation(net, false); }
    CHECK(net.called == 2);
    CHECK(net.modes() == before);
  }
}

namespace others {

struct Batch {
  std::int64_t rows;
  at::Tensor data = {};
};
std::int64_t batch_size(const Batch& batch) { return batch.rows; }

struct Friendly {
  friend int batch_size(const Friendly&) { return 11; }
};

struct Sized {
  at::Tensor data;
  std::size_t size() const { return 6; }
};

struct HasDataFunction {
  const double* data() const { return nullptr; }
};

class Private {
  [[maybe_unused]] int data = 3;
};

}  // namespace others

TEST_CASE("samples_of: the rows of a tensor") {
  CHECK(inner::samples_of(torch::zeros({5, 2})) == 5);
  CHECK(inner::samples_of(torch::zeros({0, 2})) == 0);
  CHECK(inner::samples_of(torch::zeros({})) == 1);
  CHECK(inner::samples_of(at::Tensor()) == 1);
}

TEST_CASE("samples_of: the rows of a member named data") {
  CHECK(inner::samples_of(torch::data::Example<>(torch::zeros({5, 2}), torch::zeros({7}))) == 5);
  CHECK(inner::samples_of(torch::data::TensorExample(torch::zeros({5, 2}))) == 5);
  CHECK(inner::samples_of(ga::data::Batch{torch::zeros({4}), torch::zeros({7})}) == 4);
  CHECK(inner::samples_of(others::Sized{torch::zeros({4})}) == 6);  // by its batch_size()
  CHECK(inner::samples_of(others::HasDataFunction{}) == 1);
  CHECK(inner::samples_of(others::Private{}) == 1);
}

TEST_CASE("samples_of: lists, tuples and maps") {
  const auto rows = torch::zeros({5, 2}), other = torch::zeros({7});
  CHECK(inner::samples_of(std::vector<torch::data::Example<>>(3, {rows, other})) == 3);
  CHECK(inner::samples_of(std::list<double>{1, 2}) == 2);
  CHECK(inner::samples_of(std::vector<at::Tensor>{rows, other}) == 2);
  CHECK(inner::samples_of(std::array<double, 4>{}) == 4);
  CHECK(inner::samples_of(std::array<at::Tensor, 2>{rows, other}) == 5);
  CHECK(inner::samples_of(std::pair(rows, other)) == 5);
  CHECK(inner::samples_of(std::tuple(rows, other, 3)) == 5);
  CHECK(inner::samples_of(std::tuple(std::pair(other, rows), rows)) == 7);
  CHECK(inner::samples_of(std::map<std::string, at::Tensor>{{"a", rows}, {"b", other}}) == 5);
  CHECK(inner::samples_of(std::unordered_map<std::string, at::Tensor>{{"a", other}}) == 7);
  CHECK(inner::samples_of(std::map<std::string, at::Tensor>{}) == 0);
}

TEST_CASE("samples_of: a user's batch_size takes precedence") {
  CHECK(inner::samples_of(others::Batch{.rows = 9, .data = torch::zeros({2})}) == 9);
  CHECK(inner::samples_of(others::Friendly{}) == 11);
  CHECK(inner::samples_of(std::pair(others::Batch{.rows = 9}, 1)) == 9);
}

TEST_CASE("samples_of: a text is one sample, and so is an unknown type") {
  CHECK(inner::samples_of(std::string("three words long")) == 1);
  CHECK(inner::samples_of("a literal") == 1);
  CHECK(inner::samples_of(std::pair(std::string("name"), torch::zeros({2}))) == 1);
  CHECK(inner::samples_of(std::vector<std::string>{"a", "b"}) == 2);
  CHECK(inner::samples_of(3.5) == 1);
  CHECK(inner::samples_of(std::optional<int>()) == 1);
}

TEST_CASE("batches_of: the range's size if it has one") {
  CHECK(inner::batches_of(std::vector<int>(3)) == 3);
  CHECK(inner::batches_of(ga::data::TensorBatches(torch::zeros({5, 1}), torch::zeros({5}), {.batch_size = 2})) == 3);
  CHECK_FALSE(inner::batches_of(std::forward_list<int>{1, 2}));
}

TEST_CASE("WeightedMean: in float64, of numbers and of tensors") {
  inner::WeightedMean mean;
  CHECK(std::isnan(mean.value().item<double>()));
  CHECK(mean.weight() == 0);
  mean.add(1.0, 1);
  mean.add(torch::tensor({5.0f}), 3);
  CHECK(mean.value().item<double>() == 4.0);
  CHECK(mean.value().dim() == 0);
  CHECK(mean.value().scalar_type() == at::kDouble);
  CHECK(mean.weight() == 4);
  mean.add(torch::tensor(not_a_number), 0);
  CHECK(mean.value().item<double>() == 4.0);
  auto with_grad = torch::tensor(8.0, at::kDouble).set_requires_grad(true) * 1;
  mean.add(with_grad, 4);
  CHECK(mean.value().item<double>() == 6.0);
  CHECK_FALSE(mean.value().requires_grad());
  mean.add(torch::tensor(1.0, at::kHalf), 1e9);  // weights beyond the range of 16-bit numbers
  CHECK(mean.value().item<double>() == Approx(1.0).epsilon(1e-6));
  mean.add(torch::tensor(not_a_number), 1);
  CHECK(std::isnan(mean.value().item<double>()));
}

TEST_CASE("WeightedMean: many small numbers are not lost") {
  inner::WeightedMean mean;
  for (int i = 0; i < 100'000; ++i) mean.add(torch::tensor(0.1f), 1);
  CHECK(mean.value().item<double>() == Approx(0.1f).epsilon(1e-12));
}

TEST_CASE("WeightedMean: on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  inner::WeightedMean mean;
  mean.add(torch::tensor({1.0f}).cuda().set_requires_grad(true), 1);
  mean.add(torch::tensor(5.0, at::kHalf).cuda(), 2);
  mean.add(torch::tensor(not_a_number).cuda(), 0);
  mean.add(5.0, 1);
  CHECK(mean.value().is_cuda());
  CHECK(mean.value().dim() == 0);
  CHECK(mean.value().scalar_type() == at::kDouble);
  CHECK_FALSE(mean.value().requires_grad());
  CHECK(mean.value().item<double>() == 4.0);
}

TEST_CASE("occupied_memory: of this process, from Linux") {
  const auto before = inner::occupied_memory(at::kCPU);
  REQUIRE(before);
  CHECK(*before > 1 << 20);
  constexpr std::int64_t bytes = 64 << 20;
  const auto reserved = torch::empty({bytes}, at::kByte);  // takes no memory before it is written to
  CHECK(*inner::occupied_memory(at::kCPU) - *before < bytes / 2);
  const auto block = torch::ones({bytes}, at::kByte);
  const auto after = inner::occupied_memory(at::kCPU);
  CHECK(*after - *before > bytes / 2);
  CHECK(*after - *before < bytes * 2);
}

TEST_CASE("occupied_memory: unknown for other devices") {
  CHECK_FALSE(inner::occupied_memory(at::Device(at::kMeta)));
  CHECK_FALSE(inner::occupied_memory(at::Device("privateuseone:0")));
}

TEST_CASE("occupied_memory: of a GPU", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP("needs a CUDA device");
  const auto block = torch::ones({64 << 20}, at::TensorOptions(at::kByte).device(at::kCUDA));
  CHECK(*inner::occupied_memory(block.device()) > 64 << 20);
}

TEST_CASE("module_of: a module, a holder, a pointer") {
  Net net;
  CHECK(&inner::module_of(net) == &net);
  auto* pointer = &net;
  CHECK(&inner::module_of(pointer) == &net);
  torch::nn::Linear holder(1, 1);
  CHECK(&inner::module_of(holder) == holder.get());
  auto shared = holder.ptr();
  CHECK(&inner::module_of(shared) == holder.get());
  STATIC_REQUIRE_FALSE(ga::model<int>);
  STATIC_REQUIRE_FALSE(ga::model<at::Tensor>);
  STATIC_REQUIRE_FALSE(ga::model<std::unique_ptr<int>>);
}
