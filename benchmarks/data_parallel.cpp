// SPDX-License-Identifier: Apache-2.0
//
// ./launch.sh 2 data_parallel: a window's cost with several ranks, in time and in bytes on the network, compared to a
// loop that sums at every micro-batch; with --optimizer adamw, also with a sharded optimizer state.
// compare_processes.py compares it to Python's DDP and ZeroRedundancyOptimizer.

#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/replicas.hpp>

#include <fstream>
#include <sstream>

#include "harness.hpp"

namespace {

namespace ga = gradaccum;

constexpr std::int64_t width = 1024, layers = 8;
constexpr int windows = 4;  // consecutive ones, as in a training, between two barriers

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (std::int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

/// Returns the bytes that this machine's processes have sent over loopback.
double sent_bytes() {
  std::ifstream devices("/proc/net/dev");
  for (std::string line; std::getline(devices, line);) {
    if (line.find("lo:") == std::string::npos) continue;
    std::istringstream numbers(line.substr(line.find(':') + 1));
    double bytes = 0, other = 0;
    numbers >> bytes;
    for (int i = 0; i < 7; ++i) numbers >> other;  // other counts of received data
    numbers >> bytes;
    return bytes;
  }
  return 0;
}

/// A loop to compare. Inputs differ by rank and micro-batch.
class Loop {
 public:
  Loop(std::string name, const ga::ProcessGroup& group, std::int64_t steps, std::int64_t rows, bool adamw = false)
      : name_(std::move(name)), group_(group), steps_(steps) {
    if (adamw)
      optimizer_ = std::make_unique<ga::optim::AdamW>(model_->parameters(), ga::optim::AdamWOptions(1e-3));
    else
      optimizer_ = std::make_unique<ga::optim::SGD>(model_->parameters(), ga::optim::SGDOptions(1e-3));
    for (std::int64_t i = 0; i < steps; ++i) {
      torch::manual_seed(static_cast<std::uint64_t>(1 + group.rank() * steps + i));
      inputs_.push_back(torch::randn({rows, width}));
    }
  }
  virtual ~Loop() = default;
  virtual void window() = 0;

  void measure() {
    group_.barrier();
    const auto before = sent_bytes();
    times_.push_back(harness::seconds([&] {
                       for (int i = 0; i < windows; ++i) window();
                       group_.barrier();
                     }) /
                     windows);
    bytes_.push_back((sent_bytes() - before) / windows);
  }
  void forget() { times_.clear(), bytes_.clear(); }
  at::Tensor parameters() const {
    std::vector<at::Tensor> all;
    for (auto& parameter : model_->parameters()) all.push_back(parameter.detach().flatten());
    return torch::cat(all);
  }
  const std::string& name() const { return name_; }
  double time() const { return harness::median(times_); }
  double bytes() const { return harness::median(bytes_); }
  double bytes_of_state() const {
    double bytes = 0;
    ga::detail::for_each_state_tensor(*optimizer_,
                                      [&](auto& tensor) { bytes += static_cast<double>(tensor.nbytes()); });
    return bytes;
  }

 protected:
  at::Tensor loss(std::int64_t i) { return model_->forward(inputs_[static_cast<std::size_t>(i)]).square().mean(); }

  std::string name_;
  ga::ProcessGroup group_;
  std::int64_t steps_;
  std::vector<at::Tensor> inputs_;
  torch::nn::Sequential model_ = make_model();
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<double> times_, bytes_;
};

class Ours final : public Loop {
 public:
  Ours(std::string name, const ga::ProcessGroup& group, std::int64_t steps, std::int64_t rows, bool adamw,
       const ga::ReplicasOptions& options)
      : Loop(std::move(name), group, steps, rows, adamw),
        accumulator_(*optimizer_, {.steps = steps}),
        replicas_(group, model_, accumulator_, options) {}

  void window() override {
    for (std::int64_t i = 0; i < steps_; ++i) {
      accumulator_.backward(loss(i));
      accumulator_.step();
      accumulator_.zero_grad();
    }
  }

 private:
  ga::GradAccumulator<torch::optim::Optimizer> accumulator_;
  ga::Replicas replicas_;
};

/// Sums all gradients after each micro-batch, as loops without windows do.
class SumsAlways final : public Loop {
 public:
  using Loop::Loop;

  void window() override {
    for (std::int64_t i = 0; i < steps_; ++i) {
      (loss(i) / steps_).backward();
      sum();
    }
    optimizer_->step();
    optimizer_->zero_grad();
  }

 private:
  void sum() {
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (auto& parameter : model_->parameters()) gradients.push_back(parameter.grad().flatten());
    auto all = torch::cat(gradients);
    group_.all_reduce(all);
    all /= group_.world_size();
    std::int64_t from = 0;
    for (auto& parameter : model_->parameters()) {
      parameter.grad().copy_(all.narrow(0, from, parameter.numel()).view(parameter.sizes()));
      from += parameter.numel();
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::int64_t steps = 4, rows = 32;
  std::string optimizer = "sgd";
  auto options = harness::parse(argc, argv, "What a window of several processes costs", [&](CLI::App& app) {
    app.add_option("--micro-batches", steps, "in a window")->check(CLI::Range(1, 1000));
    app.add_option("--rows", rows, "in a micro-batch")->check(CLI::Range(1, 100000));
    app.add_option("--optimizer", optimizer, "adamw has a state to divide")->check(CLI::IsMember({"sgd", "adamw"}));
  });
  const auto group = ga::ProcessGroup::from_environment();
  std::vector<std::unique_ptr<Loop>> loops;
  const bool adamw = optimizer == "adamw";
  const auto add = [&](const char* name, const ga::ReplicasOptions& how) {
    loops.push_back(std::make_unique<Ours>(name, group, steps, rows, adamw, how));
  };
  if (adamw) {
    add("gradaccum, AdamW", {});
    add("gradaccum, AdamW, state divided", {.shard = ga::Shard::optimizer});
    add("gradaccum, AdamW, state and gradients divided", {.shard = ga::Shard::gradients});
  } else {
    add("gradaccum", {});
    add("gradaccum, sent after backward", {.overlap = false});
    loops.push_back(std::make_unique<SumsAlways>("LibTorch, a sum every micro-batch", group, steps, rows));
  }
  for (auto& loop : loops) loop->measure();
  for (auto& loop : loops) {
    const auto distance = (loop->parameters() - loops[0]->parameters()).norm() / loops[0]->parameters().norm();
    TORCH_CHECK(distance.item<double>() < 1e-5, loop->name(), " does not compute what ours does");
    loop->forget();
  }
  for (int repeat = 0; repeat < options.repeats; ++repeat)
    for (std::size_t i = 0; i < loops.size(); ++i) loops[repeat % 2 ? loops.size() - 1 - i : i]->measure();
  if (group.rank() != 0) return 0;
  for (auto& loop : loops)
    harness::append_json(options, fmt::format(R"({{"contestant": "{}", "median_s": {}, "bytes": {}, "state": {}}})",
                                              loop->name(), loop->time(), loop->bytes(), loop->bytes_of_state()));
}
