// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/policies/fit_memory.hpp>

#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <utility>
#include <vector>

namespace ga = gradaccum;

namespace {

std::int64_t address_space() {
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

/// Limits this process to a number of additional bytes of addresses, as `ulimit -v` does.
class AddressLimitScope {
 public:
  explicit AddressLimitScope(std::int64_t more) {
    getrlimit(RLIMIT_AS, &before_);
    auto limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(address_space() + more);
    setrlimit(RLIMIT_AS, &limit);
  }
  AddressLimitScope(const AddressLimitScope&) = delete;
  AddressLimitScope& operator=(const AddressLimitScope&) = delete;
  ~AddressLimitScope() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

}  // namespace

TEST_CASE("FitMemory: trains within an address space that a batch exceeds") {
#ifdef __SANITIZE_ADDRESS__
  SUCCEED("AddressSanitizer takes addresses by the terabyte");
#else
  torch::nn::Sequential net(torch::nn::Linear(64, 4096), torch::nn::Tanh(), torch::nn::Linear(4096, 8));
  torch::optim::SGD sgd(net->parameters(), 0.01);
  auto x = torch::randn({8192, 64}), y = torch::randn({8192, 8});
  auto batch = std::pair(x, y);
  const auto loss_of = [](auto& model, auto& rows) { return torch::mse_loss(model->forward(rows.first), rows.second); };
  loss_of(net, batch).backward();  // 128 MiB for each of the large activations
  std::vector<at::Tensor> wanted;
  for (auto& parameter : net->parameters()) wanted.push_back(parameter.grad().clone());
  net->zero_grad();

  const AddressLimitScope limit(200 * ga::MiB);
  CHECK(testing::contains(testing::error_of([&] { loss_of(net, batch).backward(); }), "can't allocate memory"));
  net->zero_grad();
  ga::GradAccumulator optimizer(sgd);
  const auto check = [&](const ga::FitMemory& limits) {
    ga::FitMemory::Running memory(limits);
    for (int update = 0; update < 3; ++update) {
      memory.backward(optimizer, net, batch, loss_of);
      optimizer.gradients().apply();
      for (std::size_t i = 0; i < wanted.size(); ++i)
        CHECK((net->parameters()[i].grad() - wanted[i]).abs().max().item<float>() < 1e-5);
      optimizer.discard();
    }
    CHECK(memory.plan().last_rows.size() > 1);
    return memory.plan();
  };
  check({});                                      // the available memory, from the limit
  CHECK(check({.budget = ga::GiB}).replays > 0);  // more than available
#endif
}
