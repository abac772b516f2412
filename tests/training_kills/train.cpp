// SPDX-License-Identifier: Apache-2.0
//
// train DIRECTORY [SIGNAL MICRO_BATCH]: trains a small model with all parts that have a state, resumes from the newest
// state in DIRECTORY, and prints a hash of all values at the end. After MICRO_BATCH micro-batches it raises SIGNAL.
// With RANK and WORLD_SIZE in the environment it is one of several ranks.
//
// train rewrite DIRECTORY [SEED]: writes the newest state again, valid, with the random numbers of SEED.

#include "support/catch.hpp"

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/learning_rates.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/trainer.hpp>

#include <fmt/format.h>

#include <csignal>
#include <cstdio>

namespace ga = gradaccum;

namespace {

struct Model : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 32));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(32));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.3));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(32, 4));

  at::Tensor forward(const at::Tensor& x) { return last(dropout(norm(first(x)).relu())); }
};

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

/// Prints when training has begun, and raises a signal.
struct Watch {
  int signal = 0;
  std::int64_t at = 0, seen = 0;

  void at_boundary() {
    if (seen++ == 0) say("training");
    if (seen == at) std::raise(signal);
  }
};

/// A hash of names and values.
class Hash {
 public:
  void add(const at::Tensor& tensor) {
    const auto bytes = tensor.detach().contiguous();
    add(bytes.const_data_ptr(), bytes.nbytes());
  }
  void add(const std::string& text) { add(text.data(), text.size() + 1); }
  void add(ga::Archive archive) {
    for (auto& [name, value] : archive.values()) {
      add(name);
      std::visit([this](auto& held) { add_value(held); }, value);
    }
  }
  std::string text() const { return fmt::format("{:08x}", crc_); }

 private:
  void add(const void* data, std::size_t size) { crc_ = ga::detail::crc32(data, size, crc_); }
  void add_value(const at::Tensor& tensor) { add(tensor); }
  void add_value(const std::string& value) { add(value); }
  template <class Number>
  void add_value(const Number& number) {
    add(&number, sizeof number);
  }

  std::uint32_t crc_ = 0;
};

/// Returns a hash of the state and of the next random numbers. Parameters reflect values that `state` leaves out.
template <class Trainer>
std::string hash_of(Trainer& trainer, ga::data::TensorBatches& batches) {
  Hash hash;
  ga::Archive archive;
  archive("trainer", trainer);
  archive("batches", batches);
  hash.add(archive);
  for (int averages = 0; averages < 2; ++averages) {
    for (auto& parameter : trainer.module().parameters()) hash.add(parameter);
    trainer.template policy<ga::Ema>().swap(trainer.module());
  }
  hash.add(torch::rand(100));
  return hash.text();
}

int train(const std::filesystem::path& directory, Watch watch) {
  torch::manual_seed(0);
  const auto group = ga::ProcessGroup::from_environment();
  ga::data::TensorBatches batches(
      torch::randn({102, 8}), torch::randint(4, {102}),
      {.batch_size = 4, .shuffle = true, .seed = 1, .rank = group.rank(), .world_size = group.world_size()});
  Model model;
  ga::optim::AdamW optimizer(model.parameters(), ga::optim::AdamWOptions(1e-2));
  const auto objective = [](auto& net, auto& batch) {
    return ga::Loss{torch::cross_entropy_loss(net.forward(batch.data), batch.target), batch.data.size(0)};
  };
  ga::Trainer trainer(model, optimizer, objective, ga::Accumulate{.steps = 3},
                      ga::MixedPrecision{.dtype = torch::kBFloat16},
                      ga::Schedule{ga::lr::Cosine{.peak = 1e-2, .warmup = 5, .total = 40}}, ga::Ema{.decay = 0.9},
                      watch, ga::DataParallel{.group = group},
                      ga::SaveState{.directory = directory, .every_updates = 5, .keep_last = 2, .on_signals = true});
  const auto report = trainer.fit(batches, {.epochs = 5, .tail = ga::Tail::carry, .resume = directory});
  say("from " + (report.resumed_from.empty() ? "the beginning" : report.resumed_from));
  if (report.signal != 0) {
    say(fmt::format("window {}", trainer.window().micro_batches));
    return 128 + report.signal;
  }
  // In the open window, a rank counts only its own samples.
  TORCH_CHECK(report.epochs == 5 && (report.samples == 5 * 102 || group.world_size() > 1),
              "there must be 5 epochs of 102 samples, got ", report.epochs, " and ", report.samples, " samples");
  say("hash " + hash_of(trainer, batches));
  return 0;
}

int rewrite(const std::filesystem::path& directory, const char* seed) {
  ga::detail::StateDirectory states(directory);
  const auto newest = states.finished().back();
  auto values = ga::io::read_state(newest.path);
  if (seed) {
    torch::manual_seed(std::atoi(seed));
    ga::Archive archive;
    archive("random", ga::RandomState());
    for (auto& [name, value] : archive.values()) values.at(name) = value;
  }
  ga::Archive changed;
  for (auto& entry : values) std::visit([&](auto& held) { changed(entry.first, held); }, entry.second);
  const auto state = states.begin(newest.step);
  ga::io::write_state(changed, state->folder());
  state->finish();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  int status = 1;
  const auto error = testing::error_of([&] {
    if (arguments.at(0) == "rewrite")
      status = rewrite(arguments.at(1), argv[3]);
    else if (arguments.size() == 3)
      status = train(arguments[0], {std::stoi(arguments[1]), std::stoi(arguments[2])});
    else
      status = train(arguments[0], {});
  });
  if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
  return status;
}
