// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/amp_scaler.hpp>
#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/io/formats.hpp>
#include <gradaccum/detail/kernels/crc32.hpp>
#include <gradaccum/exported_model.hpp>
#include <gradaccum/grad_accumulator.hpp>
#include <gradaccum/io/weights.hpp>
#include <gradaccum/metrics.hpp>
#include <gradaccum/optim/adamw.hpp>
#include <gradaccum/policies/accumulate.hpp>
#include <gradaccum/policies/clip.hpp>
#include <gradaccum/policies/data_parallel.hpp>
#include <gradaccum/policies/save_state.hpp>
#include <gradaccum/policies/validate.hpp>
#include <gradaccum/trainer.hpp>

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "support/outcome.hpp"
#include "support/ranks.hpp"

namespace ga = gradaccum;
namespace inner = gradaccum::detail;
namespace fs = std::filesystem;
using testing::error_of;

namespace {

const fs::path exported = EXPORTED;

ga::ExportedModel model_of(const std::string& name) {
  return ga::ExportedModel(exported / name, {.code = ga::InProgram{name}});
}

/// Returns the difference of two tensors, relative to their norm; a bias without a true gradient stays near 0.
double off(const at::Tensor& got, const at::Tensor& wanted) {
  const auto exact = wanted.detach().to(at::kDouble);
  return ((got.detach() - exact).norm() / (exact.norm() + 1e-3)).item<double>();
}

/// The batches and results of Python's training.
struct Oracle {
  explicit Oracle(const std::string& name) : tensors(ga::io::load_file(exported / (name + ".safetensors"))) {
    for (;; ++batches) {
      if (!tensors.contains("loss." + std::to_string(batches))) break;
    }
  }
  ga::io::Tensors batch(int number) const {
    const auto prefix = std::to_string(number) + ".";
    ga::io::Tensors batch;
    for (auto& [name, tensor] : tensors)
      if (name.starts_with(prefix)) batch[name.substr(prefix.size())] = tensor;
    return batch;
  }
  std::vector<ga::io::Tensors> all() const {
    std::vector<ga::io::Tensors> all;
    for (int i = 0; i < batches; ++i) all.push_back(batch(i));
    return all;
  }
  double loss(int number) const { return tensors.at("loss." + std::to_string(number)).item<double>(); }

  ga::io::Tensors tensors;
  int batches = 0;
};

ga::optim::AdamW adamw(ga::ExportedModel& model) {
  std::vector<at::Tensor> trained = model->parameters();
  std::erase_if(trained, [](auto& parameter) { return !parameter.requires_grad(); });
  return ga::optim::AdamW(trained, ga::optim::AdamWOptions(5e-3).eps(1e-4).weight_decay(0.1));
}

struct Differences {
  double losses = 0, weights = 0;
};

/// Trains as Python did, in windows of two micro-batches of different sizes, with clipping.
Differences differences_from_python(const std::string& name, int steps = 2,
                                    const ga::AmpScalerOptions& scale = {.enabled = false}) {
  const Oracle oracle(name);
  auto model = model_of(name);
  auto sgd = adamw(model);
  ga::GradAccumulator optimizer(sgd, {.steps = steps});
  ga::AmpScaler scaler(scale);
  Differences found;
  torch::manual_seed(7);
  for (int i = 0; i < oracle.batches; ++i) {
    const auto loss = model->loss(oracle.batch(i));
    found.losses = std::max(found.losses, std::abs(loss.mean.item<double>() - oracle.loss(i)) / oracle.loss(i));
    optimizer.backward(scaler.scale(loss));
    optimizer.clip_grad_norm_(0.5);
    scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
  }
  const auto compare = [&](const auto& tensors) {
    for (auto& item : tensors)
      found.weights = std::max(found.weights, off(item.value(), oracle.tensors.at("after." + item.key())));
  };
  compare(model->named_parameters());
  compare(model->named_buffers());
  return found;
}

ga::Loss loss_of(ga::ExportedModel& model, const ga::io::Tensors& batch) { return model->loss(batch); }

at::Tensor flat(ga::ExportedModel& model) {
  std::vector<at::Tensor> all;
  for (auto& parameter : model->parameters()) all.push_back(parameter.detach().to(at::kDouble).flatten());
  return torch::cat(all);
}

/// Returns an empty text if the error has all of these parts, else the error.
std::string beside(const std::string& error, const std::vector<std::string>& parts) {
  const bool all = std::ranges::all_of(parts, [&](auto& part) { return error.find(part) != std::string::npos; });
  return all ? "" : "only: " + error;
}

/// A copy of an export that can be damaged, with the library of its code.
class Folder {
 public:
  explicit Folder(const std::string& name = "bert") {
    fs::copy(exported / name, path, fs::copy_options::recursive);
    manifest = inner::read_manifest(path, inner::exported_format);
  }
  void put(const std::string& name, const std::string& content) {
    testing::write_text(path / name, content);
    manifest.files[name] = {content.size(), inner::crc32(content.data(), content.size())};
  }
  const fs::path& write() const {
    testing::write_text(path / "manifest.json", inner::text_of(manifest));
    return path;
  }

 private:
  testing::Directory directory_;

 public:
  const fs::path path = directory_ / "copy";
  inner::Manifest manifest;
};

/// Returns the error of loading a folder with the code in this program.
std::string error_of_folder(const Folder& folder, const std::string& code = "bert") {
  return error_of([&] { ga::ExportedModel(folder.write(), {.code = ga::InProgram{code}}); });
}

}  // namespace

TEST_CASE("ExportedModel: twenty updates with windows and clipping equal Python's, for each architecture in float64") {
  for (const std::string name : {ARCHITECTURES}) {
    INFO(name);
    const auto found = differences_from_python(name);
    CHECK(found.losses < 1e-10);
    CHECK(found.weights < 1e-10);
  }
}

TEST_CASE("ExportedModel: in float32, with normalization, dropout and tied weights, equal up to rounding") {
  const auto found = differences_from_python("own");
  CHECK(found.losses < 1e-4);
  CHECK(found.weights < 1e-3);
}

TEST_CASE("ExportedModel: in mixed precision, equal up to bfloat16's rounding") {
  const auto found = differences_from_python("llama_bf16");
  CHECK(found.losses < 0.02);
  CHECK(found.weights < 0.05);
}

TEST_CASE("ExportedModel: in float16, with a loss scale inside the code") {
  const auto found = differences_from_python("half", 2, {.init_scale = 1024});
  CHECK(found.losses < 2e-3);
  CHECK(found.weights < 5e-3);
  CHECK(differences_from_python("half", 2, {.init_scale = std::ldexp(1.0, -20)}).weights > 5e-2);  // underflow

  auto model = model_of("half");
  auto optimizer = adamw(model);
  ga::AmpScaler scaler({.init_scale = std::ldexp(1.0, 60)});  // finite in float32
  scaler.scale(model->loss(Oracle("half").batch(0)).mean).backward();
  CHECK_FALSE(scaler.step(optimizer));
}

TEST_CASE("ExportedModel: other windows than Python's give other weights") {
  CHECK(differences_from_python("bert", 4).weights > 1e-4);
}

TEST_CASE("ExportedModel: a library in the folder is loaded, and gives the results of the code in the program") {
  Folder folder;
  const auto name = "graph-0." + std::get<std::string>(folder.manifest.values.at("graph-0.code")) + ".so";
  folder.put(name, testing::text_of(EXPORTED_LIBRARY));
  ga::ExportedModel loaded(folder.write()), built_in = model_of("bert");
  const auto batch = Oracle("bert").batch(1);
  const auto gradients_of = [&](ga::ExportedModel& model) {
    torch::manual_seed(3);
    model->loss(batch).backward();
    std::vector<at::Tensor> all;
    for (auto& parameter : model->parameters()) all.push_back(parameter.grad().flatten());
    return torch::cat(all);
  };
  CHECK(at::equal(gradients_of(loaded), gradients_of(built_in)));

  Folder damaged;  // another folder, because loaded code must not be overwritten
  damaged.put(name, "no library");
  CHECK(beside(error_of([&] { ga::ExportedModel model(damaged.write()); }), {"must be a library"}) == "");
  testing::write_text(damaged.path / name, "another");
  CHECK(beside(error_of([&] { ga::ExportedModel model(damaged.path); }), {name}) == "");
}

TEST_CASE("ExportedModel: has Python's names and modes") {
  auto model = model_of("own");
  const auto parameters = model->named_parameters();
  CHECK(parameters.contains("middle.weight"));
  CHECK_FALSE(parameters.contains("again.weight"));  // a tied name
  CHECK_FALSE(parameters["again.bias"].requires_grad());
  CHECK(model->named_buffers().contains("norm.running_mean"));
  CHECK(model->passes() == std::vector<std::string>{"training of labels Long [*], x Float [*, 6]",
                                                    "evaluation of labels Long [*], x Float [*, 6]",
                                                    "inference of x Float [*, 6]"});

  const auto batch = Oracle("own").batch(0);
  const auto mean = model->named_buffers()["norm.running_mean"].clone();
  model->eval();
  const auto evaluated = model->loss(batch);
  CHECK_FALSE(evaluated.mean.requires_grad());
  CHECK(evaluated.items == 4);
  CHECK(at::equal(model->named_buffers()["norm.running_mean"], mean));
  CHECK(at::equal(model->loss(batch).mean, evaluated.mean));  // dropout is off
  CHECK(off(model->forward({{"x", batch.at("x")}}), evaluated.output) < 1e-6);
  CHECK(at::equal(evaluated.target, batch.at("labels")));
  CHECK(model->forward({{"x", batch.at("x").narrow(0, 0, 1)}}).sizes() == at::IntArrayRef{1, 3});

  model->train();
  CHECK(model->loss(batch).mean.requires_grad());
  CHECK_FALSE(at::equal(model->named_buffers()["norm.running_mean"], mean));
  const at::NoGradGuard no_grad;
  CHECK_FALSE(model->loss(batch).mean.requires_grad());
}

TEST_CASE("ExportedModel: an index out of range is an error that names it, on any number of threads") {
  auto model = model_of("bert"), undisturbed = model_of("bert");
  const auto batch = Oracle("bert").batch(0);
  const auto error_of_batch = [&](const std::string& name, std::int64_t index) {
    auto wrong = batch;
    wrong[name] = wrong[name].clone();
    wrong[name].flatten()[-1] = index;
    return error_of([&] { model->loss(wrong); });
  };
  const auto threads = GENERATE(1, 3);
  const auto before = at::get_num_threads();
  at::set_num_threads(threads);
  const auto as_before = c10::make_scope_exit([&] { at::set_num_threads(before); });
  for (const std::int64_t index : {40, -1, -7, 1 << 30})
    CHECK(beside(error_of_batch("input_ids", index),
                 {c10::str("index ", index, " must be in [0, 40); input_ids has it at [3, 9]")}) == "");
  CHECK(beside(error_of_batch("labels", 3), {"index 3 must be in [0, 3)", "; labels has it at [3]"}) == "");
  CHECK(error_of_batch("labels", -100) == "");  // an ignored label

  const auto seed_and_run = [&](ga::ExportedModel& of) {
    torch::manual_seed(3);
    of->loss(batch).backward();
    std::vector<at::Tensor> all{flat(of)};
    for (auto& parameter : of->parameters()) all.push_back(parameter.grad());
    return all;
  };
  CHECK(testing::same_bits(seed_and_run(model), seed_and_run(undisturbed)));
}

TEST_CASE("ExportedModel: a sample with an index out of range is an error of the constructor") {
  Folder folder;
  auto sample = ga::io::load_file(folder.path / "sample.safetensors");
  sample.at("graph-0.batch.input_ids").fill_(1000);
  ga::io::save_file(sample, folder.path / "sample.safetensors");
  folder.put("sample.safetensors", testing::text_of(folder.path / "sample.safetensors"));
  CHECK(beside(error_of_folder(folder), {"index 1000 must be in [0, 40); input_ids has it at [0, 0]"}) == "");
}

TEST_CASE("ExportedModel: items are tokens for a language model") {
  auto model = model_of("llama_bf16");
  const auto batch = Oracle("llama_bf16").batch(0);
  const auto counted = (batch.at("labels").narrow(1, 1, 9) != -100).sum().item<double>();
  CHECK(model->loss(batch).items == counted);
  CHECK(counted < 36);
}

TEST_CASE("ExportedModel: items are the labels that are not ignored for a classification") {
  auto model = model_of("bert");
  const auto batch = Oracle("bert").batch(0);
  CHECK((batch.at("labels") != -100).sum().item<double>() == 2);  // 2 of 4 rows
  CHECK(model->loss(batch).items == 2);
  auto none = batch;
  none["labels"] = torch::full({4}, -100, at::kLong);
  CHECK(model->loss(none).items == 0);
}

TEST_CASE("ExportedModel: parameters may be frozen, and not unfrozen") {
  auto model = model_of("bert"), frozen = model_of("bert");
  const auto batch = Oracle("bert").batch(0);
  auto parameters = frozen->named_parameters();
  parameters["classifier.weight"].set_requires_grad(false);
  for (auto* const one : {&model, &frozen}) {
    torch::manual_seed(1);
    (*one)->loss(batch).backward();
  }
  CHECK_FALSE(parameters["classifier.weight"].grad().defined());
  CHECK(at::equal(parameters["classifier.bias"].grad(), model->named_parameters()["classifier.bias"].grad()));

  auto own = model_of("own");
  own->named_parameters()["again.bias"].set_requires_grad(true);
  CHECK(beside(error_of([&] { own->loss(Oracle("own").batch(0)); }), {"must be as they were exported", "again.bias"}) ==
        "");
}

TEST_CASE("ExportedModel: batches and modes that were not exported are errors that list the exported ones") {
  auto model = model_of("bert");
  auto batch = Oracle("bert").batch(0);
  const auto error = [&](ga::io::Tensors other) { return error_of([&] { model->loss(other); }); };
  const std::string exported_passes =
      "training of attention_mask Long [*, 10], input_ids Long [*, 10], labels Long [*]";
  auto longer = batch;
  longer["input_ids"] = torch::zeros({4, 11}, at::kLong);
  CHECK(beside(error(longer), {exported_passes, "input_ids Long [4, 11]"}) == "");
  auto more = batch;
  more["token_type_ids"] = batch["input_ids"];
  CHECK(beside(error(more), {exported_passes}) == "");
  auto fewer = batch;
  fewer["labels"] = batch["labels"].narrow(0, 0, 2);
  CHECK(beside(error(fewer), {exported_passes}) == "");
  CHECK(beside(error({}), {exported_passes}) == "");
  batch["input_ids"] = batch["input_ids"].to(at::kInt);
  CHECK(beside(error(batch), {exported_passes}) == "");

  batch = Oracle("bert").batch(0);
  model->eval();
  CHECK(beside(error(batch), {"there is no code for evaluation of", exported_passes}) == "");
  model->train();
  {
    const ga::Autocast autocast(at::kCPU, at::kBFloat16);
    CHECK(beside(error(batch), {"autocast is compiled in"}) == "");
  }
  model->to(at::kFloat);
  CHECK(beside(error(batch), {"must be as they were exported"}) == "");
}

TEST_CASE("ExportedModel: under a Trainer it validates, and resumes bitwise from a state") {
  const testing::Directory directory;
  const Oracle oracle("own");
  const auto run = [&](std::uint64_t seed, std::int64_t updates, bool saves) {
    torch::manual_seed(seed);
    auto model = model_of("own");
    auto optimizer = adamw(model);
    auto data = oracle.all();
    std::optional<ga::SaveState> saving;
    if (saves) saving = ga::SaveState{.directory = directory / "states", .every_updates = 3};
    ga::Trainer trainer(model, optimizer, loss_of, ga::Accumulate{.steps = 3}, ga::ClipNorm{.max = 0.5}, saving,
                        ga::Validate(data, ga::Accuracy()));
    const auto report =
        trainer.fit(data, {.epochs = 2, .updates = updates, .resume = saves ? directory / "states" : fs::path()});
    if (updates == 100) CHECK(report.validations.size() == (saves ? 3 : 2));  // one at the end of the first run
    return flat(model);
  };
  const auto straight = run(3, 100, false);
  CHECK_FALSE(at::equal(run(3, 10, true), straight));
  CHECK(at::equal(run(4, 100, true), straight));
}

TEST_CASE("ExportedModel: two ranks equal one process with windows twice as long, sharded or not") {
  const auto shard = GENERATE(ga::Shard::none, ga::Shard::gradients);
  const auto all = Oracle("vit").all();
  auto one = model_of("vit");
  auto optimizer = adamw(one);
  ga::Trainer(one, optimizer, loss_of, ga::Accumulate{.steps = 4}).fit(all);

  std::vector<ga::ExportedModel> models{model_of("vit"), model_of("vit")};
  const auto before = flat(models[0]);
  tests::as_ranks(2, [&](const ga::ProcessGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    std::vector<ga::io::Tensors> own;
    for (auto i = rank; i < all.size(); i += 2) own.push_back(all[i]);
    auto of_rank = adamw(models[rank]);
    ga::Trainer(models[rank], of_rank, loss_of, ga::Accumulate{.steps = 2},
                ga::DataParallel{.group = group, .shard = shard})
        .fit(own);
  });
  for (auto& model : models) CHECK(off(flat(model), flat(one)) < 1e-9);
  CHECK(off(before, flat(one)) > 1e-3);
}

TEST_CASE("ExportedModel: saved weights are loaded again, also by Python") {
  for (const auto* const name : {"vit", "own"}) {
    auto model = model_of(name), other = model_of(name);
    const auto before = flat(other);
    auto batch = Oracle(name).batch(0);
    auto optimizer = adamw(model);
    model->loss(batch).backward();
    optimizer.step();
    model->eval();
    batch.erase("labels");
    const auto output = model->forward(batch);
    const auto folder = exported / (std::string(name) + ".trained");
    model->save_weights(folder);
    other->load_weights(folder);
    CHECK(testing::same_bits({flat(other)}, {flat(model)}));
    CHECK_FALSE(at::equal(before, flat(model)));
    CHECK(at::equal(other->forward(batch), output));
    batch["output"] = output;  // for read_weights.py
    ga::io::save_file(batch, exported / (std::string(name) + ".output.safetensors"));

    CHECK(beside(error_of([&] { model->save_weights(exported / name); }), {"neither an exported model nor a state"}) ==
          "");
    auto tensors = ga::io::load_file(folder / "model.safetensors");
    const auto kept = flat(other);
    const testing::Directory directory;
    const auto error = [&](const ga::io::Tensors& changed) {
      ga::io::save_file(changed, directory / "changed.safetensors");
      return error_of([&] { other->load_weights(directory / "changed.safetensors"); });
    };
    const auto first = other->named_parameters()[0].key();
    auto changed = tensors;
    changed.erase(first);
    CHECK(beside(error(changed), {"must have the weight " + first}) == "");
    changed[first] = torch::ones({2});
    CHECK(beside(error(changed), {first + " must be "}) == "");
    changed = tensors;
    changed["more"] = torch::ones({2});
    CHECK(beside(error(changed), {"got more"}) == "");
    CHECK(at::equal(flat(other), kept));
  }
  CHECK(fs::exists(exported / "vit.trained" / "config.json"));
}

TEST_CASE("ExportedModel: files may be links, as in Hugging Face's cache") {
  const Folder folder;
  folder.write();
  const auto blobs = fs::path(folder.path.string() + ".blobs");
  fs::rename(folder.path, blobs);
  fs::create_directory(folder.path);
  for (auto& blob : fs::directory_iterator(blobs)) fs::create_symlink(blob, folder.path / blob.path().filename());
  CHECK(error_of([&] { ga::ExportedModel(folder.path, {.code = ga::InProgram{"bert"}}); }) == "");
  testing::write_text(blobs / "model.safetensors", "short");
  CHECK(beside(error_of([&] { ga::ExportedModel(folder.path, {.code = ga::InProgram{"bert"}}); }),
               {"model.safetensors: must have"}) == "");
}

TEST_CASE("ExportedModel: changed files of an export are named") {
  Folder folder;
  CHECK(error_of_folder(folder) == "");
  CHECK(beside(error_of_folder(folder, "vit"), {"must be the export that was built into this program"}) == "");
  CHECK(beside(error_of_folder(folder, "none"), {"which has bert"}) == "");

  auto weights = ga::io::load_file(folder.path / "model.safetensors");
  const auto put = [&](const ga::io::Tensors& tensors, const char* file = "model.safetensors") {
    ga::io::save_file(tensors, folder.path / file, {{"format", "pt"}});
    folder.put(file, testing::text_of(folder.path / file));
  };
  const auto name = std::string("bert.encoder.layer.0.attention.self.value.weight");
  auto others = weights;
  others[name] = weights[name] * 1.01;
  put(others);
  CHECK(beside(error_of_folder(folder), {"the training of", "must give what Python computed", "differs by"}) == "");
  others[name] = weights[name].narrow(0, 0, 3);
  put(others);
  CHECK(beside(error_of_folder(folder), {"it had '" + name + " Double [16, 16] parameter'"}) == "");
  others.erase(name);
  put(others);
  CHECK(beside(error_of_folder(folder), {"buffer." + name}) == "");
  testing::write_text(folder.path / "model.safetensors", "short");
  CHECK(beside(error_of_folder(folder), {"model.safetensors"}) == "");
  put(weights);
  CHECK(error_of_folder(folder) == "");

  auto sample = ga::io::load_file(folder.path / "sample.safetensors");
  auto changed = sample;
  auto& gradient = changed.at("graph-0.wanted.gradient.classifier.weight");
  gradient = -gradient;
  put(changed, "sample.safetensors");
  CHECK(beside(error_of_folder(folder), {"the gradient of classifier.weight differs by"}) == "");
  CHECK_NOTHROW(ga::ExportedModel(folder.write(), {.code = ga::InProgram{"bert"}, .check = false}));
  changed = sample;
  changed.at("graph-0.batch.input_ids") = torch::zeros({2, 2}, at::kLong);
  put(changed, "sample.safetensors");
  CHECK(beside(error_of_folder(folder), {"the sample must be a batch for graph-0"}) == "");
  changed = sample;
  changed.at("graph-0.wanted.loss") = torch::zeros({2, 2}, at::kLong);
  put(changed, "sample.safetensors");
  CHECK(beside(error_of_folder(folder), {"must be a summary"}) == "");
  put(sample, "sample.safetensors");

  auto text = std::get<std::string>(folder.manifest.values.at("model"));
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"classifier.weight", "classifier..weight"},
                                                        {"classifier.weight", ""},
                                                        {"classifier.bias", "classifier.weight"}}) {
    auto other = text;
    other.replace(other.find(from), from.size(), to);
    folder.manifest.values["model"] = other;
    CHECK(error_of_folder(folder) != "");
  }
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "a.";
  folder.manifest.values["model"] = deep + "a Double [1] parameter\n";
  CHECK(beside(error_of_folder(folder), {"at most 64 parts"}) == "");
  folder.manifest.values["model"] = text;
  folder.manifest.libtorch = "1.0.0";
  CHECK(beside(error_of([&] { ga::ExportedModel model(folder.write()); }), {"must be made with LibTorch", "1.0.0"}) ==
        "");
}

TEST_CASE("ExportedModel: a manifest with changed bytes is refused or harmless") {
  const Folder folder;
  const auto whole = inner::text_of(folder.manifest);
  std::mt19937 random(5);
  int refused = 0;
  for (int i = 0; i < 60; ++i) {
    auto manifest = folder.manifest;
    for (auto& [name, value] : manifest.values) {
      if (random() % 8) continue;
      if (auto* const text = std::get_if<std::string>(&value); text && !text->empty())
        (*text)[random() % text->size()] = static_cast<char>(32 + random() % 95);
      if (auto* const number = std::get_if<std::int64_t>(&value))
        *number += static_cast<std::int64_t>(random() % 5) - 2;
      if (auto* const number = std::get_if<double>(&value)) *number -= random() % 3;
    }
    const auto text = inner::text_of(manifest);
    testing::write_text(folder.path / "manifest.json", text);
    auto in_program = inner::steps_in_program().at("bert");
    in_program.manifest = text;
    inner::steps_in_program()["fuzzed"] = in_program;
    const auto error = error_of([&] { ga::ExportedModel(folder.path, {.code = ga::InProgram{"fuzzed"}}); });
    if (manifest.values == folder.manifest.values) CHECK(error == "");
    refused += !error.empty();
  }
  CHECK(refused > 20);
}
