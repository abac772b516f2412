// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/weights.hpp>

#include "io/module_of_tensors.hpp"
#include "support/files.hpp"
#include "support/models.hpp"

#include <sstream>

namespace ga = gradaccum;
using testing::copies_of;
using testing::equal;

namespace {

struct Net : torch::nn::Module {
  torch::nn::Linear first{3, 2}, second{2, 1};
  torch::nn::BatchNorm1d norm{2};
  Net() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
  }
};

/// A module with a single tensor as parameter or buffer.
struct Single : torch::nn::Module {
  at::Tensor weight;
  explicit Single(const at::Tensor& tensor, bool is_parameter = true)
      : weight(is_parameter ? register_parameter("weight", tensor, tensor.is_floating_point() || tensor.is_complex())
                            : register_buffer("weight", tensor)) {}
};

void fill(torch::nn::Module& module, double value) {
  at::NoGradGuard no_grad;
  for (auto& tensor : module.parameters()) tensor.fill_(value++);
  for (auto& tensor : module.buffers()) tensor.fill_(value++);
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("weights: parameters and buffers are loaded by name, into the same tensors") {
  testing::Directory directory;
  Net from, to;
  fill(from, 1);
  ga::io::save_weights(from, directory / "file");
  const ga::io::SafetensorsFile file(directory / "file");
  CHECK(file.keys() == Names{"first.bias", "first.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean",
                             "norm.running_var", "norm.weight", "second.bias", "second.weight"});
  CHECK(file.metadata() == ga::io::Metadata{{"format", "pt"}});
  const auto weight = to.first->weight;
  weight.mutable_grad() = torch::ones_like(weight);
  CHECK(!equal(copies_of(from), copies_of(to)));
  const auto report = ga::io::load_weights(to, directory / "file");
  CHECK(report.complete());
  CHECK(equal(copies_of(from), copies_of(to)));
  CHECK(to.first->weight.is_same(weight));
  CHECK(weight.requires_grad());
  CHECK(weight.is_leaf());
  CHECK(weight.grad().defined());
}

TEST_CASE("weights: modules, holders and pointers to modules") {
  testing::Directory directory;
  const auto path = directory / "file";
  auto from = testing::make_model(), to = testing::make_model();
  fill(*from, 3);
  const auto expected = testing::flat(from);
  ga::io::save_weights(from, path);  // a holder
  const auto of_holder = testing::text_of(path);
  ga::io::save_weights(*from, path);
  CHECK(testing::text_of(path) == of_holder);
  ga::io::save_weights(from.ptr(), path, {});
  CHECK(ga::io::SafetensorsFile(path).metadata().empty());
  for (int kind = 0; kind < 3; ++kind) {
    fill(*to, 9);
    CHECK(!testing::flat(to).equal(expected));
    if (kind == 0) ga::io::load_weights(to, path);
    if (kind == 1) ga::io::load_weights(*to, path);
    if (kind == 2) ga::io::load_weights(to.ptr(), path);
    CHECK(testing::flat(to).equal(expected));
  }
}

TEST_CASE("load_weights: strict, it names all differences and changes nothing; otherwise it loads matching tensors") {
  testing::Directory directory;
  Net net;
  fill(net, 1);
  const auto before = copies_of(net);
  auto tensors = before;
  for (auto& [name, tensor] : tensors) tensor = tensor + 100;
  tensors.erase("first.bias");
  tensors.erase("norm.running_var");
  tensors["extra"] = torch::ones({1});
  tensors["first.weight"] = torch::ones({3, 2});
  tensors["norm.num_batches_tracked"] = torch::scalar_tensor(1.0);
  ga::io::save_file(tensors, directory / "file");

  const auto message = testing::error_of([&] { ga::io::load_weights(net, directory / "file"); });
  CHECK(testing::contains(message, (directory / "file").string()));
  CHECK(testing::contains(message, "missing (2):\n  first.bias\n  norm.running_var\n"));
  CHECK(testing::contains(message, "unexpected (1):\n  extra\n"));
  CHECK(testing::contains(message, "mis-shaped (2):\n  first.weight: [3, 2] in the file, [2, 3] in the module\n"));
  CHECK(testing::contains(message, "norm.num_batches_tracked: Float in the file, Long in the module"));
  CHECK(equal(copies_of(net), before));

  const auto report = ga::io::load_weights(net, directory / "file", {.strict = false});
  CHECK(!report.complete());
  CHECK(report.missing == Names{"first.bias", "norm.running_var"});
  CHECK(report.unexpected == Names{"extra"});
  CHECK(report.mis_shaped.size() == 2);
  for (auto& [name, tensor] : copies_of(net)) {
    INFO(name);
    const bool fits = name != "first.bias" && name != "first.weight" && name != "norm.running_var" &&
                      name != "norm.num_batches_tracked";
    CHECK(tensor.equal(fits ? tensors.at(name) : before.at(name)));
  }
}

TEST_CASE("load_weights: each kind of difference separately") {
  testing::Directory directory;
  const auto path = directory / "file";
  Single net(torch::zeros({2}));
  const auto load = [&](const ga::io::Tensors& tensors) {
    ga::io::save_file(tensors, path);
    ga::io::load_weights(net, path);
  };
  REQUIRE_ERROR("missing (1):\n  weight", load({}));
  REQUIRE_ERROR("unexpected (1):\n  other", load({{"weight", torch::ones({2})}, {"other", torch::ones({2})}}));
  REQUIRE_ERROR("mis-shaped (1):\n  weight: [2, 1] in the file, [2] in the module",
                load({{"weight", torch::ones({2, 1})}}));
  REQUIRE_ERROR("weight: [] in the file, [2] in the module", load({{"weight", torch::scalar_tensor(1.0)}}));
  REQUIRE_ERROR("weight: ComplexFloat in the file, Float", load({{"weight", torch::ones({2}, at::kComplexFloat)}}));
  CHECK(net.weight.equal(torch::zeros({2})));
  load({{"weight", torch::ones({2})}});
  CHECK(net.weight.equal(torch::ones({2})));
}

TEST_CASE("WeightsReport: prints at most ten names of each kind") {
  const auto printed = [](const ga::io::WeightsReport& report) {
    std::ostringstream stream;
    stream << report;
    return stream.str();
  };
  CHECK(printed({}) == "all weights fit");
  ga::io::WeightsReport report;
  for (char c = 'a'; c < 'a' + 10; ++c) report.missing.emplace_back(1, c);
  const std::string ten = "missing (10):\n  a\n  b\n  c\n  d\n  e\n  f\n  g\n  h\n  i\n  j\n";
  CHECK(printed(report) == ten);
  report.missing.insert(report.missing.end(), {"k", "l"});
  report.unexpected = {"x"};
  CHECK(printed(report) == "missing (12):" + ten.substr(13) + "  and 2 more\nunexpected (1):\n  x\n");
  CHECK(report.missing.size() == 12);
}

TEST_CASE("load_weights: numbers are converted to the module's dtype, and keep its strides") {
  testing::Directory directory;
  const auto path = directory / "file";
  const auto values = torch::tensor({{1.5, -2.0, 1e-3}, {3.0, 0.1, 1e6}}, at::kFloat);
  ga::io::save_file({{"weight", values}}, path);
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
    Single net(torch::zeros({3, 2}, dtype).t());
    ga::io::load_weights(net, path);
    CHECK(net.weight.equal(values.to(dtype)));
    CHECK(net.weight.stride(0) == 1);
    CHECK(net.weight.scalar_type() == dtype);
  }
  Single integers(torch::zeros({2, 3}, at::kLong), false);
  REQUIRE_ERROR("weight: Float in the file, Long in the module", ga::io::load_weights(integers, path));
  ga::io::save_file({{"weight", torch::tensor({{1, 2, 3}, {4, 5, 6}}, at::kShort)}}, path);
  ga::io::load_weights(integers, path);
  CHECK(integers.weight.equal(torch::tensor({{1, 2, 3}, {4, 5, 6}}, at::kLong)));
  Single flags(torch::zeros({2, 3}, at::kBool), false);
  REQUIRE_ERROR("weight: Short in the file, Bool in the module", ga::io::load_weights(flags, path));
}

TEST_CASE("weights: shared weights count as present under any of their names") {
  testing::Directory directory;
  const auto path = directory / "file";
  struct Tied : torch::nn::Module {
    torch::nn::Linear a{2, 2}, b{2, 2};
    Tied() {
      b->weight = a->weight;
      register_module("a", a);
      register_module("b", b);
      b->register_parameter("tied", a->weight);
    }
  } net;
  fill(net, 1);
  const auto before = copies_of(net);
  ga::io::save_weights(net, path);
  CHECK(ga::io::SafetensorsFile(path).keys() == Names{"a.bias", "a.weight", "b.bias", "b.tied", "b.weight"});
  auto tensors = ga::io::load_file(path);
  tensors.erase("a.weight");
  ga::io::save_file(tensors, path);
  fill(net, 50);
  CHECK(ga::io::load_weights(net, path).complete());
  CHECK(net.a->weight.equal(before.at("a.weight")));
  tensors.erase("b.tied");
  ga::io::save_file(tensors, path);
  REQUIRE_ERROR("missing (2):\n  a.weight\n  b.tied\n", ga::io::load_weights(net, path));
}

TEST_CASE("load_weights: refuses tensors that cannot be written to, before any change") {
  testing::Directory directory;
  const auto path = directory / "file";
  struct Two : torch::nn::Module {
    at::Tensor first = register_buffer("first", torch::zeros({2})), second;
    explicit Two(const at::Tensor& tensor) : second(register_buffer("second", tensor)) {}
  };
  ga::io::save_file({{"first", torch::ones({2})}, {"second", torch::ones({2})}}, path);
  for (bool strict : {true, false}) {
    Two expanded(torch::zeros({1}).expand({2})), meta(torch::zeros({2}, at::kMeta));
    REQUIRE_ERROR("the module's second must have memory for each of its elements, got an expanded tensor",
                  ga::io::load_weights(expanded, path, {.strict = strict}));
    REQUIRE_ERROR("got a meta tensor", ga::io::load_weights(meta, path, {.strict = strict}));
    CHECK(expanded.first.equal(torch::zeros({2})));
    CHECK(meta.first.equal(torch::zeros({2})));
  }
  // A file whose error appears only while reading also changes nothing.
  auto bytes = [&] {
    ga::io::save_file({{"first", torch::ones({2})}, {"second", torch::ones({2}, at::kBool)}}, path);
    return testing::text_of(path);
  }();
  bytes.back() = '\2';
  testing::write_text(path, bytes);
  Two flags(torch::zeros({2}));
  REQUIRE_ERROR("only bytes 0 and 1", ga::io::load_weights(flags, path, {.strict = false}));
  CHECK(flags.first.equal(torch::zeros({2})));
}

TEST_CASE("weights: undefined parameters and buffers are left out") {
  testing::Directory directory;
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 2).bias(false));
  linear->register_buffer("nothing", at::Tensor());
  ga::io::save_weights(linear, directory / "file");
  CHECK(ga::io::SafetensorsFile(directory / "file").keys() == Names{"weight"});
  CHECK(ga::io::load_weights(linear, directory / "file").complete());
}
