// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  std::optional<InProgram> code = {};  ///< code that CMake's `gradaccum_compile_step` built in, in the folder's place
  bool check = true;                   ///< runs the folder's sample, whose results must be Python's
};

/// A model that Python defined, with its training step: tools/export_model.py exports those of Hugging Face,
/// gradaccum_export.py any `torch.nn.Module`.
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
/// It is a `torch::nn::Module` with Python's names of parameters and buffers, for optimizers, `ga::Trainer` and states.
/// Its loss, gradients and outputs are computed by compiled code, with Python's modes, dtypes and number of threads of
/// LibTorch. Random numbers are drawn from LibTorch's generator, and are those that Python's would draw.
///
/// The folder holds code that runs with this program's rights: use only folders that you trust, or build the code in.
/// Its files must be unchanged, for this version of LibTorch and this processor, and the sample in it must give
/// Python's loss, outputs and gradients up to rounding; else a `c10::Error` or `std::runtime_error` says what differs.
///
/// Parameters may be frozen, and not unfrozen if they were frozen in the export. Neither dtypes nor devices may change.
/// Checkpoints have no effect inside the code. Copies of the holder are the same model; one thread may use it at once.
///
/// @note On the CPU, or where it was exported: from a CUDA device, to the current one. There a number of items that the
/// export counts is waited for, and the seed of a float16 loss.
class ExportedModelImpl : public torch::nn::Module {
 public:
  explicit ExportedModelImpl(const std::filesystem::path& folder, const ExportedModelOptions& options = {});

  /// Returns the loss of a batch, with the module's output and the labels for metrics. In training mode its backward
  /// adds gradients to the parameters'; in evaluation mode it has none. It is a mean over the batch's rows, or over
  /// what the export counts, such as the labels of a `cross_entropy` that are not its `ignore_index`.
  ///
  /// Throws `c10::Error` for a batch of other names, dtypes or shapes than were exported: the message lists those.
  Loss loss(const io::Tensors& batch);

  /// Returns the output for a batch without labels, as in evaluation. It has no gradient.
  at::Tensor forward(const io::Tensors& batch);

  /// Describes the exported passes: `training of input_ids Long [*, 256], labels Long [*]`, `*` for any number of rows.
  std::vector<std::string> passes() const;

  /// Writes the weights as Python's: `model.safetensors`, and beside it the files that the export has for
  /// `from_pretrained`, such as config.json. Each file is there as a whole or not at all. The folder must not be an
  /// exported model.
  void save_weights(const std::filesystem::path& folder) const;
  /// Loads weights of the same names and shapes, from a folder or a safetensors file. Throws before anything has
  /// changed.
  void load_weights(const std::filesystem::path& path);

 private:
  void check_sample(const io::SafetensorsFile& file, std::size_t number, const std::string& name) const;
  Loss run(const std::string& kind, const io::Tensors& batch) const;

  std::shared_ptr<const detail::StepGraphs> graphs_;
  io::Tensors saved_;                         // by name: the weights, and buffers that Python saves
  std::map<std::string, std::string> tied_;   // further names of weights, with the first
  std::map<std::string, std::string> files_;  // contents, by name, of what is saved with the weights
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
