// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/process_group.hpp>
#include <memory>

#include "dataset.hpp"
#include "model.hpp"
#include "optimizer.hpp"
#include "options.hpp"

namespace fashion_mnist {

/// Model, optimizer and data of a run. The same options give the same setup, bit for bit.
struct Setup {
  Setup(const Options& options, const Dataset& dataset, const ga::ProcessGroup& processes = {})
      : group(processes),
        model(seeded_model(options)),
        optimizer(make_optimizer(options.optimizer, model->parameters(), options.learning_rate)),
        batches(dataset.train.images, dataset.train.labels,
                {.batch_size = options.batch_size,
                 .shuffle = true,
                 .seed = options.seed,
                 .rank = group.rank(),
                 .world_size = group.world_size()}),
        // Evaluates in batches of the training's size, because that size fits into memory.
        test_batches(dataset.test.images, dataset.test.labels, {.batch_size = options.batch_size}),
        test_share(dataset.test.images, dataset.test.labels,
                   {.batch_size = options.batch_size, .rank = group.rank(), .world_size = group.world_size()}) {}

  ga::ProcessGroup group;
  Network model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  ga::data::TensorBatches batches, test_batches;
  ga::data::TensorBatches test_share;  // this rank's

 private:
  static Network seeded_model(const Options& options) {
    torch::manual_seed(options.seed);
    Network model(options.depth, options.checkpoint);
    model->to(options.device, options.scalar_type());
    return model;
  }
};

}  // namespace fashion_mnist
