// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace adoption {

struct Options {
  std::string output;
  std::int64_t batch_size = 8;
  std::int64_t steps = 1;
};

inline Options parse(int argc, char** argv) {
  const std::string usage = "usage: program OUTPUT [BATCH_SIZE [STEPS [double]]]";
  const auto positive = [&usage](const std::string& text) {
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) {
      throw std::invalid_argument(usage);
    }
    const std::int64_t value = std::stoll(text);
    if (value < 1) {
      throw std::invalid_argument(usage);
    }
    return value;
  };

  if (argc < 2 || argc > 5 || std::string(argv[1]).empty()) {
    throw std::invalid_argument(usage);
  }
  Options options;
  options.output = argv[1];
  if (argc > 2) {
    options.batch_size = positive(argv[2]);
  }
  if (argc > 3) {
    options.steps = positive(argv[3]);
  }
  if (argc > 4) {
    if (std::string(argv[4]) != "double") {
      throw std::invalid_argument(usage);
    }
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  }
  torch::manual_seed(0);
  torch::set_num_threads(1);
  return options;
}

inline void save(const Options& options, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> detached;
  detached.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    detached.push_back(parameter.detach());
  }
  torch::save(detached, options.output);
}

}  // namespace adoption
