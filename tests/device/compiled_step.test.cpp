// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/gradaccum.hpp>

#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/compilation/step_memory.hpp>
#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>

#include "support/device.hpp"
#include "support/files.hpp"
#include "support/models.hpp"

#include <ATen/ops/mse_loss.h>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

// Steps of models on a device. A stand-in replaces the compiled code, because gradaccum-compile-step's needs a GPU.

namespace ga = gradaccum;
using namespace testing;

namespace {

const at::Device device(at::kCUDA, 0);
constexpr const char* missing = "needs a CUDA device";

torch::nn::Sequential make_network() {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(4, 16), torch::nn::ReLU(), torch::nn::Linear(16, 3));
  model->to(device);
  return model;
}

std::vector<Example> batches_on_device(const std::vector<std::int64_t>& sizes) {
  std::vector<Example> batches;
  for (auto& batch : make_batches(sizes, at::kFloat))
    batches.emplace_back(batch.data.to(device), batch.target.to(device));
  return batches;
}

const auto objective = [](auto& model, auto& batch) {
  const auto output = model->forward(batch.data);
  return ga::Loss(torch::mse_loss(output.to(at::kFloat), batch.target), batch.data.size(0))
      .with(output.detach(), batch.target);
};

/// The objective's step with the interface of gradaccum-compile-step's code.
namespace stand_in {

std::string started_on;  ///< the device for which the code was last created
std::string refusal;     ///< the error of `create`; empty: none
int runs = 0;

const char* create(void** container, const char* on) {
  started_on = on;
  *container = &runs;
  return refusal.empty() ? nullptr : refusal.c_str();
}

void destroy(void* /*container*/) {}

const char* run(void* /*container*/, void** inputs, void** outputs, decltype(&ga::detail::StepMemory::empty_strided),
                void* /*memory*/) {
  std::vector<at::Tensor> in;
  for (int i = 0; i < 7; ++i) {
    auto* const given = static_cast<at::Tensor*>(inputs[i]);
    in.push_back(*given);
    delete given;
  }
  const auto &w1 = in[0], &b1 = in[1], &w2 = in[2], &b2 = in[3], &x = in[4], &target = in[5], &seed = in[6];
  const auto hidden = torch::linear(x, w1, b1), kept = hidden.relu(), output = torch::linear(kept, w2, b2);
  const auto off = output - target;
  const auto of_output = (off * (2. / static_cast<double>(off.numel())) * seed).to(off.scalar_type());
  const auto of_hidden = of_output.mm(w2) * (hidden > 0);
  const std::vector<at::Tensor> results = {at::mse_loss(output, target), output,
                                           of_hidden.t().mm(x),          of_hidden.sum(0),
                                           of_output.t().mm(kept),       of_output.sum(0)};
  for (std::size_t i = 0; i < results.size(); ++i) outputs[i] = new at::Tensor(results[i]);
  ++runs;
  return nullptr;
}

std::size_t inputs(void* /*container*/) { return 7; }
std::size_t outputs(void* /*container*/) { return 6; }

void* const functions[] = {reinterpret_cast<void*>(&create), reinterpret_cast<void*>(&destroy),
                           reinterpret_cast<void*>(&run), reinterpret_cast<void*>(&inputs),
                           reinterpret_cast<void*>(&outputs)};

/// Registers the code in this program for a recorded step, as gradaccum-compile-step would complete it.
ga::InProgram of(const std::filesystem::path& folder) {
  auto manifest = ga::detail::read_manifest(folder, ga::detail::step_format);
  manifest.values["graph-0.code"] = std::string("5eed");
  manifest.values["graph-0.gradients"] = std::string("yyyy");
  manifest.values["graph-0.capability"] = std::string("CUDA 9.0");
  ga::detail::steps_in_program()["stand_in"] = {ga::detail::text_of(manifest), {{"5eed", functions}}};
  return {"stand_in"};
}

}  // namespace stand_in

/// Returns the summary of a tensor in the sample of an exported model.
at::Tensor summary(const at::Tensor& tensor) {
  const auto flat = tensor.detach().cpu().to(at::kDouble).reshape(-1);
  const auto last = flat.numel() - 1, count = std::min<std::int64_t>(flat.numel(), 64);
  std::vector<at::Tensor> numbers;
  for (std::int64_t i = 0; i < count; ++i) numbers.push_back(flat[i * last / std::max<std::int64_t>(count - 1, 1)]);
  numbers.push_back(flat.norm());
  return torch::stack(numbers);
}

/// Makes a folder as gradaccum.export would, of a network and a batch, with its results in the sample.
ga::InProgram exported(torch::nn::Sequential& model, const Example& batch, const std::filesystem::path& folder) {
  ga::save_step(model, objective, batch, folder, {.any_rows = false});
  const auto in_program = stand_in::of(folder);
  auto& text = ga::detail::steps_in_program().at(in_program.name).manifest;
  auto manifest = ga::detail::manifest_of(text, "stand-in", ga::detail::step_format);
  manifest.format = ga::detail::exported_format;
  manifest.values["with_weights"] = manifest.values["tied"] = std::string();
  manifest.values["graph-0.names"] = std::string("data target");
  model->zero_grad();
  const auto loss = objective(model, batch);
  loss.mean.backward();
  const std::string name = "graph-0.", wanted = name + "wanted.";
  ga::io::Tensors weights, sample{{name + "batch.data", batch.data.cpu()},
                                  {name + "batch.target", batch.target.cpu()},
                                  {wanted + "loss", summary(loss.mean)},
                                  {wanted + "output", summary(loss.output)}};
  for (auto& item : model->named_parameters()) {
    weights[item.key()] = item.value().detach().cpu();
    sample[wanted + "gradient." + item.key()] = summary(item.value().grad());
  }
  for (auto& [file, tensors] : {std::pair("model.safetensors", weights), std::pair("sample.safetensors", sample)}) {
    ga::io::save_file(tensors, folder / file);
    const auto content = text_of(folder / file);
    manifest.files[file] = {content.size(), ga::detail::crc32(content.data(), content.size())};
  }
  text = ga::detail::text_of(manifest);
  std::ofstream(folder / ga::detail::manifest_name) << text;
  return in_program;
}

/// Trains with windows of two, by the objective or a compiled step. Returns the parameters.
std::vector<at::Tensor> trained(bool in_float16, bool compiled, ga::CompiledStepReport* report = nullptr) {
  const Directory directory;
  auto model = make_network();
  const auto batches = batches_on_device({4, 4, 4, 4, 3, 4});
  {
    const ga::Autocast autocast(at::kCUDA, at::kHalf, in_float16);
    ga::save_step(model, objective, batches[0], directory / "step", {.any_rows = false});
  }
  ga::CompiledStep step(model, objective, stand_in::of(directory / "step"));
  ga::optim::SGD wrapped(model->parameters(), 0.1);
  ga::GradAccumulator optimizer(wrapped, {.steps = 2});
  ga::AmpScaler scaler({.init_scale = 1024, .growth_interval = 2, .enabled = in_float16, .on_device = true});
  for (auto& batch : batches) {
    const auto loss = [&] {
      const ga::Autocast autocast(at::kCUDA, at::kHalf, in_float16);
      return compiled ? step(batch) : objective(model, batch);
    }();
    optimizer.backward(scaler.scale(loss));
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  if (report) *report = step.report();
  return model->parameters();
}

}  // namespace

TEST_CASE("save_step: a model on a device", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP(missing);
  const Directory directory;
  auto model = make_network();
  const auto batch = batches_on_device({4})[0];
  const auto saved = ga::save_step(model, objective, batch, directory / "step");
  CHECK(saved.batches == std::vector<std::string>{"Float [*, 4] on cuda, Float [*, 3] on cuda"});
  const auto step =
      ga::detail::step_description(ga::detail::read_manifest(directory / "step", ga::detail::step_format), "step");
  CHECK(step.model.starts_with("0.weight Float [16, 4] on cuda parameter\n"));

  model[0]->to(at::kCPU);
  CHECK(contains(error_of([&] { ga::save_step(model, objective, batch, directory / "other"); }),
                 "save_step: the model must be on one device, a CPU or a CUDA device"));
}

TEST_CASE("CompiledStep: trains on a device as the objective does", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP(missing);
  ga::CompiledStepReport report;
  const bool graphs = testing::has_graphs(device);  // before steps are made
  for (const bool in_float16 : {false, true}) {
    CAPTURE(in_float16);
    const auto wanted = trained(in_float16, false), got = trained(in_float16, true, &report),
               again = trained(in_float16, true), untrained = make_network()->parameters();
    const auto rounding = in_float16 ? 2e-3 : 1e-6;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      CHECK(at::allclose(wanted[i], got[i], rounding, rounding));
      CHECK(at::equal(got[i], again[i]));
      CHECK_FALSE(at::allclose(untrained[i], got[i], 3e-3, 3e-3));
    }
    CHECK(report.compiled == 5);
    CHECK(report.why_eager ==
          std::map<std::string, std::int64_t>{{"no graph for Float [3, 4] on cuda, Float [3, 3] on cuda", 1}});
    CHECK(report.replayed == (graphs && !in_float16 ? 5 : 0));
    CHECK(stand_in::started_on == "cuda:0");
  }
}

TEST_CASE("CompiledStep: steps that do not match a device are refused", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP(missing);
  const Directory directory;
  auto model = make_network();
  const auto batch = batches_on_device({4})[0];
  ga::save_step(model, objective, batch, directory / "step", {.any_rows = false});
  const auto in_program = stand_in::of(directory / "step");
  stand_in::refusal = "it is compiled for GPUs of compute capability 9.0, and cuda:0 has 8.0: compile it for that one";
  CHECK(contains(error_of([&] { ga::CompiledStep(model, objective, in_program); }), stand_in::refusal));
  stand_in::refusal.clear();
  CHECK(contains(error_of([&] { ga::CompiledStep(model, objective, directory / "step"); }), "must be compiled"));

  ga::CompiledStep step(model, objective, in_program);
  step(batch).backward();
  model->zero_grad();
  model->to(at::kCPU);
  CHECK(contains(error_of([&] { ga::CompiledStep(model, objective, in_program); }),
                 "it had '0.weight Float [16, 4] on cuda parameter', now '0.weight Float [16, 4] parameter'"));
  const Example on_cpu(batch.data.cpu(), batch.target.cpu());
  step(on_cpu).backward();
  CHECK(step.report().why_eager.size() == 1);  // the model's tensors changed
}

TEST_CASE("CompiledStep: does not wait for a device, except to read the seed with float16", "[cuda]") {
  if (!torch::cuda::is_available() || !WaitCount::possible()) SKIP("needs the emulated device, which counts");
  for (const bool in_float16 : {false, true}) {
    const Directory directory;
    const ga::Autocast autocast(at::kCUDA, at::kHalf, in_float16);
    auto model = make_network();
    const auto batch = batches_on_device({4})[0];
    ga::save_step(model, objective, batch, directory / "step", {.any_rows = false});
    ga::CompiledStep step(model, objective, stand_in::of(directory / "step"));
    for (int i = 0; i < 3; ++i) step(batch).mean.backward();  // checked, and captured if possible
    const WaitCount count;
    for (int i = 0; i < 3; ++i) step(batch).mean.backward();
    CHECK(count.waits() == (in_float16 ? 3 : 0));
  }
}

TEST_CASE("ExportedModel: runs on the device that it was exported for", "[cuda]") {
  if (!torch::cuda::is_available()) SKIP(missing);
  const Directory directory;
  auto network = make_network();
  const auto batch = batches_on_device({4})[0];
  const auto code = exported(network, batch, directory / "model");
  ga::ExportedModel model(directory / "model", {.code = code});
  CHECK(model->parameters()[0].device() == device);
  CHECK(stand_in::started_on == "cuda:0");
  model->loss({{"data", batch.data}, {"target", batch.target}}).backward();
  for (std::size_t i = 0; i < model->parameters().size(); ++i)
    CHECK(at::allclose(model->parameters()[i].grad(), network->parameters()[i].grad()));
  model->save_weights(directory / "saved");
  CHECK(at::equal(ga::io::load_file(directory / "saved" / "model.safetensors").at("0.weight"),
                  network->parameters()[0].cpu()));
  const auto error = error_of([&] { model->loss({{"data", batch.data.cpu()}, {"target", batch.target.cpu()}}); });
  CHECK(contains(error, "there is no code for training of data Float [4, 4], target Float [4, 3]"));
  CHECK(contains(error, "There is:\n  training of data Float [4, 4] on cuda, target Float [4, 3] on cuda"));

  auto other = ga::io::load_file(directory / "model" / "model.safetensors");
  other.at("2.bias").add_(1);
  ga::io::save_file(other, directory / "other.safetensors");
  model->load_weights(directory / "other.safetensors");
  CHECK(at::equal(model->parameters()[3].cpu(), other.at("2.bias")));
}
