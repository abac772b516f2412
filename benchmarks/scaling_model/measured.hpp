// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/parallel/links.hpp>
#include <gradaccum/detail/window/tensor_lists.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/replicas.hpp>

#include <fstream>
#include <memory>
#include <optional>

#include "../harness.hpp"
#include "fit.hpp"

/// What the ranks of this machine take, each of them a process: the numbers that the simulation is given, and the
/// windows that it is to foretell. All in turn, so that a machine whose speed changes changes all of them alike.
namespace scaling::measured {

namespace ga = gradaccum;
using namespace fit;

inline torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (std::int64_t i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

/// Until the last rank is done.
inline double seconds_of_all(const ga::ProcessGroup& group, const std::function<void()>& run) {
  group.barrier();
  return harness::seconds([&] {
    run();
    group.barrier();
  });
}

/// How ranks train; without a way each is alone, beside the others.
struct Kind {
  std::string name;
  std::optional<Way> way = {};
};
inline const std::vector<Kind> kinds{{"alone"},
                                     {"unsharded", Way::unsharded},
                                     {"Shard::optimizer", Way::shard_optimizer},
                                     {"Shard::gradients", Way::shard_gradients}};

inline ga::Shard shard_of(Way way) {
  if (way == Way::unsharded) return ga::Shard::none;
  return way == Way::shard_optimizer ? ga::Shard::optimizer : ga::Shard::gradients;
}

/// Windows of so many micro-batches.
class Loop {
 public:
  Loop(const ga::ProcessGroup& group, const Kind& kind, std::int64_t micro_batches)
      : group_(group), micro_batches_(micro_batches), accumulator_(adamw_, {.steps = micro_batches}) {
    if (kind.way)
      replicas_ = std::make_unique<ga::Replicas>(group, model_, accumulator_,
                                                 ga::ReplicasOptions{.shard = shard_of(*kind.way)});
  }

  double window() {
    return seconds_of_all(group_, [&] {
      for (std::int64_t i = 0; i < micro_batches_; ++i) micro_batch();
    });
  }
  /// What the parts of all windows have taken.
  const std::map<std::string, double>& parts() const { return parts_; }

 private:
  void micro_batch() {
    at::Tensor loss;
    parts_["forward"] += harness::seconds([&] { loss = model_->forward(input_).square().mean(); });
    parts_["backward"] += harness::seconds([&] { accumulator_.backward(loss); });
    parts_["step"] += harness::seconds([&] {
      accumulator_.step();
      accumulator_.zero_grad();
    });
  }

  ga::ProcessGroup group_;
  std::int64_t micro_batches_;
  at::Tensor input_ = torch::randn({rows, width});
  torch::nn::Sequential model_ = make_model();
  ga::optim::AdamW adamw_{model_->parameters(), ga::optim::AdamWOptions(1e-4)};
  ga::GradAccumulator<ga::optim::AdamW> accumulator_;
  std::unique_ptr<ga::Replicas> replicas_;
  std::map<std::string, double> parts_;
};

/// As many all-reduces as a window has, begun at once, as a window's may be.
inline double all_reduces(
    const ga::ProcessGroup& group, std::int64_t bytes, const std::function<void()>& meanwhile = [] {}) {
  std::vector<at::Tensor> sums;
  for (std::int64_t i = 0; i < layers; ++i) sums.push_back(torch::zeros({bytes / 4}));
  return seconds_of_all(group, [&] {
    std::vector<ga::detail::Links::Pending> pending;
    for (auto& sum : sums) pending.push_back(group.links()->begin_sum(ga::detail::Links::Line::gradients, sum));
    meanwhile();
    for (auto& one : pending) group.links()->wait(one, "the other ranks");
  });
}

/// As many reduce-scatters as a window has, as the library makes them: of the first and the last rank the own part is
/// not sent, and with two what comes becomes the sum.
inline double reduce_scatters(const ga::ProcessGroup& group) {
  const std::int64_t ranks = group.world_size(), rank = group.rank(), part = bucket_bytes / 4 / ranks;
  const bool is_at_end = rank == 0 || rank + 1 == ranks;
  const std::int64_t rows = is_at_end ? ranks - 1 : ranks;
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(ranks), part);
  if (is_at_end) sizes[static_cast<std::size_t>(rank)] = 0;
  const auto line = ga::detail::Links::Line::gradients;
  std::vector<at::Tensor> own, from, to;
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto all = torch::zeros({ranks * part});
    own.push_back(all.narrow(0, rank * part, part));
    from.push_back(all.narrow(0, rank == 0 ? part : 0, rows * part));
    to.push_back(torch::zeros({rows, part}));
  }
  return seconds_of_all(group, [&] {
    std::vector<ga::detail::Links::Pending> pending;
    for (std::size_t i = 0; i < from.size(); ++i)
      pending.push_back(group.links()->begin_all_to_all(line, to[i], from[i], sizes, sizes));
    for (std::size_t i = 0; i < from.size(); ++i) {
      group.links()->wait(pending[i], "the other ranks");
      const auto sum = rows == 1 ? to[i][0] : torch::sum(to[i], 0);
      if (is_at_end) sum.add_(own[i]);
    }
  });
}

/// As many all-gathers as a window has.
inline double all_gathers(const ga::ProcessGroup& group) {
  std::vector<at::Tensor> parts;
  for (std::int64_t i = 0; i < layers * group.world_size(); ++i)
    parts.push_back(torch::zeros({bucket_bytes / 4 / group.world_size()}));
  return seconds_of_all(group, [&] {
    std::vector<ga::detail::Links::Pending> pending;
    for (std::size_t i = 0; i < parts.size(); ++i)
      pending.push_back(group.links()->begin_broadcast(ga::detail::Links::Line::gradients, parts[i],
                                                       static_cast<int>(i) % group.world_size()));
    for (auto& one : pending) group.links()->wait(one, "the other ranks");
  });
}

/// Something to compute beside them, which takes about as long.
inline void multiply() {
  const auto a = torch::ones({rows, width}), b = torch::ones({width, width});
  for (std::int64_t i = 0; i < 2 * layers; ++i) torch::mm(a, b);
}

/// All that is measured, by name.
inline std::vector<std::pair<std::string, std::function<double()>>> measurements(const ga::ProcessGroup& group) {
  std::vector<std::pair<std::string, std::function<double()>>> all;
  for (auto micro_batches : window_lengths)
    for (auto& kind : kinds) {
      const auto loop = std::make_shared<Loop>(group, kind, micro_batches);
      all.emplace_back(kind.name + std::to_string(micro_batches), [=] { return loop->window(); });
      if (kind.way || micro_batches != 1) continue;
      for (const auto* part : {"forward", "backward", "step"})
        all.emplace_back(part, [=] { return loop->parts().at(part); });
    }
  const auto gradients = std::make_shared<std::vector<at::Tensor>>();
  for (std::int64_t i = 0; i < layers; ++i) gradients->push_back(torch::zeros({width, width}));
  all.emplace_back("norm", [=] { return harness::seconds([&] { ga::detail::norms(*gradients, 2); }); });
  if (group.world_size() == 1) return all;
  for (auto bytes : message_bytes)
    all.emplace_back("sum" + std::to_string(bytes), [=] { return all_reduces(group, bytes); });
  all.emplace_back("scatter", [=] { return reduce_scatters(group); });
  all.emplace_back("gather", [=] { return all_gathers(group); });
  all.emplace_back("multiply", [=] { return seconds_of_all(group, multiply); });
  all.emplace_back("both", [=] { return all_reduces(group, bucket_bytes, multiply); });
  return all;
}

/// What each rank runs; rank 0 writes a line for each measurement: its name, and its seconds in each round.
inline void measure(const std::string& results, int rounds) {
  torch::set_num_threads(1);
  ga::keep_freed_memory();
  const auto group = ga::ProcessGroup::from_environment();
  const auto all = measurements(group);
  Samples samples;
  for (int round = -2; round < rounds; ++round)  // two to get warm
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [name, run] = all[round % 2 ? all.size() - 1 - i : i];  // nobody is always first
      const auto seconds = run();
      if (round >= 0) samples[name].push_back(seconds);
    }
  if (group.rank() != 0) return;
  std::ofstream file(results);
  for (auto& [name, values] : samples) {
    file << name;
    for (auto seconds : values) file << ' ' << seconds;
    file << '\n';
  }
}

}  // namespace scaling::measured
