// SPDX-License-Identifier: Apache-2.0
// Loads an exported model (tensors, code, and a sample that verifies both), and saves its weights.
#pragma once

#include <gradaccum/exported_model.hpp>

#include <gradaccum/impl/compilation/step_graphs.ipp>
#include <gradaccum/io/weights.hpp>

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

inline constexpr const char* sample_name = "sample.safetensors";
inline constexpr std::uint64_t sample_seed = 20'261'127;  // as in gradaccum.export

/// Returns a text of an untrusted manifest.
GRADACCUM_INLINE const std::string& text_of_source(const StepSource& source, const std::string& name) {
  const auto found = source.manifest.values.find(name);
  const auto* const text = found == source.manifest.values.end() ? nullptr : std::get_if<std::string>(&found->second);
  if (!text) throw std::runtime_error(source.name + ": must have a text " + in_quotes(name));
  return *text;
}

/// Summarises a tensor as in a sample: up to 64 elements, evenly spaced, and the norm.
GRADACCUM_INLINE at::Tensor summary_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const auto flat = tensor.detach().reshape(-1).to(at::kDouble);
  const auto count = std::min<std::int64_t>(64, flat.numel());
  const auto at = at::arange(count, flat.options().dtype(at::kLong))
                      .mul_(flat.numel() - 1)
                      .floor_divide_(std::max<std::int64_t>(count - 1, 1));
  return at::cat({flat.index_select(0, at), flat.norm().reshape(1)}).cpu();
}

GRADACCUM_INLINE std::string pass_text(const std::string& kind, const std::string& names, const std::string& layouts) {
  auto text = kind + " of";
  std::size_t at = 0;
  for (auto& name : words_of(names)) {
    const auto end = std::min(layouts.find(", ", std::min(layouts.find(']', at), layouts.size())), layouts.size());
    text += (at ? ", " : " ") + name + " " + layouts.substr(at, end - at);
    at = std::min(end + 2, layouts.size());
  }
  return text;
}

/// Returns the module at a dotted path, and creates missing modules of that path.
GRADACCUM_INLINE torch::nn::Module& module_at(torch::nn::Module& root, std::string_view path, const std::string& what) {
  constexpr int deepest = 64;
  auto* module = &root;
  for (int depth = 1; !path.empty(); ++depth) {
    const std::string name(path.substr(0, path.find('.')));
    path.remove_prefix(std::min(path.size(), name.size() + 1));
    if (name.empty() || depth > deepest)
      throw std::runtime_error(what + ": names must be of at most 64 parts, none of them empty");
    auto children = module->named_children();
    auto* const there = children.find(name);
    module = there ? there->get() : module->register_module(name, std::make_shared<torch::nn::Module>()).get();
  }
  return *module;
}

/// Returns the summaries of results that Python computed for a graph's sample: `which` is `graph-0.wanted` in the
/// dtypes of its run, or `graph-0.exact` in float32.
GRADACCUM_INLINE TrialResult results_of_python(const io::SafetensorsFile& sample, const std::string& which,
                                               const StepModel& model) {
  const auto find = [&](const std::string& name) {
    const auto full = which + "." + name;
    auto found = sample.contains(full) ? sample.get_tensor(full) : at::Tensor();
    TORCH_CHECK(!found.defined() || (found.dim() == 1 && found.scalar_type() == at::kDouble && found.numel() > 0),
                sample.path().string(), ": ", full, " must be a summary of a tensor");
    return found;
  };
  Loss loss(find("loss"), 1.0);
  loss.mean = loss.mean.defined() ? loss.mean[0] : at::zeros({}, at::kDouble);
  loss.output = find("output");
  if (const auto items = find("items"); items.defined()) loss.items = items[0].item<double>();
  TrialResult results{loss, {}, {}, GeneratorStates()};
  for (auto& name : model.parameter_names) results.gradients.push_back(find("gradient." + name));
  for (auto& name : model.buffer_names) results.buffers.push_back(find("buffer." + name));
  return results;
}

/// Registers a model's tensors, which `text` lists one per line, under their names. Returns them in that order.
GRADACCUM_INLINE StepModel
registered_tensors(torch::nn::Module& root, const std::string& text, const std::string& what,
                   c10::function_ref<at::Tensor(const std::string& name, at::DeviceType device)> find) {
  StepModel model;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto path = line.substr(0, line.find(' '));
    const auto dot = path.rfind('.');
    const auto name = dot == std::string::npos ? path : path.substr(dot + 1);
    auto& module = module_at(root, std::string_view(path).substr(0, dot == std::string::npos ? 0 : dot), what);
    const auto tensor = find(path, line.find("] on cuda") == std::string::npos ? at::kCPU : at::kCUDA);
    if (line.ends_with(" buffer"))
      model.add_buffer(path, module.register_buffer(name, tensor));
    else
      model.add_parameter(path, module.register_parameter(name, tensor, !line.ends_with(" frozen parameter")));
  }
  return model;
}

/// Returns the results of a pass as summaries, as in a sample.
GRADACCUM_INLINE TrialResult summarised(TrialResult results, const GraphDescription& graph) {
  auto& loss = results.loss;
  loss.mean = loss.mean.cpu();
  if (graph.kind == "inference") loss.output = std::exchange(loss.mean, at::zeros({}, at::kDouble));
  if (graph.items != GraphDescription::computed_items) loss.items = 1;
  loss.target.reset();
  if (loss.output.defined()) loss.output = summary_of(loss.output);
  for (auto* const tensors : {&results.gradients, &results.buffers})
    for (auto& tensor : *tensors)
      if (tensor.defined()) tensor = summary_of(tensor);
  return results;
}

}  // namespace gradaccum::detail

namespace gradaccum {

GRADACCUM_INLINE ExportedModelImpl::ExportedModelImpl(const std::filesystem::path& folder,
                                                      const ExportedModelOptions& options)
    : torch::nn::Module("ExportedModel") {
  const detail::StepSource source(folder, detail::exported_format);
  const auto& manifest = source.manifest;
  for (auto& name : detail::words_of(detail::text_of_source(source, "with_weights")))
    files_[name] = detail::MappedFile(detail::listed_file(folder, manifest, name)).text();
  const io::SafetensorsFile weights(detail::listed_file(folder, manifest, detail::weights_name)),
      sample(detail::listed_file(folder, manifest, detail::sample_name));
  auto model = detail::registered_tensors(
      *this, detail::text_of_source(source, "model"), source.name, [&](const std::string& name, at::DeviceType device) {
        const bool is_saved = weights.contains(name);
        const auto mapped = is_saved ? weights.get_tensor(name) : sample.get_tensor("buffer." + name);
        auto tensor = mapped.to(device, /*non_blocking=*/false, /*copy=*/true);
        if (is_saved) saved_[name] = tensor;
        return tensor;
      });
  const auto tied = detail::words_of(detail::text_of_source(source, "tied"));
  for (std::size_t i = 0; i + 1 < tied.size(); i += 2) {
    if (saved_.contains(tied[i]) || !saved_.contains(tied[i + 1]))
      throw std::runtime_error(source.name + ": " + tied[i] + " must be another name of a weight");
    tied_[tied[i]] = tied[i + 1];
  }
  std::optional<detail::StepSource> code;
  if (options.code) {
    const auto& name = options.code->name;
    code.emplace(name, detail::step_in_program(name, "ExportedModel"), detail::exported_format);
    TORCH_CHECK(code->manifest.values == manifest.values, "ExportedModel: ", source.name,
                ": must be the export that was built into this program as ", name, "; rebuild the program");
  }
  graphs_ = std::make_shared<detail::StepGraphs>("ExportedModel", std::move(model), code ? *code : source);
  if (!options.check) return;
  for (std::size_t i = 0; i < graphs_->graphs().size(); ++i) {
    check_sample(sample, i, detail::name_of_graph(i));
    const auto& graph = graphs_->graphs()[i].description;
    if (!graph.any_rows.empty() && graph.least_rows == 1) check_sample(sample, i, detail::name_of_graph(i) + "-1");
  }
}

GRADACCUM_INLINE void ExportedModelImpl::check_sample(const io::SafetensorsFile& sample, std::size_t number,
                                                      const std::string& name) const {
  const auto& graph = graphs_->graphs()[number];
  const auto& model = graphs_->model();
  std::vector<at::Tensor> batch;
  const auto device = *model.device();
  for (auto& tensor : detail::words_of(graph.description.names))
    batch.push_back(sample.get_tensor(name + ".batch." + tensor).to(device, /*non_blocking=*/false, /*copy=*/true));
  TORCH_CHECK(graphs_->find(batch, [&](auto& found) { return &found == &graph.description; }), graphs_->name(),
              ": the sample must be a batch for ", name, ", got ", detail::layout_text(batch));

  const detail::RandomScope as_before{detail::GeneratorStates()};
  for (const auto where : {at::Device(at::kCPU), device}) {
    auto generator = at::globalContext().defaultGenerator(where);
    generator.set_current_seed(detail::sample_seed);
  }
  const detail::StepTrial trial(model);
  const auto got = detail::summarised(graphs_->tried(trial, graph, batch), graph.description);
  auto wanted = detail::results_of_python(sample, name + ".wanted", model);
  wanted.random = got.random;
  wanted.tolerance = graphs_->description().autocast() == "no" ? detail::tolerance_of(model, got.loss.mean) : 0.1;
  std::optional<detail::TrialResult> exact;
  if (sample.contains(name + ".exact.loss") || sample.contains(name + ".exact.output"))
    exact = detail::results_of_python(sample, name + ".exact", model);
  const auto differences = detail::differences_of_steps(model, wanted, got, exact ? &*exact : nullptr);
  TORCH_CHECK(differences.empty(), graphs_->name(), ": the ", graph.description.kind, " of ",
              detail::layout_text(batch), " must give what Python computed, but ", differences.front().text(),
              ": export the model again on this kind of machine, or pass {.check = false} to accept it as it is");
}

GRADACCUM_INLINE Loss ExportedModelImpl::loss(const io::Tensors& batch) {
  return run(is_training() ? "training" : "evaluation", batch);
}

GRADACCUM_INLINE at::Tensor ExportedModelImpl::forward(const io::Tensors& batch) {
  return run("inference", batch).mean;
}

GRADACCUM_INLINE Loss ExportedModelImpl::run(const std::string& kind, const io::Tensors& batch) const {
  std::string names;
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : batch) {
    names += (names.empty() ? "" : " ") + name;
    tensors.push_back(tensor);
  }
  const auto* const graph = graphs_->find(
      tensors, [&](const detail::GraphDescription& one) { return one.kind == kind && one.names == names; });
  if (!graph) {
    std::string exported;
    for (auto& pass : passes()) exported += "\n  " + pass;
    TORCH_CHECK(false, graphs_->name(), ": there is no code for ",
                detail::pass_text(kind, names, detail::layout_text(tensors)), "; export it, too. There is:", exported);
  }
  const auto& model = graphs_->model();
  const auto& saved = graphs_->description();
  TORCH_CHECK(model.unchanged(/*may_be_frozen=*/true), graphs_->name(),
              ": parameters and buffers must be as they were exported; the model had ",
              detail::first_difference(saved.model, model.text()), ": export the model in that form");
  const auto modes = model.modes();
  TORCH_CHECK(!modes.autocast || saved.autocast() == c10::toString(*modes.autocast), graphs_->name(),
              ": autocast is compiled in and must be as in the export, ", saved.modes, ", got ",
              c10::toString(*modes.autocast), ": export the model with --precision, or remove ga::Autocast here");
  return kind == "training" ? graphs_->trained(*graph, std::move(tensors))
                            : graphs_->evaluated(*graph, std::move(tensors));
}

GRADACCUM_INLINE std::vector<std::string> ExportedModelImpl::passes() const {
  std::vector<std::string> texts;
  for (auto& [graph, code, parameters, moved] : graphs_->graphs())
    texts.push_back(detail::pass_text(graph.kind, graph.names, graph.any_rows.empty() ? graph.batch : graph.any_rows));
  return texts;
}

GRADACCUM_INLINE void ExportedModelImpl::save_weights(const std::filesystem::path& folder) const {
  detail::make_directory(folder);
  TORCH_CHECK(!std::filesystem::exists(folder / detail::manifest_name),
              "ExportedModel: save_weights must get a folder ",
              "that is neither an exported model nor a state, whose files it would overwrite; got ", folder.string());
  for (auto& [name, content] : files_)
    detail::replace_file(folder / name,
                         [&text = content](detail::OutputFile& file) { file.write(text.data(), text.size()); });
  auto tensors = saved_;
  for (auto& [name, first] : tied_) tensors[name] = saved_.at(first);
  io::save_file(tensors, folder / detail::weights_name, {{"format", "pt"}});
}

GRADACCUM_INLINE void ExportedModelImpl::load_weights(const std::filesystem::path& path) {
  const io::WeightFiles files(path);
  std::map<std::string, std::string> found;  // name in the files, by name of the weight
  for (auto& name : files.keys()) {
    const auto tied = tied_.find(name);
    const auto& weight = tied == tied_.end() ? name : tied->second;
    TORCH_CHECK(saved_.contains(weight), "ExportedModel: ", path.string(),
                ": must have only weights of this model, got ", name);
    found[weight] = name;
  }
  for (auto& [name, tensor] : saved_) {
    TORCH_CHECK(found.contains(name), "ExportedModel: ", path.string(), ": must have the weight ", name);
    const auto other = files.get_tensor(found[name]);
    TORCH_CHECK(other.sizes() == tensor.sizes() && other.is_floating_point() == tensor.is_floating_point() &&
                    other.is_complex() == tensor.is_complex(),
                "ExportedModel: ", path.string(), ": ", name, " must be ", detail::layout_text(tensor), ", got ",
                detail::layout_text(other));
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : saved_) {
    tensor.copy_(files.get_tensor(found[name]));
    files.release(found[name]);
  }
}

}  // namespace gradaccum

#undef GRADACCUM_INLINE
