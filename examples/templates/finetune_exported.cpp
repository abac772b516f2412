// SPDX-License-Identifier: Apache-2.0
// A model that Python has exported (gradaccum-export), fine-tuned by a Trainer.
//
//     ./finetune_exported MODEL DATA [EPOCHS]     trains, and writes the weights to MODEL.trained, for from_pretrained.
//                                                 Saves in MODEL.states, and resumes from the newest state there
//
// MODEL is the exported folder. DATA is a safetensors file with the tensors that the model was exported for, a row for
// each sample, such as input_ids, attention_mask and labels. docs/exported_models.md shows how to make both.
#include <torch/torch.h>
#include <gradaccum/gradaccum.hpp>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

namespace ga = gradaccum;

/// Takes rows of all tensors.
ga::io::Tensors rows(const ga::io::Tensors& of, std::int64_t from, std::int64_t to) {
  ga::io::Tensors part;
  for (auto& [name, tensor] : of) part[name] = tensor.slice(0, from, to);
  return part;
}

int main(int argc, char** argv) try {
  const bool help = argc > 1 && argv[1] == std::string("--help");
  if (argc < 3 || help) {
    std::cout << "usage: finetune_exported MODEL DATA [EPOCHS]\n";
    return help ? 0 : 1;
  }
  const std::string folder = argv[1];
  const std::int64_t epochs = argc > 3 ? std::stoll(argv[3]) : 3;
  torch::manual_seed(1);  // of dropout
  ga::ExportedModel model(folder);
  const auto data = ga::io::load_file(argv[2]);
  TORCH_CHECK(!data.empty(), argv[2], ": must have tensors, got none");
  const auto all = data.begin()->second.size(0), border = all - std::max<std::int64_t>(all / 10, 1);
  ga::data::NamedTensorBatches batches(rows(data, 0, border), {.batch_size = 8, .shuffle = true, .seed = 1});
  ga::data::NamedTensorBatches unseen(rows(data, border, all), {.batch_size = 8});

  std::vector<at::Tensor> trained;
  for (auto& parameter : model->parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  ga::optim::AdamW adamw(trained, ga::optim::AdamWOptions(5e-4));
  const auto objective = [](ga::ExportedModel& net, const ga::io::Tensors& batch) { return net->loss(batch); };
  ga::Trainer trainer(model, adamw, objective, ga::Accumulate{.steps = 2},  // 2 x 8: an effective batch of 16
                      ga::ClipNorm{.max = 1.0}, ga::Schedule{ga::lr::Cosine{.peak = 5e-4, .warmup = 10}},
                      ga::Validate(unseen), ga::SaveState{.directory = folder + ".states", .every_updates = 100});
  std::cout << "before: " << trainer.evaluate(unseen) << '\n';
  std::cout << trainer.fit(batches, {.epochs = epochs, .resume = folder + ".states"});
  model->save_weights(folder + ".trained");
  std::cout << "The weights are in " << folder << ".trained\n";
} catch (const std::exception& error) {
  const auto* const torch = dynamic_cast<const c10::Error*>(&error);
  std::cerr << "finetune_exported: " << (torch ? torch->what_without_backtrace() : error.what())
            << "; --help shows the arguments\n";
  return 1;
}
