// SPDX-License-Identifier: Apache-2.0
//
// Saving and loading a model with the state of AdamW, compared to LibTorch's functions. Bounds: the same bytes through
// write() and fsync() to one file, and through read().
//
// Saving: each writes new files and removes them, so that none waits for bytes that another has not yet written to
// disk. Loading: the files are cached in memory for all, and each load is the first of a new process, as in a resumed
// training: its memory is not mapped yet.
//
// In the background: how long a save blocks the training, with a copy of the same bytes as the bound; and how much the
// writing slows down the training. benchmarks/python/async_save.py measures torch.distributed.checkpoint.async_save.
// `--device cuda` measures only this, until the training's stream continues.

#include <gradaccum/background_saver.hpp>

#include "harness.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <filesystem>
#include <functional>
#include <memory>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ga = gradaccum;
using std::filesystem::path;

namespace {

struct Training {
  at::Device device;
  torch::nn::Sequential model;
  std::unique_ptr<torch::optim::AdamW> optimizer;

  explicit Training(int layers, at::Device where = at::kCPU) : device(where) {
    for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(2048, 2048));
    model->to(device);
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters());
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer->step();
    optimizer->zero_grad();
  }

  /// One update of `rows` rows; with 64 it takes about a second on two threads.
  void update(std::int64_t rows) {
    model->forward(torch::ones({rows, 2048}, device)).square().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
    wait();
  }
  /// Waits for the stream that trains, if there is one.
  void wait() const {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl streams(device.type());
    streams.synchronizeStream(streams.getStream(device));
  }

  std::int64_t updates() const { return 1; }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(model));
    archive("optimizer", ga::OptimizerState(*optimizer, model));
  }

  /// Returns parameters and moments.
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (auto& parameter : model->parameters()) {
      const auto& state =
          static_cast<torch::optim::AdamWParamState&>(*optimizer->state().at(parameter.unsafeGetTensorImpl()));
      all.insert(all.end(), {parameter.detach(), state.exp_avg(), state.exp_avg_sq()});
    }
    return all;
  }
  double gigabytes() const {
    double bytes = 0;
    for (auto& tensor : tensors()) bytes += static_cast<double>(tensor.nbytes());
    return bytes / 1e9;
  }
};

void check(bool well, const path& file) {
  if (!well) throw std::system_error(errno, std::generic_category(), file.string());
}

class File {
 public:
  File(const path& name, int flags) : name_(name), descriptor_(::open(name.c_str(), flags, 0666)) {
    check(descriptor_ >= 0, name);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(descriptor_); }

  void sync() { check(::fsync(descriptor_) == 0, name_); }
  /// Calls the system's `write` or `read` until all bytes of a tensor are done.
  template <class Call>
  void each(const std::vector<at::Tensor>& tensors, const Call& call) {
    for (auto& tensor : tensors)
      for (std::size_t done = 0; done < tensor.nbytes();) {
        const auto now = call(descriptor_, static_cast<char*>(tensor.data_ptr()) + done, tensor.nbytes() - done);
        check(now > 0, name_);
        done += static_cast<std::size_t>(now);
      }
  }

 private:
  path name_;
  int descriptor_;
};

void torch_save(const Training& training, const path& folder) {
  torch::save(training.model, folder / "model.pt");
  torch::save(*training.optimizer, folder / "optimizer.pt");
}
void torch_load(Training& training, const path& folder) {
  torch::load(training.model, folder / "model.pt");
  torch::load(*training.optimizer, folder / "optimizer.pt");
}
void plain_write(const std::vector<at::Tensor>& tensors, const path& name) {
  File file(name, O_WRONLY | O_CREAT | O_TRUNC);
  file.each(tensors, ::write);
  file.sync();
}

void compare_saving(Training& training, const path& folder, const harness::Options& options) {
  const auto remove_torch = [&] {
    std::filesystem::remove(folder / "model.pt");
    std::filesystem::remove(folder / "optimizer.pt");
  };
  const auto ours = [&] { std::filesystem::remove_all(ga::save(folder / "ours", training)); };
  const auto theirs = [&] {
    torch_save(training, folder);
    remove_torch();
  };
  const auto theirs_synced = [&] {
    torch_save(training, folder);
    for (auto* name : {"model.pt", "optimizer.pt"}) File(folder / name, O_RDONLY).sync();
    remove_torch();
  };
  const auto bound = [&, tensors = training.tensors()] {
    plain_write(tensors, folder / "plain");
    std::filesystem::remove(folder / "plain");
  };
  harness::contest("Save a model with AdamW's state",
                   {{"ga::save", ours},
                    {"torch::save, not synced to the disk", theirs},
                    {"torch::save, fsync()", theirs_synced},
                    {.name = "bound: write(), fsync()", .run = bound, .bound = true}},
                   training.gigabytes(), "GB", options);
}

void compare_blocking(Training& training, const path& folder, const ga::BackgroundSaverOptions& saving,
                      const harness::Options& options) {
  ga::BackgroundSaver saver(folder / "background", saving);
  const auto blocked = [&] {
    saver.wait();
    return harness::seconds([&] {
      saver.save(training);
      training.wait();
    });
  };
  const auto whole = [&] {
    saver.wait();
    return harness::seconds([&] {
      saver.save(training);
      saver.wait();
    });
  };
  const auto tensors = training.tensors();
  std::vector<at::Tensor> copies;
  for (auto& tensor : tensors)
    copies.push_back(at::empty_like(tensor, at::TensorOptions(at::kCPU).pinned_memory(!tensor.is_cpu())));
  const auto copy = [&] {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (saving.stage_on_device)
        tensors[i].clone();
      else
        copies[i].copy_(tensors[i]);
    training.wait();
  };
  const auto ours = [&] { ga::save(folder / "ours", training, {.keep_last = 1}); };
  harness::contest("For how long a save holds up the training",
                   {{.name = "BackgroundSaver::save", .seconds = blocked},
                    {.name = "ga::save", .run = ours},
                    {.name = "BackgroundSaver::save and wait", .seconds = whole},
                    {.name = "bound: Tensor::copy_ of each tensor, clone() with --stage", .run = copy, .bound = true}},
                   training.gigabytes(), "GB", options);
}

struct Work {
  std::int64_t rows = 64, updates = 20, rounds = 3;  // updates between two saves
};

/// Measures updates while nothing is written, and while a state is written.
void compare_updates_meanwhile(Training& training, const path& folder, const ga::BackgroundSaverOptions& saving,
                               const Work& work) {
  ga::BackgroundSaver saver(folder / "background", saving);
  const auto update = [&] { return harness::seconds([&] { training.update(work.rows); }); };
  std::vector<double> alone, meanwhile;
  for (std::int64_t round = 0; round < work.rounds; ++round) {
    for (int i = 0; i < 3; ++i) alone.push_back(update());
    saver.save(training);
    while (saver.busy()) meanwhile.push_back(update());
    saver.wait();
  }
  fmt::print(
      "\nAn update of {} rows: {:.0f} ms alone, {:.0f} ms while a state is written ({:.2f} x; a state takes {} "
      "updates)\n",
      work.rows, 1e3 * harness::median(alone), 1e3 * harness::median(meanwhile),
      harness::median(meanwhile) / harness::median(alone), meanwhile.size() / static_cast<std::size_t>(work.rounds));
}

/// Alternates trainings that save and one that does not.
void compare_trainings(Training& training, const path& folder, const ga::BackgroundSaverOptions& saving,
                       const Work& work) {
  ga::BackgroundSaver saver(folder / "background", saving);
  std::vector<std::pair<std::string, std::function<void()>>> ways{
      {"never saves", [] {}},
      {"BackgroundSaver", [&] { saver.save(training); }},
      {"ga::save", [&] { ga::save(folder / "ours", training, {.keep_last = 1}); }}};
  std::vector<std::vector<double>> times(ways.size());
  for (std::int64_t round = 0; round < work.rounds; ++round)
    for (std::size_t way = 0; way < ways.size(); ++way) {
      times[way].push_back(harness::seconds([&] {
        ways[way].second();
        for (std::int64_t i = 0; i < work.updates; ++i) training.update(work.rows);
      }));
      saver.wait();
    }
  fmt::print("\n{} updates, and a save before them:\n", work.updates);
  for (std::size_t way = 0; way < ways.size(); ++way)
    fmt::print("  {:<20} {:>8.2f} s  {:+.1f} %\n", ways[way].first, harness::median(times[way]),
               100 * (harness::median(times[way]) / harness::median(times[0]) - 1));
}

/// Returns the result of `work` in a new process. This process must have no threads yet.
double in_a_new_process(const std::function<double()>& work) {
  int ends[2];
  check(::pipe(ends) == 0, "pipe()");
  const auto child = ::fork();
  check(child >= 0, "fork()");
  if (child == 0) {
    double result = -1;
    try {
      result = work();
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
    }
    ::_exit(::write(ends[1], &result, sizeof result) == sizeof result ? 0 : 1);
  }
  ::close(ends[1]);
  double result = -1;
  check(::read(ends[0], &result, sizeof result) == sizeof result, "read() from a process");
  ::close(ends[0]);
  check(::waitpid(child, nullptr, 0) == child, "waitpid()");
  TORCH_CHECK(result >= 0, "a process has failed");
  return result;
}

void compare_loading(int layers, const path& folder, const harness::Options& options) {
  const double gigabytes = in_a_new_process([&] {
    torch::manual_seed(1);
    Training training(layers);
    ga::save(folder / "ours", training);
    torch_save(training, folder);
    plain_write(training.tensors(), folder / "plain");
    return training.gigabytes();
  });
  const auto ours = [&] {
    Training training(layers);
    const auto seconds = harness::seconds([&] { ga::load(folder / "ours", training); });
    Training peer(layers);
    torch_load(peer, folder);
    const auto mine = training.tensors(), its = peer.tensors();
    for (std::size_t i = 0; i < mine.size(); ++i) TORCH_CHECK(mine[i].equal(its[i]), "both must load the same");
    return seconds;
  };
  const auto theirs = [&] {
    Training training(layers);
    return harness::seconds([&] { torch_load(training, folder); });
  };
  const auto bound = [&] {
    const auto old = Training(layers).tensors();
    return harness::seconds([&] {
      std::vector<at::Tensor> buffers;
      for (auto& tensor : old) buffers.push_back(torch::empty_like(tensor));
      File(folder / "plain", O_RDONLY).each(buffers, ::read);
    });
  };
  harness::contest("Load a model with AdamW's state",
                   {{.name = "ga::load", .seconds = [&] { return in_a_new_process(ours); }},
                    {.name = "torch::load", .seconds = [&] { return in_a_new_process(theirs); }},
                    {.name = "bound: read() into new memory, one thread",
                     .bound = true,
                     .seconds = [&] { return in_a_new_process(bound); }}},
                   gigabytes, "GB", options);
}

}  // namespace

int main(int argc, char** argv) {
  path directory = ".";
  int layers = 24;
  std::string device = "cpu";
  ga::BackgroundSaverOptions saving{.keep_last = 1};
  Work work;
  const auto options = harness::parse(
      argc, argv, "Saving and loading a training against torch::save and torch::load", [&](CLI::App& app) {
        app.add_option("--directory", directory, "where to write, some 4 GB")->check(CLI::ExistingDirectory);
        app.add_option("--layers", layers, "of 4.2 M parameters each")->check(CLI::Range(1, 10'000));
        app.add_option("--device", device, "of the training; on another than the processor only what a save holds up");
        app.add_flag("--stage", saving.stage_on_device, "copy within the device first");
        app.add_option("--rows", work.rows, "of an update's batch")->check(CLI::Range(1, 100'000));
        app.add_option("--updates", work.updates, "from one save to the next")->check(CLI::Range(1, 10'000));
        app.add_option("--rounds", work.rounds, "of trainings with saves and without")->check(CLI::Range(1, 1000));
      });
  const auto folder = directory / ("benchmark_save_load." + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  try {
    const bool on_host = at::Device(device).is_cpu();
    if (on_host) compare_loading(layers, folder, options);
    Training training(layers, device);
    if (on_host) compare_saving(training, folder, options);
    compare_blocking(training, folder, saving, options);
    compare_updates_meanwhile(training, folder, saving, work);
    compare_trainings(training, folder, saving, work);
  } catch (...) {
    std::filesystem::remove_all(folder);
    throw;
  }
  std::filesystem::remove_all(folder);
}
