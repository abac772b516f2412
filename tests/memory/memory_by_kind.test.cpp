// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/embedding.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adam8bit.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/trainer.hpp>

#include "support/models.hpp"

namespace ga = gradaccum;
using namespace testing;

namespace {

const auto mean_loss = [](auto& net, const Example& batch) { return loss_of(net, batch); };

/// Returns the bytes of tensors without shared memory.
std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (auto& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

struct MemoryAfterBackward {
  ga::TrainerBase* trainer = nullptr;
  std::vector<ga::MemoryByKind> seen = {};
  void attach(ga::TrainerBase& its_trainer) { trainer = &its_trainer; }
  void after_backward(ga::Gradients&) { seen.push_back(trainer->memory_by_kind()); }
};

}  // namespace

TEST_CASE("MemoryByKind: parameters, gradients, and the state of LibTorch's Adam") {
  auto model = make_model(at::kFloat);
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
  ga::Trainer trainer(model, adam, mean_loss, ga::Accumulate{.steps = 2}, MemoryAfterBackward{});
  const auto parameters = bytes_of(model->parameters());
  REQUIRE(parameters == 4 * (4 * 8 + 8 + 8 * 3 + 3));
  CHECK(trainer.memory_by_kind() == ga::MemoryByKind{.parameters = parameters});
  trainer.fit(make_batches({2, 2, 2, 2}, at::kFloat));
  const auto& seen = trainer.policy<MemoryAfterBackward>().seen;
  REQUIRE(seen.size() == 4);
  CHECK(seen[0] == ga::MemoryByKind{.parameters = parameters, .gradients = parameters});
  CHECK(seen[1] == seen[0]);
  const ga::MemoryByKind stepped{.parameters = parameters, .optimizer_state = 2 * parameters, .gradients = parameters};
  CHECK(seen[2] == stepped);
  CHECK(stepped.total() == 4 * parameters);
  CHECK(trainer.memory_by_kind() == ga::MemoryByKind{.parameters = parameters, .optimizer_state = 2 * parameters});
}

TEST_CASE("MemoryByKind: buffers count as parameters, and shared memory counts once") {
  struct Net : torch::nn::Module {
    at::Tensor table = register_parameter("table", torch::zeros({6, 2}));
    at::Tensor view = register_parameter("view", table.detach()[0].detach());
    at::Tensor buffer = register_buffer("buffer", torch::zeros({5}, at::kDouble));
  } net;
  torch::optim::SGD sgd({net.table}, torch::optim::SGDOptions(0.1));
  ga::Trainer trainer(net, sgd, [](Net& of, const Example&) { return of.table.sum(); });
  CHECK(trainer.memory_by_kind() == ga::MemoryByKind{.parameters = 6 * 2 * 4 + 5 * 8});
}

TEST_CASE("MemoryByKind: separate sums of a window count as gradients") {
  auto model = make_model(at::kBFloat16);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  ga::Trainer trainer(model, sgd, mean_loss, ga::Accumulate{.steps = 2, .accumulate_in = at::kFloat},
                      MemoryAfterBackward{});
  trainer.fit(make_batches({2, 2}, at::kBFloat16));
  const auto& seen = trainer.policy<MemoryAfterBackward>().seen;
  REQUIRE(seen.size() == 2);
  CHECK(seen[0].parameters == bytes_of(model->parameters()));
  CHECK(seen[0].gradients == 2 * seen[0].parameters);
}

TEST_CASE("MemoryByKind: moments of 8 bits count with their true size") {
  torch::nn::Sequential model(torch::nn::Linear(torch::nn::LinearOptions(128, 64).bias(false)));
  ga::optim::Adam8bit adam(model->parameters(), ga::optim::Adam8bitOptions(1e-3));
  ga::Trainer trainer(model, adam, [](auto& net, const at::Tensor& batch) { return net->forward(batch).mean(); });
  trainer.fit(std::vector<at::Tensor>{torch::randn({2, 128})});
  const auto state = trainer.memory_by_kind().optimizer_state;
  CHECK(state > 2 * 128 * 64);  // codes, and their scales
  CHECK(state < 3 * 128 * 64);  // floats would take 8
  std::int64_t named = 0;
  for (auto& [name, tensor] : adam.named_state({{"weight", model->parameters()[0]}}))
    if (!name.starts_with("step")) named += static_cast<std::int64_t>(tensor.nbytes());
  CHECK(state == named);
}

TEST_CASE("MemoryByKind: state by rows counts only these rows") {
  struct Net : torch::nn::Module {
    at::Tensor table = register_parameter("table", torch::randn({1000, 4}));
  } net;
  ga::optim::AdamW adamw({net.table}, ga::optim::AdamWOptions(1e-3));
  ga::Trainer trainer(net, adamw, [](Net& of, const at::Tensor& rows) {
    return ga::embedding(rows, of.table, {.sparse = true}).square().mean();
  });
  trainer.fit(std::vector<at::Tensor>{torch::tensor({3, 7, 3})});
  const auto bytes = trainer.memory_by_kind();
  CHECK(bytes.parameters == 1000 * 4 * 4);
  CHECK(bytes.optimizer_state > 0);
  CHECK(bytes.optimizer_state < bytes.parameters);  // dense moments take twice the table
}

TEST_CASE("MemoryByKind: reading it allocates nothing, and keeps nothing alive") {
  auto model = make_model();
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(1e-3));
  ga::Trainer trainer(model, adam, mean_loss);
  trainer.fit(make_batches({2}));
  const auto holders = model->parameters()[0].storage().use_count();
  const ga::MemoryMeter meter;
  trainer.memory_by_kind();
  CHECK(meter.peak_bytes() == 0);
  CHECK(model->parameters()[0].storage().use_count() == holders);
}

TEST_CASE("MemoryByKind: a user's optimizer has an unknown state") {
  auto model = make_model();
  struct Own {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    at::Tensor state = torch::zeros({100});
    void step() {}
    void zero_grad() {}
    std::vector<torch::optim::OptimizerParamGroup>& param_groups() { return groups; }
  } own{{torch::optim::OptimizerParamGroup(model->parameters())}};
  ga::Trainer trainer(model, own, mean_loss);
  CHECK(trainer.memory_by_kind() == ga::MemoryByKind{.parameters = bytes_of(model->parameters())});
}
