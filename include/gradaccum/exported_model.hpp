// SPDX-License-Identifier: Apache-2.0
#pragma once
// module: compilation

#include <gradaccum/compiled_step.hpp>
#include <gradaccum/gradients.hpp>
#include <gradaccum/io/safetensors.hpp>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gradaccum {

namespace detail {
class StepGraphs;
}  // namespace detail

/// Options for an `ExportedModel`.
struct ExportedModelOptions {
  std::optional<InProgram> code = {};  ///< code built in by CMake's `gradaccum_compile_step`, instead of the folder's
  bool check = true;                   ///< run the folder's sample, and throw if results differ from Python's
};

/// A model and its training step, exported from Python: by the command gradaccum-export from Hugging Face, or
/// by `gradaccum.export` from any `torch.nn.Module`.
///
///  ga::ExportedModel model("model");
///  ga::optim::AdamW adamw(model->parameters(), 1e-4);
///  ga::GradAccumulator optimizer(adamw, {.steps = 4});
///  for (auto& batch : batches) {          // tensors by name: input_ids, attention_mask, labels
///    optimizer.backward(model->loss(batch));
///    optimizer.step();
///    optimizer.zero_grad();
///  }
///  model->save_weights("trained");        // for from_pretrained() and load_state_dict() of Python
///
/// A `torch::nn::Module` with Python's names of parameters and buffers. Compiled code computes loss, gradients and
/// outputs in the modes and dtypes of the export, and draws the same random numbers as Python.
///
/// Trust. The folder has code that runs with this program's rights: use only folders that you trust, or build the code
/// in. Throws `c10::Error` or `std::runtime_error` if a file has changed, is for another LibTorch or processor, or gives
/// another result than Python for the folder's sample.
///
/// Limits. Parameters may be frozen, but not unfrozen if they were frozen in the export. Dtypes and devices cannot
/// change. Checkpoints have no effect. Copies of the holder are the same model, which one thread at a time may use.
///
/// @note Runs on the CPU, or on the current CUDA device if exported from one. There it synchronizes to read a number of
/// items that the export counts, and the seed of a float16 loss.
class ExportedModelImpl : public torch::nn::Module {
 public:
  explicit ExportedModelImpl(const std::filesystem::path& folder, const ExportedModelOptions& options = {});

  /// Returns the loss of a batch, with the labels and, if it was exported, the module's output for metrics. It has
  /// gradients in training mode only. It is a mean over the batch's rows, or over the items that the export counts, such
  /// as labels of a `cross_entropy` other than its `ignore_index`.
  ///
  /// Throws `c10::Error` if the batch's names, dtypes or shapes were not exported. The message lists the exported ones.
  Loss loss(const io::Tensors& batch);

  /// Returns the output for a batch without labels, in evaluation mode and without gradients.
  at::Tensor forward(const io::Tensors& batch);

  /// Describes the exported passes: `training of input_ids Long [*, 256], labels Long [*]`, `*` for any number of rows.
  std::vector<std::string> passes() const;

  /// Writes the weights in Python's format, `model.safetensors`, and the export's files for `from_pretrained`, such as
  /// config.json. Each file is written atomically. The folder must not be an exported model.
  void save_weights(const std::filesystem::path& folder) const;
  /// Loads weights of the same names and shapes, from a folder or a safetensors file. If it throws, nothing has
  /// changed.
  void load_weights(const std::filesystem::path& path);

 private:
  void check_sample(const io::SafetensorsFile& sample, std::size_t number, const std::string& name) const;
  Loss run(const std::string& kind, const io::Tensors& batch) const;

  std::shared_ptr<const detail::StepGraphs> graphs_;
  io::Tensors saved_;                         // the weights, and buffers that Python saves, by name
  std::map<std::string, std::string> tied_;   // additional names of weights, with their first names
  std::map<std::string, std::string> files_;  // contents, by name, of files that are saved with the weights
};

/// A shared pointer to an `ExportedModelImpl`.
class ExportedModel : public torch::nn::ModuleHolder<ExportedModelImpl> {
 public:
  using ModuleHolder::ModuleHolder;
  explicit ExportedModel(const std::filesystem::path& folder, const ExportedModelOptions& options = {})
      : ModuleHolder(std::make_shared<ExportedModelImpl>(folder, options)) {}
};

}  // namespace gradaccum

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/compilation/exported_model.ipp>
#endif
