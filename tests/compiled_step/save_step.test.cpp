// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/autocast.hpp>
#include <gradaccum/compiled_step.hpp>
#include <gradaccum/data/length_buckets.hpp>
#include <gradaccum/data/tensor_batches.hpp>
#include <gradaccum/detail/checkpoint/forward_state.hpp>
#include <gradaccum/detail/compilation/step_description.hpp>
#include <gradaccum/detail/io/formats.hpp>

#include <map>
#include <sstream>
#include <tuple>
#include <vector>

#include "compiled_step/networks.hpp"
#include "support/files.hpp"
#include "support/outcome.hpp"

namespace ga = gradaccum;
using testing::error_of;
using namespace testing::compiled;

namespace {

/// Rounds in forward, and passes the gradient through in backward.
struct StraightThrough : torch::autograd::Function<StraightThrough> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.round(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list seeds) {
    return seeds;
  }
};

struct OwnBatch {
  at::Tensor x, y;
};
std::vector<at::Tensor> batch_tensors(const OwnBatch& batch) { return {batch.x, batch.y}; }

ga::detail::StepDescription described(const std::filesystem::path& folder) {
  return ga::detail::step_description(ga::detail::read_manifest(folder, ga::detail::step_format), "step");
}

}  // namespace

TEST_CASE("A saved step describes its inputs and outputs", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  const auto saved = ga::save_step(net, counted_loss, rows_of_six(8), directory / "step");
  CHECK(saved.only_these_rows.empty());
  const auto step = described(directory / "step");
  CHECK(step.model ==
        "hidden.weight Float [5, 6] parameter\nhidden.bias Float [5] parameter\n"
        "last.weight Float [3, 5] parameter\nlast.bias Float [3] parameter\n");
  CHECK(step.modes == "training; no autocast");
  REQUIRE(step.graphs.size() == 1);
  const auto& graph = step.graphs.front();
  CHECK(graph.batch == "Float [8, 6], Long [8]");
  CHECK(graph.any_rows == "Float [*, 6], Long [*]");
  CHECK(graph.items == ga::detail::GraphDescription::items_are_rows);
  CHECK(graph.output);
  CHECK(graph.target == 1);
  CHECK(graph.code.empty());
  std::ostringstream text;
  text << saved;
  CHECK(text.str().find("recorded a step of Float [*, 6], Long [*]\nCompile it: ") != std::string::npos);
}

TEST_CASE("Recording changes neither parameters nor buffers", "[save_step]") {
  const testing::Directory directory;
  auto net = convolutional();
  const auto batch = images(6);
  plain_loss(net, batch).backward();
  const auto values = [&] {
    std::vector<at::Tensor> all;
    for (auto& parameter : net->parameters()) {
      all.push_back(parameter.detach().clone());
      all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    for (auto& buffer : net->buffers()) all.push_back(buffer.clone());
    return all;
  };
  const auto before = values();
  const ga::detail::GeneratorStates random;
  const auto saved = ga::save_step(net, plain_loss<Convolutional>, batch, directory / "step");
  CHECK(testing::same_bits(values(), before));
  CHECK(random == ga::detail::GeneratorStates());
  CHECK(described(directory / "step").model.find("convolution.bias Double [3] frozen parameter\n") !=
        std::string::npos);

  plain_loss(net, batch);  // changes buffers, so the comparison can fail
  CHECK_FALSE(testing::same_bits(values(), before));
  CHECK_FALSE(random == ga::detail::GeneratorStates());
}

TEST_CASE("Objectives that cannot be recorded are refused", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  const auto batch = rows_of_six(8);
  const auto refused = [&](auto objective, const ga::SaveStepOptions& options = {}) {
    return error_of([&] { ga::save_step(net, objective, batch, directory / "step", options); });
  };
  const auto starts = [](const std::string& text, const std::string& with) {
    INFO(text);
    return text.starts_with(with);
  };
  const std::string other = "save_step: the recorded step must do what the objective does, but the gradient of hidden.";
  CHECK(starts(refused([](auto& model, auto& of) {
                 const auto hidden = StraightThrough::apply(model->hidden(of.first));
                 return torch::cross_entropy_loss(model->last(hidden), of.second);
               }),
               other));
  CHECK(starts(refused([](auto& model, auto& of) {
                 at::Tensor hidden;
                 {
                   const torch::NoGradGuard no_grad;
                   hidden = model->hidden(of.first);
                 }
                 return torch::cross_entropy_loss(model->last(hidden), of.second);
               }),
               other));
  CHECK(refused([](auto& model, auto& of) {
          const auto loss = plain_loss(model, of);
          return loss.template item<double>() > 0 ? loss : loss * 2;
        }).find("must not read a value on the host (item(), or a comparison), got aten::item") != std::string::npos);
  CHECK(refused([](auto& model, auto& of) {
          const auto output = model->forward(of.first);
          return torch::allclose(output, 2 * output) ? output.sum() : -output.sum();
        }).find("got aten::allclose") != std::string::npos);
  CHECK(refused([](auto& model, auto& of) {
          const auto output = model->forward(of.first);
          return torch::equal(output, 2 * output) ? output.sum() : -output.sum();
        }).find("got aten::equal") != std::string::npos);
  const auto weights = torch::tensor({1.f, 2.f, 3.f});
  const auto weighted = [&](auto& model, auto& of) {
    return torch::cross_entropy_loss(model->forward(of.first), of.second, weights);
  };
  CHECK(starts(refused(weighted),
               "save_step: the objective uses a tensor that belongs neither to the model nor to the batch, Float [3]"));
  CHECK(refused(weighted, {.constants = true}).empty());
  const auto factor = torch::tensor(2.f);  // also with one element
  CHECK(starts(refused([&](auto& model, auto& of) { return factor * plain_loss(model, of); }),
               "save_step: the objective uses a tensor that belongs neither to the model nor to the batch, Float []"));
  CHECK(refused([&](auto& model, auto& of) { return torch::tensor(2.f) * plain_loss(model, of); }).empty());
  const auto penalty = refused([](auto& model, auto& of) {
    const auto input = of.first.clone().requires_grad_();
    const auto output = model->forward(input).sum();
    return torch::autograd::grad({output}, {input}, {}, {}, /*create_graph=*/true)[0].square().mean();
  });
  CHECK(starts(penalty, "save_step: the objective must not use a tensor that requires grad and is not a parameter"));
  CHECK(starts(refused([](auto&, auto& of) { return of.first.mean(); }),
               "Loss: the mean must require grad for backward, but does not"));
  CHECK(starts(refused([](auto& model, auto& of) { return model->forward(of.first); }),
               "Loss: the mean must have one element, got shape [8, 3]"));
  CHECK_THROWS_AS(
      ga::save_step(
          net, [](auto&, auto&) -> at::Tensor { throw std::logic_error("of the user"); }, batch, directory / "step"),
      std::logic_error);
}

TEST_CASE("An objective that gives two results for a batch is refused with that reason", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  double factor = 1;
  const auto error = error_of([&] {
    ga::save_step(
        net, [&](auto& model, auto& of) { return (factor *= 1.1) * plain_loss(model, of); }, rows_of_six(8),
        directory / "step");
  });
  INFO(error);
  CHECK(error.find(" from one run of the objective to the next: pass what changes ") != std::string::npos);
  CHECK(error.find("autograd::Function") == std::string::npos);

  int runs = 0;
  const auto slowly = [&](auto& model, auto& of) { return (1 + 1e-6 * ++runs) * plain_loss(model, of); };
  CHECK(error_of([&] {
          ga::save_step(net, slowly, rows_of_six(8), directory / "step");
        }).find("a number of C++ changes from one run to the next: pass what changes ") != std::string::npos);
}

TEST_CASE("A parameter can be the loss", "[save_step]") {
  const testing::Directory directory;
  torch::nn::ParameterList net;
  net->append(torch::ones({}, torch::requires_grad()));
  const auto error = error_of([&] {
    ga::save_step(
        net, [](auto& model, auto&) { return model->parameters()[0]; }, torch::ones({2}), directory / "step");
  });
  CHECK(error.empty());
}

TEST_CASE("Values that LibTorch reads on the host within an operation are recorded", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  const auto recorded = [&](auto of_output) {
    const auto objective = [&](auto& model, auto& of) { return of_output(model->forward(of.first), of.second); };
    const auto saved = ga::save_step(net, objective, rows_of_six(8), directory / "step");
    return saved.only_these_rows.empty();
  };
  const auto products = [](const at::Tensor& output) { return output.t().mm(output) + torch::eye(3); };
  CHECK(recorded([](const at::Tensor& output, const at::Tensor&) { return output.std() + output.var(); }));
  CHECK(recorded([](const at::Tensor& output, const at::Tensor& classes) {
    return (torch::one_hot(classes, 3).to(torch::kFloat) - output).square().mean();
  }));
  CHECK(recorded([&](const at::Tensor& output, const at::Tensor&) {
    return at::linalg_cholesky(products(output)).sum() + at::linalg_inv(products(output)).sum();
  }));
  CHECK(recorded([](const at::Tensor& output, const at::Tensor&) {
    const auto shares = output.softmax(1);
    return shares.gather(1, shares.multinomial(2)).sum();
  }));
}

TEST_CASE("LibTorch's attention may compare tensors if another result of the comparison would not change its output",
          "[save_step]") {
  const testing::Directory directory;
  torch::manual_seed(0);
  torch::nn::MultiheadAttention net(6, 2);
  const auto x = torch::randn({8, 4, 6});
  const auto refused = [&](auto attended) {
    return error_of([&] {
      ga::save_step(
          net, [&](auto& model, auto& of) { return std::get<0>(attended(model, of)).square().mean(); }, x,
          directory / "step");
    });
  };
  CHECK(refused([](auto& model, auto& of) { return model->forward(of, of, of); }).empty());
  CHECK(refused([](auto& model, auto& of) {
          return model->forward(of.transpose(0, 1), of.transpose(0, 1), of.transpose(0, 1));
        }).empty());
  CHECK(refused([](auto& model, auto& of) { return model->forward(2 * of, of, of); }).empty());
  CHECK(refused([](auto& model, auto& of) { return model->forward(of, of, 2 * of); }).empty());
  CHECK(refused([](auto& model, auto& of) { return model->forward(of, 2 * of, 3 * of); }).empty());
  // The tensors are equal in this batch; in another batch the difference need not be 0.
  const std::string equal = "got aten::equal";
  CHECK(refused([](auto& model, auto& of) { return model->forward(of + 0, of, of); }).find(equal) != std::string::npos);
  CHECK(refused([](auto& model, auto& of) { return model->forward(of, of, of + 0); }).find(equal) != std::string::npos);
  // The objective's comparison, in addition to the attention's.
  CHECK(refused([](auto& model, auto& of) {
          return torch::equal(of, 2 * of) ? model->forward(2 * of, of, of) : model->forward(of, of, of);
        }).find(equal) != std::string::npos);
  CHECK(refused([](auto& model, auto& of) {
          return torch::equal(2 * of, of) ? model->forward(2 * of, of, of) : model->forward(of, of, of);
        }).find(equal) != std::string::npos);
}

TEST_CASE("Blocks of known networks are recorded", "[save_step]") {
  const testing::Directory directory;
  torch::manual_seed(0);
  using namespace torch::nn;
  const auto convolution = [](std::int64_t in, std::int64_t out, std::int64_t size, std::int64_t groups) {
    return Conv2d(Conv2dOptions(in, out, size).padding(size / 2).groups(groups).bias(false));
  };
  Sequential mobile_net(convolution(4, 8, 1, 1), BatchNorm2d(8), ReLU6(), convolution(8, 8, 3, 8), BatchNorm2d(8),
                        ReLU6(), convolution(8, 4, 1, 1), BatchNorm2d(4));
  const auto residual = [](auto& model, auto& of) { return (of + model->forward(of)).square().mean(); };
  CHECK(ga::save_step(mobile_net, residual, torch::randn({6, 4, 5, 5}), directory / "step").only_these_rows.empty());
  Sequential tokens(LayerNorm(LayerNormOptions({8})), Linear(8, 16), GELU(), Linear(16, 8));
  const auto mixed = [](auto& model, auto& of) {
    return (of.transpose(1, 2) + model->forward(of.transpose(1, 2))).square().mean();
  };
  CHECK(ga::save_step(tokens, mixed, torch::randn({5, 8, 6}), directory / "step").only_these_rows.empty());
}

TEST_CASE("A graph is for any number of rows only if it contains no number of rows", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  const auto folder = directory / "step";
  const auto why = [&](auto objective, const Batch& batch) {
    const auto saved = ga::save_step(net, objective, batch, folder);
    CHECK(described(folder).graphs.front().any_rows.empty() == !saved.only_these_rows.empty());
    return saved.only_these_rows;
  };
  CHECK(why(counted_loss, rows_of_six(3)).empty());
  const auto by_rows = [](auto& model, auto& of) {
    return torch::cross_entropy_loss(model->forward(of.first), of.second, {}, at::Reduction::Sum) / of.first.size(0);
  };
  CHECK(why(by_rows, rows_of_six(8)).find("computes with the number of rows in C++") != std::string::npos);
  const auto twice_the_items = [](auto& model, auto& of) {
    return ga::Loss{plain_loss(model, of), 2 * of.second.size(0)};
  };
  CHECK(why(twice_the_items, rows_of_six(8)).find("computes with the number of rows in C++") != std::string::npos);
  CHECK(described(folder).graphs.front().items == 16);
  CHECK(why(counted_loss, rows_of_six(2)).find("fewer than 3") != std::string::npos);
  const auto eight = [](auto& model, auto& of) {
    TORCH_CHECK_VALUE(of.first.size(0) == 8, "there must be 8 rows");
    return plain_loss(model, of);
  };
  CHECK(why(eight, rows_of_six(8)) == "the objective throws for a row less: there must be 8 rows");
  torch::nn::EmbeddingBag bag(11, 4);
  const auto bags = ga::save_step(
      bag, [](auto& model, auto& of) { return model->forward(of.first, of.second).square().mean(); },
      Batch{torch::arange(4), torch::arange(4)}, folder);
  CHECK(bags.only_these_rows.starts_with("the objective throws for a row less: offsets[0] has to be 0"));
  // One layout's reason stays if a later layout has none.
  const auto saved = ga::save_steps(net, counted_loss, std::vector{rows_of_six(2), rows_of_six(8)}, folder);
  CHECK(saved.only_these_rows.find("fewer than 3") != std::string::npos);
}

TEST_CASE("Tensors of batches of any type are recorded", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  const auto pair = rows_of_six(8);
  const auto recorded = [&](const auto& batch, auto objective) {
    ga::save_step(net, objective, batch, directory / "step");
    return described(directory / "step").graphs.front();
  };
  const auto loss = [](auto& model, const at::Tensor& x, const at::Tensor& y) {
    return torch::cross_entropy_loss(model->forward(x), y);
  };
  const at::Tensor &x = pair.first, &y = pair.second;
  const std::string any = "Float [*, 6], Long [*]";
  CHECK(recorded(std::tuple(x, y), [&](auto& m, auto& b) {
          return loss(m, std::get<0>(b), std::get<1>(b));
        }).any_rows == any);
  CHECK(recorded(std::vector{x, y}, [&](auto& m, auto& b) { return loss(m, b[0], b[1]); }).any_rows == any);
  CHECK(recorded(std::map<std::string, at::Tensor>{{"a", x}, {"b", y}}, [&](auto& m, auto& b) {
          return loss(m, b.at("a"), b.at("b"));
        }).any_rows == any);
  CHECK(recorded(torch::data::Example<>(x, y), [&](auto& m, auto& b) { return loss(m, b.data, b.target); }).any_rows ==
        any);
  const auto own = recorded(OwnBatch{x, y}, [&](auto& m, auto& b) { return loss(m, b.x, b.y); });
  CHECK(own.batch == "Float [8, 6], Long [8]");
  CHECK(own.any_rows.empty());  // the library cannot make another batch of this type
  CHECK(recorded(ga::data::Batch{x, y}, [&](auto& m, const ga::data::Batch& b) {
          return loss(m, b.data, b.target);
        }).any_rows == any);
  CHECK(recorded(pair, counted_loss).any_rows == any);  // a plain function

  // Numbers in a batch are not detected.
  const auto as_many = [&](auto items) {
    return error_of([&] {
      ga::save_step(
          net,
          [&](auto& m, auto& b) {
            return ga::Loss{loss(m, b.x, b.y), items};
          },
          OwnBatch{x, y}, directory / "own");
    });
  };
  CHECK(as_many(8).empty());
  CHECK(as_many(1).empty());
  CHECK(as_many(21).starts_with("save_step: the loss's items must be 1 or the batch's number of rows, got 21"));
  CHECK(as_many(0).find("the loss's items must be > 0, got 0") != std::string::npos);
  CHECK(error_of([&] {
          ga::save_step(
              net, [&](auto& m, auto&) { return loss(m, x, y); }, std::vector<at::Tensor>{}, directory / "own");
        }).starts_with("save_step: the batch must have tensors"));

  ga::data::LengthBuckets buckets({torch::randint(3, {4}), torch::randint(3, {4})}, y.narrow(0, 0, 2),
                                  {.batch_size = 2});
  auto embedded = torch::nn::Embedding(3, 3);
  ga::save_step(
      embedded,
      [](auto& m, const ga::data::SequenceBatch& b) {
        const auto seen = (torch::arange(b.data.size(1)) < b.lengths.unsqueeze(1)).to(torch::kFloat);
        return ga::Loss{torch::cross_entropy_loss((m->forward(b.data) * seen.unsqueeze(2)).sum(1), b.target), b.rows()};
      },
      *buckets.begin(), directory / "step");
  CHECK(described(directory / "step").graphs.front().batch == "Long [2, 4], Long [2], Long [2], none, Long [2]");
  CHECK(recorded(x, [](auto& m, auto& b) { return m->forward(b).square().mean(); }).any_rows == "Float [*, 6]");
}

TEST_CASE("Each layout has a graph, and modes are recorded", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  net->last->eval();
  {
    const ga::Autocast autocast(torch::kCPU, torch::kBFloat16);
    const auto saved = ga::save_steps(net, counted_loss, std::vector{rows_of_six(8), rows_of_six(5)},
                                      directory / "step", {.any_rows = false});
    CHECK(saved.batches == std::vector<std::string>{"Float [8, 6], Long [8]", "Float [5, 6], Long [5]"});
  }
  const auto step = described(directory / "step");
  CHECK(step.modes == "training but last; BFloat16 autocast");
  CHECK(step.graphs.size() == 2);
  CHECK(step.graphs[1].items == 5);
}

TEST_CASE("LibTorch's settings are recorded, so that the compiler chooses the same kernels", "[save_step]") {
  const testing::Directory directory;
  auto model = perceptron();
  const auto settings = [&] {
    ga::save_step(model, plain_loss<Perceptron>, rows_of_six(8), directory / "step");
    const auto manifest = ga::detail::read_manifest(directory / "step", ga::detail::step_format);
    return std::get<std::string>(manifest.values.at("settings"));
  };
  CHECK(settings() == "flash_sdp math_sdp mem_efficient_sdp cudnn_sdp ");
  auto& context = at::globalContext();
  const auto as_before = c10::make_scope_exit([&] {
    context.setSDPUseCuDNN(true);
    context.setDeterministicAlgorithms(false, /*warn_only=*/false);
  });
  context.setSDPUseCuDNN(false);
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  CHECK(settings() == "flash_sdp math_sdp mem_efficient_sdp deterministic ");
}

TEST_CASE("A folder is replaced only if it is a step", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  const auto folder = directory / "step";
  ga::save_step(net, counted_loss, rows_of_six(8), folder);
  const auto first = described(folder).graphs.front().trace;
  testing::write_text(folder / "graph-0.00000000.so", "what was compiled of it");
  ga::save_step(net, plain_loss<Perceptron>, rows_of_six(4), folder);
  const auto second = described(folder).graphs.front().trace;
  CHECK(first != second);
  CHECK_FALSE(std::filesystem::exists(folder / first));
  CHECK_FALSE(std::filesystem::exists(folder / "graph-0.00000000.so"));
  CHECK(std::filesystem::exists(folder / second));

  std::filesystem::create_directory(directory / "other");
  testing::write_text(directory / "other" / "thesis.tex", "of years");
  CHECK(error_of([&] {
          ga::save_step(net, counted_loss, rows_of_six(8), directory / "other");
        }).find("must be a new folder or a saved step") != std::string::npos);
  CHECK(testing::text_of(directory / "other" / "thesis.tex") == "of years");
}

TEST_CASE("A step's manifest is validated", "[save_step]") {
  const testing::Directory directory;
  auto net = perceptron();
  ga::save_step(net, counted_loss, rows_of_six(8), directory / "step");
  const auto good = ga::detail::read_manifest(directory / "step", ga::detail::step_format);
  const auto error_with = [&](const std::string& name, const ga::detail::Manifest::Value& value) {
    auto bad = good;
    bad.values[name] = value;
    return error_of([&] { ga::detail::step_description(bad, "step"); });
  };
  CHECK(error_with("graphs", std::int64_t{1}).empty());
  CHECK(error_with("graphs", std::int64_t{0}).find("the number of graphs") != std::string::npos);
  CHECK(error_with("graphs", std::int64_t{1} << 60).find("the number of graphs") != std::string::npos);
  CHECK(error_with("graphs", std::int64_t{2}).find("must have a value \"graph-1.kind\"") != std::string::npos);
  CHECK(error_with("graph-0.code", std::string("../evil")).find("must be a name of digits") != std::string::npos);
  CHECK(error_with("graph-0.items", -2.0).find("items of graph-0 must be >= 0") != std::string::npos);
  CHECK(error_with("graph-0.items", true).find("must be of another type") != std::string::npos);
  CHECK(error_of([&] { ga::detail::read_manifest(directory / "step"); }).find("\"format\" must be") !=
        std::string::npos);  // a saved state is no step
}
