// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/io/safetensors.hpp>
#include <gradaccum/io/weights.hpp>

#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "model/classifier.hpp"

namespace testing {

/// A folder that model_values.py wrote: a model of transformers, and Python's results for it.
struct PythonModel {
  std::filesystem::path folder;
  gradaccum::io::Tensors values;

  explicit PythonModel(const std::string& name)
      : folder(std::filesystem::path(__FILE__).parent_path() / "data" / name),
        values(gradaccum::io::load_file(folder / "values.safetensors")) {}

  /// Returns the model in evaluation mode, without dropout.
  bloom::BloomForSequenceClassification load() const {
    bloom::BloomForSequenceClassification model(bloom::BloomConfig::from_file(folder / "config.json"));
    gradaccum::io::load_weights(model, folder / "model.safetensors");
    model->eval();
    return model;
  }

  const at::Tensor& operator[](const std::string& name) const { return values.at(name); }
  at::Tensor ids(const std::string& padding) const { return values.at(padding + ".input_ids"); }
  at::Tensor mask(const std::string& padding) const {
    const auto found = values.find(padding + ".attention_mask");
    return found == values.end() ? at::Tensor() : found->second;
  }
  at::Tensor labels(const std::string& padding) const { return values.at("labels").narrow(0, 0, ids(padding).size(0)); }
  at::Tensor logits(bloom::BloomForSequenceClassification& model, const std::string& padding) const {
    return model->forward(ids(padding), mask(padding));
  }
  at::Tensor loss(bloom::BloomForSequenceClassification& model, const std::string& padding) const {
    return torch::cross_entropy_loss(logits(model, padding), labels(padding));
  }
};

inline const auto python_models = {"heads_4", "heads_3", "heads_6"};

/// Returns max |a - b|.
inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}

}  // namespace testing
