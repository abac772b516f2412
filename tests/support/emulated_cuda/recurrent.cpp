// SPDX-License-Identifier: Apache-2.0

// Recurrent layers. LibTorch chooses their kernels by the kind of device: fused cells for CUDA, which the CPU lacks,
// and whole oneDNN layers for the CPU, which are used here for a device, too, to get the same bits.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace emulated_cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

/// Returns the new hidden state, the new cell state, and an empty workspace, because autograd saves tensors.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias)).chunk(4, 1);
  const auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::zeros({0}, cell.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (of_hidden[0] + of_input[0]).sigmoid(), update = (of_hidden[1] + of_input[1]).sigmoid();
  const auto next = (of_input[2] + of_hidden[2] * reset).tanh();
  return {(hidden - next) * update + next, at::zeros({0}, hidden.options())};
}

struct Lstm {
  at::TensorList parameters;
  bool has_biases;
  std::int64_t layers;
  double dropout;
  bool train, bidirectional, batch_first;

  std::int64_t directions() const { return bidirectional ? 2 : 1; }
  std::size_t parameters_of_one() const { return has_biases ? 4 : 2; }
  bool has_projections() const {
    return parameters.size() != static_cast<std::size_t>(layers * directions()) * parameters_of_one();
  }
};

constexpr std::int64_t lstm_of_onednn = 2;  // oneDNN's number of this layer

/// Runs the `index`-th of all layers and directions.
std::tuple<Tensor, Tensor, Tensor> layer(const Lstm& lstm, std::int64_t index, const Tensor& input,
                                         const Tensor& hidden, const Tensor& cell) {
  const auto count = lstm.parameters_of_one();
  const auto weights = lstm.parameters.slice(static_cast<std::size_t>(index) * count, count);
  const auto bias = [&](std::size_t which) {
    return lstm.has_biases ? weights[which] : at::zeros(weights[which - 2].sizes(), weights[which - 2].options());
  };
  const bool reverse = index % lstm.directions() == 1;
  const auto [output, next_hidden, next_cell, workspace] = at::mkldnn_rnn_layer(
      input, weights[0], weights[1], bias(2), bias(3), hidden[index], cell[index], reverse, /*batch_sizes=*/{},
      lstm_of_onednn, hidden.size(2), lstm.layers, lstm.has_biases, lstm.bidirectional, lstm.batch_first, lstm.train);
  return {output, next_hidden, next_cell};
}

std::tuple<Tensor, Tensor, Tensor> layers(const Lstm& lstm, const Tensor& input, const Tensor& hidden,
                                          const Tensor& cell) {
  auto current = (lstm.batch_first ? input.transpose(0, 1) : input).contiguous();
  std::vector<Tensor> hiddens, cells;
  for (std::int64_t at = 0; at < lstm.layers; ++at) {
    std::vector<Tensor> outputs;
    for (std::int64_t direction = 0; direction < lstm.directions(); ++direction) {
      const auto [output, next_hidden, next_cell] =
          layer(lstm, at * lstm.directions() + direction, current, hidden, cell);
      outputs.push_back(output);
      hiddens.push_back(next_hidden);
      cells.push_back(next_cell);
    }
    current = outputs.size() == 1 ? outputs[0] : at::cat(outputs, -1);
    if (lstm.dropout != 0 && lstm.train && at + 1 < lstm.layers) current = at::dropout(current, lstm.dropout, true);
  }
  return {lstm.batch_first ? current.transpose(0, 1) : current, at::stack(hiddens), at::stack(cells)};
}

bool by_onednn(const Lstm& lstm, const Tensor& input) {
  return at::globalContext().userEnabledMkldnn() && input.scalar_type() == at::kFloat && input.numel() > 0 &&
         !lstm.has_projections() && !at::autocast::is_autocast_enabled(at::kCUDA);
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, at::TensorList states, at::TensorList parameters,
                                        bool has_biases, std::int64_t number, double dropout, bool train,
                                        bool bidirectional, bool batch_first) {
  const Lstm all{parameters, has_biases, number, dropout, train, bidirectional, batch_first};
  if (by_onednn(all, input)) return layers(all, input, states[0].contiguous(), states[1].contiguous());
  return at::native::lstm(input, states, parameters, has_biases, number, dropout, train, bidirectional, batch_first);
}

void register_all(torch::Library& library) {
  library.impl("lstm.input", &lstm);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { register_all(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { register_all(library); }

}  // namespace
}  // namespace emulated_cuda
