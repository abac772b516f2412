// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/autocast.hpp>
#include <gradaccum/detail/memory/memory_ledger.hpp>

#include "support/outcome.hpp"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

/// Chains of modules, and the results and memory of one training step.
namespace testing {

/// Records every allocation of a scope; tensors can be excluded afterwards.
class ByteRecord {
 public:
  ByteRecord() : log_(std::make_shared<Log>()), guard_(c10::DebugInfoKind::PROFILER_STATE, log_) {}

  /// Excludes the memory of this tensor, from allocation to release.
  void leave_out(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_sparse()) {
      leave_out(tensor._indices());
      return leave_out(tensor._values());
    }
    const auto born = log_->alive.find(tensor.storage().data());
    if (born != log_->alive.end()) log_->left_out.insert(born->second);
  }
  std::int64_t live() const { return sums().first; }
  std::int64_t peak() const { return sums().second; }

 private:
  /// Derives from MemoryLedger, because ledgers inside the scope report only to an outer ledger.
  struct Log : gradaccum::detail::MemoryLedger {
    Log() : MemoryLedger(nullptr) {}
    void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override {
      if (bytes > 0) {
        alive[block] = births++;
        changes.emplace_back(alive[block], bytes);
        sizes.push_back(bytes);
      } else if (const auto born = alive.find(block); born != alive.end()) {
        changes.emplace_back(born->second, -sizes[born->second]);
        alive.erase(born);
      }
    }

    std::size_t births = 0;
    std::vector<std::int64_t> sizes;
    std::vector<std::pair<std::size_t, std::int64_t>> changes;
    std::unordered_map<const void*, std::size_t> alive;
    std::unordered_set<std::size_t> left_out;
  };

  std::pair<std::int64_t, std::int64_t> sums() const {
    std::int64_t live = 0, peak = 0;
    for (auto& [born, bytes] : log_->changes)
      if (!log_->left_out.contains(born)) peak = std::max(peak, live += bytes);
    return {live, peak};
  }

  std::shared_ptr<Log> log_;
  c10::DebugInfoGuard guard_;
};

/// sum(output * weights), whose backward makes a gradient like the output and holds nothing else.
struct WeightedSum : torch::autograd::Function<WeightedSum> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output,
                            const at::Tensor& weights) {
    context->saved_data["weights"] = weights;
    return at::zeros({}, output.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    const auto weights = context->saved_data["weights"].toTensor();
    return {weights.is_non_overlapping_and_dense() ? weights.clone() : weights, {}};
  }
};

struct Chain {
  std::string name;
  torch::nn::Sequential net;
  at::Tensor input;
  bool autocast = false;
};

struct Step {
  Outcome outcome;
  /// Bytes, without input, output and gradients of parameters.
  std::int64_t peak = 0, held = 0, left = 0;
};

/// Makes training steps of a chain, plain or checkpointed, that all start from the same state.
class Rig {
 public:
  explicit Rig(const Chain& chain) : chain_(chain), parameters_(chain.net->parameters()) {
    for (auto& parameter : parameters_)
      if (parameter.requires_grad())
        parameter.register_hook([record = record_](const at::Tensor& gradient) {
          if (*record) (*record)->leave_out(gradient);
        });
    buffers_ = copies(chain.net->buffers());
    const at::NoGradGuard no_gradients;
    torch::manual_seed(11);
    output_like_ = forward(chain_.net);
    put_back_buffers();
  }
  ~Rig() {
    for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  }

  template <class Net>
  Step step(Net net) {  // a module holder
    put_back_buffers();
    torch::manual_seed(12);
    auto weights = torch::randn(output_like_.sizes()).to(output_like_.options());
    if (loss == Loss::sum) weights = torch::ones({}, weights.options()).expand(weights.sizes());
    const auto one = torch::ones({}, output_like_.options());
    auto leaves = parameters_;
    leaves.push_back(chain_.input);
    take_gradients(leaves);
    if (accumulate)
      for (auto& leaf : leaves)
        if (leaf.requires_grad()) leaf.mutable_grad() = torch::ones_like(leaf);
    torch::manual_seed(13);
    Step step;
    at::Tensor output;
    {
      ByteRecord record;
      *record_ = &record;
      output = forward(net);
      record.leave_out(output);
      if (output.requires_grad()) {
        const auto loss = WeightedSum::apply(output, weights);
        record.leave_out(loss);
        step.held = record.live();
        loss.backward(one);
      }
      if (!accumulate) record.leave_out(chain_.input.grad());
      *record_ = nullptr;
      step.peak = record.peak();
      step.left = record.live();
    }
    auto gradients = take_gradients(leaves);
    for (auto& gradient : gradients)
      if (gradient.defined()) gradient = gradient.to_dense();
    step.outcome = {{output.detach()}, gradients, copies(chain_.net->buffers()), random_state()};
    return step;
  }

  /// Adds to gradients that exist before the step.
  bool accumulate = false;
  /// The gradient of the output: dense, or one number expanded.
  enum class Loss { weighted, sum } loss = Loss::weighted;

 private:
  template <class Net>
  at::Tensor forward(Net& net) {
    std::optional<gradaccum::Autocast> autocast;
    if (chain_.autocast) autocast.emplace(at::kCPU, at::kBFloat16);
    return net->forward(chain_.input);
  }
  void put_back_buffers() {
    const at::NoGradGuard no_gradients;
    const auto buffers = chain_.net->buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(buffers_[i]);
  }

  Chain chain_;
  std::vector<at::Tensor> parameters_, buffers_;
  at::Tensor output_like_;
  std::shared_ptr<ByteRecord*> record_ = std::make_shared<ByteRecord*>(nullptr);
};

/// x + branch(x)
struct ResidualImpl : torch::nn::Module {
  explicit ResidualImpl(torch::nn::Sequential layers) : branch(register_module("branch", layers)) {}
  at::Tensor forward(const at::Tensor& x) { return x + branch->forward(x); }
  torch::nn::Sequential branch;
};
TORCH_MODULE(Residual);

/// Attention and a multilayer perceptron, both residual, of x [batch, tokens, width].
struct TransformerBlockImpl : torch::nn::Module {
  TransformerBlockImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        mixed(register_module("mixed", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), tokens = x.size(1), width = x.size(2);
    const auto parts = qkv(norm1(x)).view({batch, tokens, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto attention = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + mixed(attention.transpose(1, 2).reshape({batch, tokens, width}));
    return x + down(torch::gelu(up(norm2(x))));
  }
  std::int64_t heads;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, mixed, up, down;
};
TORCH_MODULE(TransformerBlock);

inline torch::nn::Functional function(std::function<at::Tensor(at::Tensor)> f) {
  return torch::nn::Functional(std::move(f));
}

/// Adds an activation or dropout by number.
inline void push_activation(torch::nn::Sequential& net, int number) {
  switch (number % 6) {
    case 0:
      net->push_back(torch::nn::GELU());
      break;
    case 1:
      net->push_back(torch::nn::ReLU());
      break;
    case 2:
      net->push_back(torch::nn::Dropout(0.25));
      break;
    case 3:
      net->push_back(torch::nn::SiLU());
      break;
    case 4:
      net->push_back(torch::nn::Tanh());
      break;
    default:
      net->push_back(torch::nn::LeakyReLU());
  }
}

inline torch::nn::Sequential layers_of(const std::vector<std::int64_t>& widths, bool activations = true) {
  torch::manual_seed(2);
  torch::nn::Sequential net;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    net->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
    if (activations && i + 2 < widths.size()) push_activation(net, static_cast<int>(i));
  }
  return net;
}

inline at::Tensor randoms(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(3);
  return torch::randn(shape, dtype);
}

inline torch::nn::Conv2d convolution(int in, int out) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
}

inline Chain homogeneous_chain() {
  return {"homogeneous", layers_of({16, 16, 16, 16, 16, 16, 16, 16, 16}), randoms({24, 16})};
}
inline Chain varied_chain() {
  return {"varied", layers_of({16, 48, 8, 64, 24, 4, 32, 56, 12, 40, 16}), randoms({32, 16})};
}
inline Chain convolution_chain() {
  torch::manual_seed(2);
  torch::nn::Sequential net;
  const int widths[] = {3, 8, 8, 16, 4};
  for (int i = 0; i < 4; ++i) {
    net->push_back(convolution(widths[i], widths[i + 1]));
    net->push_back(torch::nn::BatchNorm2d(widths[i + 1]));
    push_activation(net, i);
  }
  net->push_back(torch::nn::AdaptiveAvgPool2d(1));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(4, 5));
  return {"convolutions", net, randoms({4, 3, 8, 8})};
}
inline Chain transformer_chain(int blocks = 5) {
  torch::manual_seed(2);
  torch::nn::Sequential net;
  for (int i = 0; i < blocks; ++i) net->push_back(TransformerBlock(16, 2));
  return {"transformer", net, randoms({2, 8, 16})};
}
inline Chain embedding_chain() {
  torch::manual_seed(2);
  torch::nn::Sequential net(torch::nn::Embedding(20, 16));
  for (int i = 0; i < 4; ++i)
    net->push_back(Residual(torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                                                  torch::nn::Linear(16, 64), torch::nn::GELU(),
                                                  torch::nn::Linear(64, 16), torch::nn::Dropout(0.1))));
  net->push_back(torch::nn::Linear(16, 20));
  return {"embedding", net, torch::arange(24).remainder(20).reshape({3, 8})};
}
inline Chain view_chain() {
  torch::manual_seed(2);
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(24, 32), torch::nn::Tanh(),
                            torch::nn::Unflatten(torch::nn::UnflattenOptions(1, {4, 8})), torch::nn::Linear(8, 16),
                            torch::nn::GELU(), torch::nn::Flatten(), torch::nn::Linear(64, 24), torch::nn::ReLU(),
                            torch::nn::Linear(24, 8));
  return {"views", net, randoms({16, 4, 6})};
}
inline Chain frozen_chain() {
  Chain chain{"frozen beginning", layers_of({16, 64, 64, 48, 32, 64, 32, 64, 16}), randoms({32, 16})};
  for (std::size_t i = 0; i < 5; ++i)
    for (auto& parameter : chain.net->ptr(i)->parameters()) parameter.set_requires_grad(false);
  return chain;
}
inline Chain autocast_chain() {
  auto chain = varied_chain();
  chain.name = "autocast";
  chain.autocast = true;
  return chain;
}
/// A chain whose gradients between stages are transposed, expanded, or both.
inline Chain strided_chain() {
  torch::manual_seed(2);
  const auto transposed = function([](at::Tensor x) { return x.transpose(0, 1); });
  torch::nn::Sequential net(torch::nn::Linear(24, 24), torch::nn::Tanh(), transposed, torch::nn::Linear(24, 24),
                            torch::nn::GELU(), transposed, torch::nn::ReLU(), torch::nn::Linear(24, 4),
                            function([](at::Tensor x) {
                              return x.unsqueeze(1).expand({-1, 8, -1});
                            }),
                            torch::nn::Linear(4, 16), torch::nn::Sigmoid(),
                            function([](at::Tensor x) { return x.mean(1); }), torch::nn::Linear(16, 8));
  return {"strided gradients", net, randoms({24, 24})};
}

/// A chain of frozen stages, one of which keeps its input's memory alive.
inline Chain frozen_view_chain() {
  torch::manual_seed(2);
  torch::nn::Sequential net(torch::nn::Linear(256, 16), torch::nn::Unflatten(torch::nn::UnflattenOptions(1, {2, 8})),
                            torch::nn::Linear(8, 24), torch::nn::Flatten(), torch::nn::Linear(48, 40),
                            torch::nn::Tanh(), torch::nn::Linear(40, 40), torch::nn::ReLU(), torch::nn::Linear(40, 8));
  for (std::size_t i = 0; i < 3; ++i)
    for (auto& parameter : net->ptr(i)->parameters()) parameter.set_requires_grad(false);
  return {"frozen views", net, randoms({32, 256})};
}
/// A chain of activations that overwrite their input.
inline Chain in_place_chain() {
  torch::manual_seed(2);
  torch::nn::Sequential net;
  for (int i = 0; i < 5; ++i) {
    net->push_back(torch::nn::Linear(i == 0 ? 16 : 32, 32));
    if (i % 2 == 0)
      net->push_back(torch::nn::ReLU(torch::nn::ReLUOptions().inplace(true)));
    else
      net->push_back(torch::nn::Dropout(torch::nn::DropoutOptions(0.2).inplace(true)));
  }
  net->push_back(torch::nn::Linear(32, 8));
  return {"in place", net, randoms({24, 16})};
}
/// A chain with repeated modules; without parameters, because parts of a sum of gradients would be counted.
inline Chain shared_chain() {
  torch::manual_seed(2);
  const torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(24).affine(false));
  const torch::nn::Dropout dropout(0.3);
  const torch::nn::GELU gelu;
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(i == 0 ? 16 : 24, 24));
    net->push_back(norm);
    net->push_back(gelu);
    net->push_back(dropout);
  }
  net->push_back(torch::nn::Linear(24, 8));
  return {"shared modules", net, randoms({24, 16})};
}
/// A chain of blocks that hold much less if results of cheap operations are recomputed.
inline Chain rebuilt_chain() {
  torch::manual_seed(2);
  torch::nn::Sequential net;
  for (int i = 0; i < 5; ++i)
    net->push_back(
        Residual(torch::nn::Sequential(torch::nn::Linear(8, 64), torch::nn::GELU(), torch::nn::Linear(64, 64),
                                       torch::nn::SiLU(), torch::nn::Linear(64, 8))));
  return {"rebuilt", net, randoms({16, 8})};
}

}  // namespace testing
