// SPDX-License-Identifier: Apache-2.0
#pragma once

// Written by flop_counter.py with PyTorch 2.15.0. Do not edit.

#include <cstdint>
#include <map>
#include <string>

namespace pytorch_values {

struct Flops {
  std::int64_t with_input = 0, without = 0;  // with and without the input's gradient
};

const std::map<std::string, Flops> flops = {
    {"linear", {80640, 53760}},
    {"matmul", {5040, 3360}},
    {"bmm", {5040, 3360}},
    {"baddbmm", {5040, 3360}},
    {"matrix_vector", {0, 0}},
    {"conv1d", {38880, 25920}},
    {"conv2d_dilated", {207360, 138240}},
    {"conv2d_groups", {311040, 233280}},
    {"conv_transpose2d", {622080, 414720}},
    {"conv3d", {388800, 259200}},
    {"attention", {229376, 229376}},
    {"attention_of_parts", {196608, 163840}},
};

}  // namespace pytorch_values
