// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/training_state.hpp>

#include "support/files.hpp"
#include "support/waves.hpp"

#include "pytorch_values/training_state.hpp"

// The training of training_state.py, which is saved on one side and resumed on both.

namespace ga = gradaccum;
using pytorch_values::more_steps;
using pytorch_values::steps;
using testing::waves;

namespace {

struct Training {
  // No bias before BatchNorm, because its gradient is a rounding error, which AdamW enlarges.
  torch::nn::Sequential model{torch::nn::Linear(torch::nn::LinearOptions(2, 3).bias(false)), torch::nn::BatchNorm1d(3),
                              torch::nn::Linear(3, 1)};
  std::unique_ptr<ga::optim::AdamW> adamw;
  at::Tensor x, y;
  std::int64_t made = 0;

  explicit Training(at::ScalarType dtype) {
    model->to(dtype);
    auto batches = model->named_buffers()["1.num_batches_tracked"];
    batches.set_data(batches.to(at::kLong));  // unchanged by Python's `to`
    testing::fill_with_waves(model);
    std::vector<at::Tensor> weights, others;
    for (auto& parameter : model->parameters()) (parameter.dim() == 2 ? weights : others).push_back(parameter);
    using Options = ga::optim::AdamWOptions;
    adamw = std::make_unique<ga::optim::AdamW>(others, Options(0.02).weight_decay(0.1));
    adamw->add_param_group({weights, std::make_unique<Options>(Options(0.01).weight_decay(0.1))});
    x = waves({20, 2}, 100).to(dtype);
    y = waves({20, 1}, 300).square().to(dtype);
  }

  void run(int count) {
    for (int step = 0; step < count; ++step, ++made) {
      adamw->zero_grad();
      torch::mse_loss(model->forward(x), y).backward();
      adamw->step();
    }
  }

  std::int64_t updates() const { return made; }
  void state(ga::Archive& archive) {
    archive("model", ga::ModelState(model));
    archive("optimizer", ga::OptimizerState(*adamw, model));
    archive("made", made);
  }

  /// Returns values in the order of Python's state_dict.
  std::vector<double> values() const {
    std::vector<double> all;
    for (auto& module : model->children())
      for (auto& tensors : {module->parameters(), module->buffers()})
        for (auto& tensor : tensors)
          for (auto& number : tensor.detach().flatten().to(at::kDouble).split(1)) all.push_back(number.item<double>());
    return all;
  }
};

const std::map<std::string, at::ScalarType> dtypes{{"float32", at::kFloat}, {"float64", at::kDouble}};

double tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 1e-6; }

std::filesystem::path write_files(const std::filesystem::path& folder,
                                  const std::map<std::string, std::string>& files) {
  std::filesystem::create_directories(folder);
  for (auto& [name, bytes] : files) testing::write_text(folder / name, bytes);
  return folder;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

/// Resumes from a state, and returns the largest difference to Python's final values.
double difference_to_python(const pytorch_values::SavedTraining& saved, at::ScalarType dtype,
                            const std::function<void(Training&)>& change = {}) {
  testing::Directory directory;
  Training training(dtype);
  ga::load(write_files(directory / "state", saved.files), training);
  CHECK(training.updates() == steps);
  if (change) change(training);
  training.run(more_steps);
  return largest_difference(training.values(), saved.continued);
}

/// Returns the bytes before the numbers.
std::string safetensors_head(const std::string& bytes) { return bytes.substr(0, bytes.find("}}") + 2); }

}  // namespace

TEST_CASE("PyTorch's values: a state of Python resumes as in Python") {
  for (auto& [name, dtype] : dtypes) {
    INFO(name);
    CHECK(difference_to_python(pytorch_values::begun_in_python.at(name), dtype) < tolerance(dtype));
  }
}

TEST_CASE("PyTorch's values: a state of ours resumes in Python as here") {
  for (auto& [name, dtype] : dtypes) {
    INFO(name);
    CHECK(difference_to_python(pytorch_values::begun_in_cpp.at(name), dtype) < tolerance(dtype));
  }
}

TEST_CASE("PyTorch's values: a training that resumes without a part of its state ends with other values") {
  const auto& saved = pytorch_values::begun_in_python.at("float64");
  CHECK(difference_to_python(saved, at::kDouble, [](auto& training) { training.adamw->state().clear(); }) > 1e-3);
  CHECK(difference_to_python(saved, at::kDouble, [](auto& training) { training.run(1); }) > 1e-3);
  CHECK(difference_to_python(saved, at::kDouble, [](auto& training) { testing::fill_with_waves(training.model); }) >
        1e-3);
}

TEST_CASE("PyTorch's values: the state that Python reads equals the one written now") {
  for (auto& [name, dtype] : dtypes) {
    INFO(name);
    testing::Directory directory;
    Training training(dtype);
    training.run(steps);
    const auto now = ga::save(directory / "now", training);
    const auto then = write_files(directory / "then", pytorch_values::begun_in_cpp.at(name).files);
    for (auto* file : {"model.safetensors", "optimizer.safetensors"}) {
      CHECK(safetensors_head(testing::text_of(now / file)) == safetensors_head(testing::text_of(then / file)));
      const auto before = ga::io::load_file(then / file);
      for (auto& [key, tensor] : ga::io::load_file(now / file)) {
        INFO(key);
        CHECK(at::allclose(tensor, before.at(key), tolerance(dtype), tolerance(dtype)));
      }
    }
  }
}

TEST_CASE("PyTorch's values: write the folder that training_state.py reads", "[.][write]") {
  for (auto& [name, dtype] : dtypes) {
    Training training(dtype);
    training.run(steps);
    std::filesystem::remove_all("training_state/" + name);
    ga::save("training_state/" + name, training);
  }
}
