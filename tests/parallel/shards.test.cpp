// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/detail/optimizers/param_states.hpp>
#include <gradaccum/detail/parallel/shards.hpp>
#include <gradaccum/detail/state/pieces.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/io/state_folder.hpp>
#include <gradaccum/memory_meter.hpp>
#include <gradaccum/optim/adafactor.hpp>
#include <gradaccum/optim/adam.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/optim/adamw8bit.hpp>
#include <gradaccum/optim/muon.hpp>
#include <gradaccum/optim/sgd.hpp>
#include <gradaccum/replicas.hpp>
#include <gradaccum/training_state.hpp>

#include "support/files.hpp"
#include "support/models.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ga = gradaccum;
using ga::detail::Shards;
using namespace testing;

namespace {

/// Parameters that are cut among four ranks with an odd end, too small to cut, not contiguous, frozen, and unused.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    static std::mutex one_draws;
    const std::lock_guard lock(one_draws);
    torch::manual_seed(2);
    wide = register_module("wide", torch::nn::Linear(30, 701));
    narrow = register_module("narrow", torch::nn::Linear(701, 25));
    picture = register_parameter("picture", torch::randn({4, 8, 30, 30}).contiguous(at::MemoryFormat::ChannelsLast));
    scalar = register_parameter("scalar", torch::randn({}));
    frozen = register_parameter("frozen", torch::randn({20000}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::randn({17000}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = torch::tanh(wide->forward(x));
    return narrow->forward(hidden) * scalar + (picture * picture).mean() + frozen.mean();
  }
  torch::nn::Linear wide{nullptr}, narrow{nullptr};
  at::Tensor picture, scalar, frozen, unused;
};
TORCH_MODULE(Net);
constexpr int bytes_of_wide = 30 * 701 * 4;  // a bucket of this size holds only its weight's gradient

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct Kind {
  std::string name;
  MakeOptimizer make;
  at::ScalarType dtype = at::kFloat;
};

std::vector<Kind> kinds() {
  return {
      {"SGD",
       [](auto p) {
         return std::make_unique<ga::optim::SGD>(p, ga::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam", [](auto p) { return std::make_unique<ga::optim::Adam>(p, ga::optim::AdamOptions(0.01).amsgrad(true)); }},
      {"AdamW", [](auto p) { return std::make_unique<ga::optim::AdamW>(p, ga::optim::AdamWOptions(0.01)); }},
      {"AdamW8bit",
       [](auto p) { return std::make_unique<ga::optim::AdamW8bit>(p, ga::optim::AdamW8bitOptions(0.01)); }},
      {"AdamW8bit, some in 32 bits",
       [](auto p) {
         auto adamw = std::make_unique<ga::optim::AdamW8bit>(p, ga::optim::AdamW8bitOptions(0.01));
         adamw->keep_in_32_bits({p[0]});
         return adamw;
       }},
      {"Adafactor",
       [](auto p) { return std::make_unique<ga::optim::Adafactor>(p, ga::optim::AdafactorOptions(0.01)); }},
      {"Muon",
       [](auto p) {
         std::erase_if(p, [](auto& parameter) { return parameter.dim() != 2; });
         return std::make_unique<ga::optim::Muon>(p, ga::optim::MuonOptions(0.01));
       }},
      {"AdamW, bfloat16, rounded at random",
       [](auto p) {
         auto adamw = std::make_unique<ga::optim::AdamW>(p, ga::optim::AdamWOptions(0.01));
         adamw->stochastic_rounding(7);
         return adamw;
       },
       at::kBFloat16},
      {"torch::optim::Adam",
       [](auto p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01)); }},
      {"torch::optim::SGD",
       [](auto p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.05).momentum(0.9)); }},
      {"torch::optim::RMSprop",
       [](auto p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01)); }},
  };
}

/// Returns one optimizer for each form of state.
std::vector<Kind> kinds_of_state() {
  auto all = kinds();
  std::erase_if(all, [](auto& kind) {
    return kind.name != "Adam" && kind.name != "AdamW8bit, some in 32 bits" && kind.name != "Adafactor" &&
           kind.name != "AdamW, bfloat16, rounded at random" && kind.name != "torch::optim::Adam";
  });
  return all;
}

/// Returns fewer optimizers under sanitizers, where they take four times as long.
std::vector<Kind> kinds_to_test() { return testing::sanitized ? kinds_of_state() : kinds(); }

/// A rank's training, with the number of micro-batches in its windows.
struct Rank {
  Net model;
  std::unique_ptr<torch::optim::Optimizer> itself;
  std::unique_ptr<ga::GradAccumulator<torch::optim::Optimizer>> optimizer;
  std::unique_ptr<ga::AmpScaler> scaler =
      std::make_unique<ga::AmpScaler>(ga::AmpScalerOptions{.init_scale = 1024, .growth_interval = 2});

  explicit Rank(const Kind& kind, double learning_rate_times = 1, std::int64_t steps = 2) {
    model->to(kind.dtype);
    itself = kind.make(model->parameters());
    for (auto& group : itself->param_groups()) group.options().set_lr(group.options().get_lr() * learning_rate_times);
    optimizer = std::make_unique<ga::GradAccumulator<torch::optim::Optimizer>>(
        *itself, ga::GradAccumulatorOptions{.steps = steps});
  }

  at::Tensor loss_of(std::int64_t rows, double seed) {
    const auto number = torch::arange(rows * 30).reshape({rows, 30}).to(at::kDouble);
    const auto x = torch::sin(number * seed).to(model->scalar.scalar_type());
    return model->forward(x).pow(2).mean();
  }

  void close(bool clips) {
    if (clips) optimizer->clip_grad_norm_(0.3);
    scaler->step(*optimizer);
    scaler->update();
    optimizer->zero_grad();
  }

  void micro_batch(std::int64_t rows, double seed, double times = 1, bool clips = true) {
    optimizer->backward(scaler->scale(ga::Loss{loss_of(rows, seed) * times, rows}));
    close(clips);
  }

  /// Uses uneven weights; the second window of rank 1 overflows.
  void train(int rank, std::int64_t windows) {
    for (std::int64_t i = 0; i < 2 * windows; ++i)
      micro_batch(1 + (i + rank) % 3, 0.1 + 0.01 * static_cast<double>(i) + rank,
                  rank == 1 && i == 3 ? std::numeric_limits<double>::infinity() : 1);
  }

  /// Uses gradients of one rank's first micro-batch and another's second, and zeros elsewhere: the sum has the same
  /// bits in any order.
  void train_to_the_bit(int rank, int world_size, std::int64_t windows) {
    for (std::int64_t i = 0; i < 2 * windows; ++i) {
      const bool takes_part = (i / 2 + i % 2) % world_size == rank;
      const bool overflows = rank == 1 && i == 3;
      micro_batch(1 + (i + rank) % 3, 0.1 + 0.01 * static_cast<double>(i) + rank,
                  overflows ? std::numeric_limits<double>::infinity() : static_cast<double>(takes_part),
                  /*clips=*/false);
    }
  }

  std::int64_t bytes_of_state() const {
    std::int64_t bytes = 0;
    ga::detail::for_each_state_tensor(*itself,
                                      [&](auto& tensor) { bytes += static_cast<std::int64_t>(tensor.nbytes()); });
    return bytes;
  }

  std::int64_t updates() const { return optimizer->updates(); }
  std::shared_ptr<const ga::detail::Communicator> peers_of_all = nullptr;
  auto peers() const { return peers_of_all; }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(model));
    archive("optimizer", ga::OptimizerState(*optimizer, model));
    archive("scaler", *scaler);
  }
};

std::vector<Rank> make_ranks(int number, const Kind& kind) {
  std::vector<Rank> ranks;
  for (int i = 0; i < number; ++i) ranks.emplace_back(kind);
  return ranks;
}

/// Runs `body(rank, its number)` on all ranks, with Replicas.
template <class Body>
void together(std::vector<Rank>& ranks, ga::Shard shard, const Body& body, std::int64_t bucket_bytes = 30000) {
  tests::as_ranks(static_cast<int>(ranks.size()), [&](const ga::ProcessGroup& group) {
    auto& rank = ranks[static_cast<std::size_t>(group.rank())];
    ga::Replicas replicas(group, rank.model, *rank.optimizer,
                          {.bucket_bytes = bucket_bytes, .seed_by_rank = false, .shard = shard});
    rank.peers_of_all = replicas.peers();
    body(rank, group.rank());
    rank.peers_of_all = nullptr;
    replicas.check_equal();
  });
}

std::vector<Rank> trained(int number, const Kind& kind, ga::Shard shard, std::int64_t windows = 4) {
  auto ranks = make_ranks(number, kind);
  together(ranks, shard, [&](Rank& rank, int i) { rank.train(i, windows); });
  return ranks;
}

/// Joins the values of all parts, as an unsharded training has them.
ga::Archive::Values joined(ga::Archive::Values values) {
  std::map<std::string, at::Tensor> tensors;
  for (auto& [name, value] : ga::detail::take_shared_pieces(values)) tensors[name] = std::get<at::Tensor>(value);
  for (auto& [name, pieces] : ga::detail::take_pieces(tensors)) values[name] = pieces.whole();
  return values;
}

std::vector<at::Tensor> parameters_of_sizes(const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> parameters;
  for (auto size : sizes) parameters.push_back(torch::zeros({size}).requires_grad_());
  return parameters;
}

}  // namespace

TEST_CASE("Shards: each element belongs to one rank, in whole units, balanced over ranks") {
  const int world_size = GENERATE(1, 2, 3, 4, 7);
  const bool may_be_cut = GENERATE(true, false);
  auto parameters = parameters_of_sizes({1, 0, 50, 4096, 100000, 8191, 123457, 5, 65536, 70000, 4096 * 9});
  parameters.push_back(torch::zeros({300, 200}).t().requires_grad_());  // not contiguous
  std::vector<std::int64_t> elements_of(static_cast<std::size_t>(world_size));
  std::int64_t all = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    ga::optim::SGD by_elements(parameters, ga::optim::SGDOptions(0.1));
    ga::optim::Adafactor by_whole_parameters(parameters);
    torch::optim::Optimizer* const optimizer =
        may_be_cut ? &by_elements : static_cast<torch::optim::Optimizer*>(&by_whole_parameters);
    const Shards shards({optimizer}, rank, world_size);
    for (std::size_t place = 0; place < parameters.size(); ++place) {
      std::int64_t end = 0;
      for (auto& piece : shards.pieces(place)) {
        CHECK(piece.begin == end);
        CHECK(piece.begin % Shards::unit == 0);
        CHECK((!shards.is_cut(place) || piece.size() >= Shards::unit));
        end = piece.end;
      }
      CHECK(end == parameters[place].numel());
      CHECK((shards.pieces(place).size() == 1 || (may_be_cut && parameters[place].is_contiguous())));
      CHECK(shards.own(place).numel() == shards.own_piece(place).size());
      elements_of[static_cast<std::size_t>(rank)] += shards.own_piece(place).size();
      if (rank == 0) all += parameters[place].numel();
      if (shards.own(place).numel() > 0) CHECK(shards.own(place).is_alias_of(parameters[place]));
    }
  }
  CHECK(std::accumulate(elements_of.begin(), elements_of.end(), std::int64_t{0}) == all);
  if (may_be_cut && world_size <= 4)
    for (auto elements : elements_of) CHECK(elements <= all / world_size + 60000);  // plus the non-contiguous one
}

TEST_CASE("Shard: with exact sums, any number of ranks gives the bits of unsharded ranks") {
  const auto kind = GENERATE(from_range(kinds_to_test()));
  const int number = GENERATE(2, 4), bucket_bytes = number == 2 ? bytes_of_wide : 30000;
  CAPTURE(kind.name, number, bucket_bytes);
  const auto trained_by = [&](ga::Shard shard) {
    auto ranks = make_ranks(number, kind);
    together(
        ranks, shard, [&](Rank& rank, int i) { rank.train_to_the_bit(i, number, 4); }, bucket_bytes);
    return ranks;
  };
  const auto plain = trained_by(ga::Shard::none);
  for (auto shard : {ga::Shard::optimizer, ga::Shard::gradients}) {
    const auto divided = trained_by(shard);
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CHECK(plain[i].optimizer->updates() == 3);  // one overflowed
      CHECK(divided[i].optimizer->updates() == 3);
      CHECK(divided[i].scaler->get_scale() == plain[i].scaler->get_scale());
      CHECK(torch::equal(flat(divided[i].model), flat(plain[i].model)));
      bytes += divided[i].bytes_of_state();
      if (kind.name != "Adafactor" && kind.name != "Muon" && kind.name != "AdamW8bit, some in 32 bits" &&
          kind.dtype == at::kFloat)
        CHECK(divided[i].bytes_of_state() < plain[i].bytes_of_state() * 3 / 4);
    }
    CHECK(bytes == plain[0].bytes_of_state());
  }
}

TEST_CASE("Shard: two ranks give the bits of two unsharded ranks") {
  const auto kind = GENERATE(from_range(kinds_to_test()));
  const auto shard = GENERATE(ga::Shard::optimizer, ga::Shard::gradients);
  const std::int64_t steps = shard == ga::Shard::gradients ? 1 : 2;  // ranks are summed before micro-batches
  const int bucket_bytes = shard == ga::Shard::gradients ? 30000 : bytes_of_wide;
  CAPTURE(kind.name, shard == ga::Shard::gradients, bucket_bytes);
  const auto trained_by = [&](ga::Shard how) {
    std::vector<Rank> ranks;
    for (int i = 0; i < 2; ++i) ranks.emplace_back(kind, 1, steps);
    const auto train = [](Rank& rank, int number) {
      for (int i = 0; i < 6; ++i) rank.micro_batch(1 + (i + number) % 3, 0.1 + 0.03 * i + number, 1, /*clips=*/false);
    };
    together(ranks, how, train, bucket_bytes);
    return ranks;
  };
  const auto plain = trained_by(ga::Shard::none), divided = trained_by(shard);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(torch::equal(flat(divided[i].model), flat(plain[i].model)));
    CHECK_FALSE(torch::equal(flat(divided[i].model), flat(Rank(kind).model)));
  }
}

TEST_CASE("Shard: parameters larger than a bucket, and an overflow, have the same bits") {
  const auto train = [](ga::Shard shard) {
    std::vector<at::Tensor> results(2);
    std::mutex one_draws;
    tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
      torch::nn::Sequential model;
      {
        const std::lock_guard lock(one_draws);
        torch::manual_seed(3);
        for (int i = 0; i < 3; ++i) model->push_back(torch::nn::Linear(1024, 1025));
      }
      ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-2));
      ga::GradAccumulator optimizer(adamw, {.steps = 1});
      ga::AmpScaler scaler({.init_scale = 256});
      ga::Replicas replicas(group, model, optimizer, {.bucket_bytes = 1 << 20, .seed_by_rank = false, .shard = shard});
      for (int i = 0; i < 3; ++i) {
        const auto x = torch::sin(torch::arange(1024) * (0.1 * i + group.rank() + 1)).reshape({1, 1024});
        at::Tensor sum = torch::zeros({});
        for (auto& part : *model) sum = sum + part.forward(x).pow(2).mean();
        optimizer.backward(scaler.scale(i == 1 ? sum * std::numeric_limits<float>::infinity() : sum));
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
      }
      CHECK(optimizer.updates() == 2);
      results[static_cast<std::size_t>(group.rank())] = flat(model);
    });
    CHECK(torch::equal(results[0], results[1]));
    return results[0];
  };
  const auto plain = train(ga::Shard::none);
  CHECK(torch::equal(train(ga::Shard::optimizer), plain));
  CHECK(torch::equal(train(ga::Shard::gradients), plain));
}

namespace {

double largest_difference(const Rank& a, const Rank& b) {
  return (flat(a.model) - flat(b.model)).abs().max().item<double>();
}

/// Optimizers that do not round to few bits.
std::vector<Kind> kinds_in_float64() {
  std::vector<Kind> all;
  for (auto& kind : kinds_to_test())
    if (kind.dtype == at::kFloat && kind.name != "AdamW8bit") all.push_back({kind.name, kind.make, at::kDouble});
  return all;
}

}  // namespace

TEST_CASE("Shard: clipping, overflow and uneven weights match unsharded ranks up to rounding") {
  const auto kind = GENERATE(from_range(kinds_in_float64()));
  constexpr int number = 3;
  CAPTURE(kind.name);
  const auto plain = trained(number, kind, ga::Shard::none);
  for (auto shard : {ga::Shard::optimizer, ga::Shard::gradients}) {
    const auto divided = trained(number, kind, shard);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CHECK(divided[i].optimizer->updates() == 3);
      CHECK(divided[i].scaler->get_scale() == plain[i].scaler->get_scale());
      CHECK(largest_difference(divided[i], plain[i]) < 1e-12);
      CHECK(largest_difference(divided[i], Rank(kind)) > 1e-3);
      CHECK(divided[i].optimizer->grad_norm().item<double>() ==
            Approx(plain[i].optimizer->grad_norm().item<double>()).epsilon(1e-12));
      CHECK(torch::equal(divided[i].optimizer->grad_norm(), divided[0].optimizer->grad_norm()));
    }
  }
}

TEST_CASE("Shard: the norm is that of all parts on whichever rank and whenever it is read") {
  const auto norms_of = [](ga::Shard shard) {
    auto ranks = make_ranks(3, kinds_in_float64()[2]);
    std::vector<double> norms(3), of_own_part(3);
    together(ranks, shard, [&](Rank& rank, int number) {
      for (int window = 0; window < 3; ++window) {
        rank.optimizer->backward(ga::Loss{rank.loss_of(1, 0.1 + number), 1});
        rank.optimizer->step();
        rank.optimizer->backward(ga::Loss{rank.loss_of(2, 0.2 + number), 2});
        auto gradients = rank.optimizer->gradients();
        if (window == 1) gradients.apply();
        if (number == window) {  // only this rank
          norms[static_cast<std::size_t>(number)] = gradients.norm().item<double>();
          double squares = 0;
          for (auto& gradient : gradients.values()) squares += gradient.square().sum().item<double>();
          of_own_part[static_cast<std::size_t>(number)] = std::sqrt(squares);
        }
        rank.optimizer->step();
        rank.optimizer->zero_grad();
      }
    });
    return std::pair(norms, of_own_part);
  };
  const auto plain = norms_of(ga::Shard::none).first;
  for (auto shard : {ga::Shard::optimizer, ga::Shard::gradients}) {
    const auto [norms, of_own_part] = norms_of(shard);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(norms[i] == Approx(plain[i]).epsilon(1e-12));
      CHECK(of_own_part[i] < (1 - 1e-6) * norms[i]);
    }
  }
}

TEST_CASE("Shard: windows of different lengths and numbers match unsharded ranks in both forms") {
  const auto kind = kinds_in_float64()[2];
  const bool plain_form = GENERATE(false, true), overlap = GENERATE(true, false);
  CAPTURE(plain_form, overlap);
  const auto train = [&](ga::Shard shard) {
    std::vector<Rank> ranks;
    for (std::int64_t steps : {2, 3, 1}) ranks.emplace_back(kind, 1, steps);
    tests::as_ranks(3, [&](const ga::ProcessGroup& group) {
      auto& rank = ranks[static_cast<std::size_t>(group.rank())];
      ga::Replicas replicas(group, rank.model, *rank.optimizer,
                            {.bucket_bytes = 30000, .overlap = overlap, .seed_by_rank = false, .shard = shard});
      const int micro_batches = std::vector{3, 11, 1}[static_cast<std::size_t>(group.rank())];
      for (int i = 0; i < micro_batches; ++i) {
        const auto loss = rank.loss_of(1 + i % 2, 0.3 * i + group.rank());
        plain_form ? loss.backward() : rank.optimizer->backward(ga::Loss{loss, 1 + i % 2});
        rank.optimizer->clip_grad_norm_(0.2);
        rank.optimizer->step();
        rank.optimizer->zero_grad();
      }
      rank.optimizer->flush();
      while (replicas.others_continue()) {
        rank.optimizer->clip_grad_norm_(0.2);
        rank.optimizer->step();
        rank.optimizer->zero_grad();
      }
      replicas.check_equal();
    });
    return ranks;
  };
  const auto plain = train(ga::Shard::none);
  for (auto shard : {ga::Shard::optimizer, ga::Shard::gradients}) {
    const auto divided = train(shard);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CHECK(divided[i].optimizer->updates() == 4);
      CHECK(plain[i].optimizer->updates() == 4);
      CHECK(largest_difference(divided[i], plain[i]) < 1e-12);
    }
  }
}

TEST_CASE("Shard: each rank updates only its own part") {
  const Kind kind = kinds()[2];
  const auto shard = GENERATE(ga::Shard::optimizer, ga::Shard::gradients);
  const auto plain = trained(2, kind, shard, 1);
  std::vector<Rank> ranks;
  ranks.emplace_back(kind);
  ranks.emplace_back(kind, /*learning_rate_times=*/3);
  together(ranks, shard, [&](Rank& rank, int i) {
    rank.train(i, 1);
    for (auto& group : rank.itself->param_groups()) group.options().set_lr(0.01);  // otherwise reported as a difference
  });
  ga::optim::SGD cut(ranks[0].model->parameters(), ga::optim::SGDOptions(0.1));
  const Shards shards({&cut}, 0, 2);
  for (std::size_t place = 0; place < shards.size(); ++place)
    for (auto& piece : shards.pieces(place)) {
      const auto here = shards.part(place, piece, ranks[0].model->parameters()[place]);
      const auto there = shards.part(place, piece, plain[0].model->parameters()[place]);
      const auto name = ranks[0].model->named_parameters().keys()[place];
      CAPTURE(name);
      const bool moves = name != "frozen" && name != "unused";
      CHECK(torch::equal(here, there) == (piece.rank == 0 || !moves));
    }
}

TEST_CASE("Shard: states resume bitwise with the same number of ranks, with another one, and unsharded") {
  const auto kind = GENERATE(from_range(kinds_of_state()));
  CAPTURE(kind.name);
  const Directory directory;
  const auto straight = trained(2, kind, ga::Shard::optimizer, 6);
  auto undivided = make_ranks(2, kind);
  together(undivided, ga::Shard::none, [&](Rank& rank, int i) {
    rank.train(i, 4);
    ga::save(directory / "undivided", rank);
  });
  auto saved = make_ranks(2, kind);
  together(saved, ga::Shard::optimizer, [&](Rank& rank, int i) {
    rank.train(i, 4);
    ga::save(directory / "divided", rank);
  });

  SECTION("as many ranks, from either") {
    for (const auto* from : {"divided", "undivided"})
      for (auto shard : {ga::Shard::optimizer, ga::Shard::none}) {
        auto ranks = make_ranks(2, kind);
        together(ranks, shard, [&](Rank& rank, int i) {
          ga::load(directory / from, rank);
          for (std::int64_t k = 8; k < 12; ++k)
            rank.micro_batch(1 + (k + i) % 3, 0.1 + 0.01 * static_cast<double>(k) + i);
        });
        for (std::size_t i = 0; i < 2; ++i) CHECK(torch::equal(flat(ranks[i].model), flat(straight[i].model)));
      }
  }
  SECTION("other numbers of ranks, and none") {
    auto alone = make_ranks(1, kind);
    ga::load(directory / "divided", alone[0], {.allow_changes = true});
    ga::save(directory / "alone", alone[0]);
    auto three = make_ranks(3, kind);
    together(three, ga::Shard::optimizer, [&](Rank& rank, int) {
      ga::load(directory / "divided", rank, {.allow_changes = true});
      ga::save(directory / "three", rank);
    });
    auto whole = ga::io::read_state(*ga::detail::newest_state(directory / "undivided"));
    for (const auto* from : {"alone", "three", "divided"}) {
      CAPTURE(from);
      const auto values = joined(ga::io::read_state(*ga::detail::newest_state(directory / from)));
      for (auto& [name, value] : whole)
        if (const auto* const tensor = std::get_if<at::Tensor>(&value); tensor && !name.starts_with("rank_")) {
          CAPTURE(name);
          REQUIRE(values.contains(name));
          CHECK(torch::equal(std::get<at::Tensor>(values.at(name)), *tensor));
        }
    }
  }
}

TEST_CASE(
    "Shard: with AdamW a rank needs at most 8 + 8/ranks bytes per parameter, or 4 + 12/ranks with gradients, and two "
    "buckets") {
  const int number = GENERATE(1, 2, 4);
  const auto peak_of = [&](ga::Shard shard) {
    std::vector<std::int64_t> peaks(static_cast<std::size_t>(number)), parameters = peaks;
    std::mutex one_draws;
    tests::as_ranks(number, [&](const ga::ProcessGroup& group) {
      const ga::MemoryMeter meter;
      torch::nn::Sequential model;
      {
        const std::lock_guard lock(one_draws);
        for (int i = 0; i < 6; ++i)
          model->push_back(torch::nn::Linear(500, 600)), model->push_back(torch::nn::Linear(600, 500));
      }
      ga::optim::AdamW adamw(model->parameters(), ga::optim::AdamWOptions(1e-3));
      ga::GradAccumulator optimizer(adamw, {.steps = 2});
      ga::Replicas replicas(group, model, optimizer, {.bucket_bytes = 1 << 18, .seed_by_rank = false, .shard = shard});
      for (int i = 0; i < 6; ++i) {
        optimizer.backward(model->forward(torch::ones({1, 500})).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      peaks[static_cast<std::size_t>(group.rank())] = meter.peak_bytes();
      for (auto& parameter : model->parameters())
        parameters[static_cast<std::size_t>(group.rank())] += parameter.numel();
    });
    for (std::size_t i = 0; i < peaks.size(); ++i) {
      const auto largest_bucket = std::int64_t{4} * 500 * 600;
      const double all = shard == ga::Shard::gradients ? 4 : 8;  // bytes per parameter that are not sharded
      const auto bound = (all + (16 - all) / number) * static_cast<double>(parameters[i]) + 2.0 * largest_bucket;
      CAPTURE(number, i, peaks[i], bound);
      CHECK((static_cast<double>(peaks[i]) <= bound) == (shard != ga::Shard::none || number == 1));
    }
  };
  peak_of(ga::Shard::optimizer);
  peak_of(ga::Shard::gradients);
  peak_of(ga::Shard::none);  // exceeds the bound with several ranks
}

TEST_CASE("Shard: loading a state takes only the memory of the rank's part") {
  const Kind kind = kinds()[2];
  const Directory directory;
  const int number = GENERATE(2, 3);
  const auto from = GENERATE(ga::Shard::optimizer, ga::Shard::none);
  const auto by = GENERATE(ga::Shard::gradients, ga::Shard::none);
  CAPTURE(number, from == ga::Shard::none, by == ga::Shard::none);
  auto saved = make_ranks(2, kind);
  together(saved, from, [&](Rank& rank, int i) {
    rank.train(i, 2);
    ga::save(directory / "states", rank);
  });
  auto ranks = make_ranks(number, kind);
  std::vector<std::int64_t> peaks(ranks.size());
  together(ranks, by, [&](Rank& rank, int i) {
    const ga::MemoryMeter meter;
    ga::load(directory / "states", rank, {.allow_changes = true});
    peaks[static_cast<std::size_t>(i)] = meter.peak_bytes();
  });
  const auto bytes_of = [](const std::vector<Rank>& of, ga::Shard shard) {
    std::int64_t bytes = 0;
    for (auto& rank : of) bytes += rank.bytes_of_state();
    return shard == ga::Shard::none ? bytes / static_cast<std::int64_t>(of.size()) : bytes;
  };
  CHECK(bytes_of(ranks, by) == bytes_of(saved, from));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto bound = ranks[i].bytes_of_state() + 20000;  // for texts that ranks exchange
    CAPTURE(i, peaks[i], bound);
    CHECK((peaks[i] <= bound) == (by != ga::Shard::none));
  }
}

TEST_CASE("Shard: an open window continues later, including the other ranks' gradients") {
  const auto kind = kinds_in_float64()[2];
  const auto train = [&](ga::Shard shard) {
    std::vector<Rank> ranks;
    for (int i = 0; i < 2; ++i) ranks.emplace_back(kind, 1, /*steps=*/3);
    together(ranks, shard, [&](Rank& rank, int number) {
      for (int epoch = 0; epoch < 2; ++epoch) {
        // Rank 1 has nothing in the first epoch, so rank 0's gradients are sent to it.
        for (int i = 0; i < (number == 0 ? 2 : 3 * epoch); ++i)
          rank.micro_batch(1 + i % 2, 0.2 * i + number + epoch, 1, /*clips=*/false);
        while (rank.optimizer->others_continue()) rank.close(/*clips=*/false);
      }
    });
    return ranks;
  };
  const auto plain = train(ga::Shard::none);
  for (auto shard : {ga::Shard::optimizer, ga::Shard::gradients}) {
    const auto divided = train(shard);
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK(divided[i].updates() == plain[i].updates());
      CHECK(plain[i].updates() == 1);
      CHECK(largest_difference(divided[i], plain[i]) < 1e-12);
    }
  }
}

TEST_CASE("Shard: incompatible options are refused on all ranks") {
  const Kind kind = kinds()[2];
  const auto message = [&](auto&& body) {
    std::string text;
    auto ranks = make_ranks(2, kind);
    try {
      body(ranks);
    } catch (const std::exception& error) {
      text = error.what();
    }
    return text;
  };
  SECTION("a state of whole parameters, which came by another way") {
    CHECK_THAT(
        message([&](auto& ranks) {
          Rank other(kind);
          other.train(0, 1);
          const auto state =
              dynamic_cast<ga::optim::AdamW&>(*other.itself).named_state(other.model->named_parameters());
          together(ranks, ga::Shard::optimizer, [&](Rank& rank, int i) {
            dynamic_cast<ga::optim::AdamW&>(*rank.itself).load_named_state(rank.model->named_parameters(), state);
            rank.train(i, 1);
          });
        }),
        Catch::Contains("has state of a whole parameter"));
  }
  SECTION("random numbers that come later") {
    CHECK_THAT(message([&](auto& ranks) {
                 together(ranks, ga::Shard::optimizer, [](Rank& rank, int i) {
                   dynamic_cast<ga::optim::AdamW&>(*rank.itself).stochastic_rounding(3);
                   rank.train(i, 1);
                 });
               }),
               Catch::Contains("call stochastic_rounding before"));
  }
  SECTION("an optimizer that has its state from the beginning") {
    const Kind adagrad{"Adagrad", [](auto p) { return std::make_unique<torch::optim::Adagrad>(p); }};
    auto ranks = make_ranks(2, adagrad);
    CHECK_THROWS_WITH(together(ranks, ga::Shard::optimizer, [](Rank&, int) {}), Catch::Contains("Adagrad"));
  }
  SECTION("saving without the others") {
    std::vector<std::string> by_save(2), by_torch(2);
    auto ranks = make_ranks(2, kind);
    const Directory directory;
    together(ranks, ga::Shard::optimizer, [&](Rank& rank, int i) {
      rank.train(i, 1);
      rank.peers_of_all = nullptr;
      const auto place = static_cast<std::size_t>(i);
      by_save[place] = testing::error_of([&] { ga::save(directory / "alone", rank); });
      by_torch[place] = testing::error_of([&] {
        const torch::optim::Optimizer& reference = std::as_const(*rank.optimizer);
        static_cast<void>(reference);
      });
    });
    for (auto& error : by_save) CHECK_THAT(error, Catch::Contains("is a shard of one rank"));
    for (auto& error : by_torch) CHECK_THAT(error, Catch::Contains("save by ga::save on all ranks"));
  }
  SECTION("learning rates of their own") {
    CHECK_THAT(message([&](auto& ranks) {
                 together(ranks, ga::Shard::optimizer, [](Rank& rank, int i) {
                   rank.train(0, 1);
                   for (auto& group : rank.itself->param_groups()) group.options().set_lr(0.01 * (1 + i));
                 });
               }),
               Catch::Contains("learning rate of group 0"));
  }
  SECTION("an optimizer that has stepped") {
    CHECK_THAT(message([&](auto& ranks) {
                 for (auto& rank : ranks) rank.train(0, 1);
                 together(ranks, ga::Shard::optimizer, [](Rank&, int) {});
               }),
               Catch::Contains("must not have any state yet"));
  }
  SECTION("parameters that come later") {
    CHECK_THAT(message([&](auto& ranks) {
                 together(ranks, ga::Shard::optimizer, [](Rank& rank, int i) {
                   const auto added = torch::zeros({3}).requires_grad_();
                   rank.itself->param_groups()[0].params().push_back(added);
                   rank.optimizer->backward(rank.model->forward(torch::ones({1, 30})).mean() + added.sum() * i);
                   rank.optimizer->step();
                   rank.optimizer->backward(rank.model->forward(torch::ones({1, 30})).mean() + added.sum());
                   rank.optimizer->step();
                 });
               }),
               Catch::Contains("must not change after the Replicas are constructed"));
  }
  SECTION("parameters that move") {
    CHECK_THAT(message([&](auto& ranks) {
                 together(ranks, ga::Shard::optimizer, [](Rank& rank, int i) {
                   rank.model->wide->weight.set_data(rank.model->wide->weight.detach().clone());
                   rank.train(i, 1);
                 });
               }),
               Catch::Contains("must keep its memory after the Replicas are constructed"));
  }
  SECTION("a window that is open, where its sums are not here") {
    std::vector<std::string> of_norm(2), of_save(2), of_discard(2);
    auto ranks = make_ranks(2, kind);
    const Directory directory;
    CHECK_THROWS_WITH(together(ranks, ga::Shard::gradients,
                               [&](Rank& rank, int i) {
                                 const auto place = static_cast<std::size_t>(i);
                                 rank.micro_batch(1, 0.1);
                                 of_norm[place] = testing::error_of([&] { rank.optimizer->gradients().norm(); });
                                 of_save[place] = testing::error_of([&] { ga::save(directory / "open", rank); });
                                 rank.optimizer->discard();
                                 of_discard[place] = testing::error_of([&] { rank.train(i, 1); });
                               }),
                      Catch::Contains("no data can be exchanged"));
    for (auto& error : of_norm) CHECK_THAT(error, Catch::Contains("use them when it is complete"));
    for (auto& error : of_save) CHECK_THAT(error, Catch::Contains("state() must be called between windows"));
    for (auto& error : of_discard) CHECK_THAT(error, Catch::Contains("a window was discarded"));
  }
  SECTION("a norm of gradients that have been changed") {
    CHECK_THAT(message([&](auto& ranks) {
                 together(ranks, ga::Shard::optimizer, [](Rank& rank, int) {
                   rank.optimizer->backward(ga::Loss{rank.loss_of(1, 0.1), 1});
                   rank.optimizer->step();
                   rank.optimizer->backward(ga::Loss{rank.loss_of(1, 0.1), 1});
                   auto gradients = rank.optimizer->gradients();
                   const auto norm = gradients.norm().item<double>();
                   for (auto& gradient : gradients.values()) gradient.add_(0.0);  // applied, and then changed
                   static_cast<void>(norm);
                   gradients.norm();
                 });
               }),
               Catch::Contains("before you change them"));
  }
  SECTION("one rank that does not divide") {
    CHECK_THAT(message([&](auto& ranks) {
                 tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
                   auto& rank = ranks[static_cast<std::size_t>(group.rank())];
                   ga::Replicas replicas(group, rank.model, *rank.optimizer,
                                         {.shard = group.rank() == 0 ? ga::Shard::optimizer : ga::Shard::none});
                 });
               }),
               Catch::Contains("pieces"));
  }
}

namespace {

/// Throws in its third step, on one rank.
struct Failing : ga::optim::SGD {
  using ga::optim::SGD::SGD;
  using ga::optim::SGD::step;
  int* steps = nullptr;
  void step(ga::Gradients gradients) override {
    if (steps && ++*steps == 3) throw std::runtime_error("out of luck");
    ga::optim::SGD::step(std::move(gradients));
  }
};

}  // namespace

TEST_CASE("Shard: an exception in one rank's step is an error on all ranks, and later saves fail") {
  const Kind kind{"Failing", [](auto p) { return std::make_unique<Failing>(p, ga::optim::SGDOptions(0.05)); }};
  auto ranks = make_ranks(2, kind);
  int steps = 0;
  dynamic_cast<Failing&>(*ranks[1].itself).steps = &steps;
  const Directory directory;
  std::vector<std::string> errors(2), of_save(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto i = static_cast<std::size_t>(group.rank());
    auto& rank = ranks[i];
    ga::Replicas replicas(group, rank.model, *rank.optimizer, {.seed_by_rank = false, .shard = ga::Shard::optimizer});
    rank.peers_of_all = replicas.peers();
    try {
      rank.train(0, 5);
    } catch (const std::exception& error) {
      errors[i] = error.what();
    }
    try {
      ga::save(directory / "states", rank);
    } catch (const std::exception& error) {
      of_save[i] = error.what();
    }
    rank.peers_of_all = nullptr;
  });
  CHECK_THAT(errors[0], Catch::Contains("rank 1 has given up: out of luck"));
  CHECK_THAT(errors[1], Catch::Contains("out of luck"));
  for (auto& error : of_save) CHECK_THAT(error, Catch::Contains("no data can be exchanged after an error"));
  CHECK_FALSE(std::filesystem::exists(directory / "states"));
}

TEST_CASE("Replicas: a rank that ends while all write a state is named, though the others cannot agree on the error") {
  std::string error;
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const Kind kind = kinds()[0];
    Rank rank(kind);
    const ga::Replicas replicas(group, rank.model, *rank.optimizer, {.seed_by_rank = false});
    const auto peers = replicas.peers();
    if (group.rank() == 1) return;  // closes its connections
    error = testing::error_of(
        [&] { ga::detail::run_on_all(peers.get(), [&] { static_cast<void>(peers->all_gather_text("a file")); }); });
  });
  CHECK_THAT(error, Catch::Contains("rank 1 has ended or hangs (rank 0 of 2 waited for "));
}

TEST_CASE("Shard: a rank that ends while gradients or norms are exchanged is an error on the others") {
  const bool is_complete = GENERATE(false, true);
  CAPTURE(is_complete);
  auto ranks = make_ranks(2, kinds()[2]);
  std::vector<std::string> errors(2), of_norm(2);
  std::vector<std::optional<ga::Gradients>> kept(2);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto i = static_cast<std::size_t>(group.rank());
    auto& optimizer = *ranks[i].optimizer;
    const auto micro_batch = [&] {
      optimizer.backward(ranks[i].loss_of(1, 0.1));
      if (i == 1 && optimizer.ready() == is_complete) {
        if (is_complete) kept[i] = optimizer.gradients();
        throw std::runtime_error("no more data");
      }
      optimizer.step();
      optimizer.zero_grad();
    };
    errors[i] = testing::error_of([&] {
      ga::Replicas replicas(group, ranks[i].model, optimizer,
                            {.bucket_bytes = bytes_of_wide, .seed_by_rank = false, .shard = ga::Shard::gradients});
      for (int j = 0; j < 4; ++j) micro_batch();
    });
    if (kept[i]) of_norm[i] = testing::error_of([&] { kept[i]->norm(); });
  });
  CHECK_THAT(errors[0], Catch::Contains(is_complete ? "rank 1" : "rank 1 has given up: a window was discarded"));
  CHECK_THAT(errors[1], Catch::Contains("no more data"));
  if (is_complete) CHECK_THAT(of_norm[1], Catch::Contains("Replicas: must outlive every request for a gradient norm"));
}

TEST_CASE("Pieces: names and invalid combinations") {
  using ga::detail::PieceName;
  for (const auto* text : {"0.weight[0:4096 of 64x128]", "a[b][4096:8192 of 8192]", "s[0:1 of ]", "[0:0 of 0]"}) {
    REQUIRE(PieceName::of(text));
    CHECK(PieceName::of(text)->text() == text);
  }
  for (const auto* text : {"", "0.weight", "w[0:1]", "w[0:1 of 1", "w[00:1 of 1]", "w[-1:1 of 1]", "w[0:1 of 1x]",
                           "w[0:1 of x1]", "w[0 :1 of 1]", "w[0:99999999999999999999 of 1]", "w[0:1 of 1]]"})
    CHECK_FALSE(PieceName::of(text));

  const auto row = [](std::int64_t size) { return torch::arange(size).to(at::kFloat); };
  auto values = joined({{"rank_1.o.m.w[4:6 of 2x3]", row(2)}, {"o.m.w[0:4 of 2x3]", row(4)}, {"rank_1.seed", row(1)}});
  CHECK(values.size() == 2);
  CHECK(torch::equal(std::get<at::Tensor>(values.at("o.m.w")),
                     torch::tensor({0., 1., 2., 3., 0., 1.}).to(at::kFloat).view({2, 3})));
  using Values = ga::Archive::Values;
  CHECK_THROWS_WITH(joined(Values{{"w[0:4 of 6]", row(4)}}), Catch::Contains("must be of all 6 elements, got 4"));
  CHECK_THROWS_WITH(joined(Values{{"w[2:6 of 6]", row(4)}}), Catch::Contains("must follow each other"));
  CHECK_THROWS_WITH(joined(Values{{"w[0:4 of 6]", row(4)}, {"rank_1.w[0:2 of 6]", row(2)}}),
                    Catch::Contains("two pieces of w begin at 0"));
  CHECK_THROWS_WITH(joined(Values{{"w[0:4 of 6]", row(4)}, {"w[4:6 of 7]", row(2)}}), Catch::Contains("of one shape"));
  CHECK_THROWS_WITH(joined(Values{{"w[0:4 of 6]", row(4)}, {"w[4:6 of 6]", row(2).to(at::kDouble)}}),
                    Catch::Contains("rows of one dtype"));
  CHECK_THROWS_WITH(joined(Values{{"w[0:4 of 8]", row(5)}, {"w[4:8 of 8]", row(3)}}), Catch::Contains("has 5 numbers"));
  CHECK_THROWS_WITH(joined(Values{{"w[0:4 of 8]", row(0)}, {"w[4:8 of 8]", row(8)}}), Catch::Contains("numbers"));
  CHECK_THROWS_WITH(joined(Values{{"w[0:1 of 1]", row(1)}, {"w", row(1)}}), Catch::Contains("whole and in pieces"));
  std::map<std::string, at::Tensor> unchecked{{"w[0:1000 of 2000]", row(3)}, {"w[1000:2000 of 2000]", row(3)}};
  for (auto& [name, pieces] : ga::detail::take_pieces(unchecked)) {
    CHECK_THROWS_WITH(pieces.whole(), Catch::Contains("has 3 numbers"));
    CHECK_THROWS_WITH(pieces.part(0, 100), Catch::Contains("must have a number for each element or block"));
  }
  CHECK_THROWS_WITH(joined(Values{{"w[0:1 of 9223372036854775807x3]", row(1)}}), Catch::Contains("too large"));
}
