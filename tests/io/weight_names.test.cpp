// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <gradaccum/io/weights.hpp>

#include "io/module_of_tensors.hpp"
#include "support/files.hpp"

// Weights with other names in the file than in the module, or missing ones.

namespace ga = gradaccum;
using testing::ModuleOfTensors;
using testing::zeros_like;
using Names = std::vector<std::string>;

namespace {

at::Tensor numbers(double first) { return torch::arange(first, first + 3); }

const ga::io::Tensors base{{"h.0.weight", numbers(1)}, {"ln_f.weight", numbers(10)}};
const ga::io::Tensors with_head{
    {"transformer.h.0.weight", numbers(1)}, {"transformer.ln_f.weight", numbers(10)}, {"score.weight", numbers(20)}};

/// A file of these tensors.
struct File {
  testing::Directory directory;
  std::filesystem::path path = directory / "file";
  explicit File(const ga::io::Tensors& tensors) { ga::io::save_file(tensors, path); }
};

}  // namespace

TEST_CASE("load_weights: a base model's weights go into a model with a head") {
  const File file(base);
  auto model = zeros_like(with_head);
  const auto before = testing::copies_of(model);
  REQUIRE_ERROR("missing (3):\n  score.weight\n  transformer.h.0.weight\n  transformer.ln_f.weight\nunexpected (2):",
                ga::io::load_weights(model, file.path));
  REQUIRE_ERROR("missing (1):\n  score.weight\n",
                ga::io::load_weights(model, file.path, {.base_model_prefix = "transformer"}));
  REQUIRE_ERROR("unexpected (2):\n  h.0.weight\n  ln_f.weight\n",
                ga::io::load_weights(model, file.path, {.may_be_missing = {"score"}}));
  CHECK(testing::equal(testing::copies_of(model), before));

  const auto report =
      ga::io::load_weights(model, file.path, {.base_model_prefix = "transformer", .may_be_missing = {"score"}});
  CHECK(report.complete());
  CHECK(report.new_weights == Names{"score.weight"});
  CHECK(model.at("transformer.h.0.weight").equal(numbers(1)));
  CHECK(model.at("transformer.ln_f.weight").equal(numbers(10)));
  CHECK(model.at("score.weight").equal(torch::zeros({3})));
}

TEST_CASE("load_weights: a base model loads its weights from a model with a head") {
  const File file(with_head);
  auto model = zeros_like(base);
  REQUIRE_ERROR("unexpected (1):\n  score.weight\n",
                ga::io::load_weights(model, file.path, {.base_model_prefix = "transformer"}));
  CHECK(!testing::equal(testing::copies_of(model), base));
  const auto report = ga::io::load_weights(model, file.path, {.strict = false, .base_model_prefix = "transformer"});
  CHECK(report.unexpected == Names{"score.weight"});
  CHECK(report.missing.empty());
  CHECK(testing::equal(testing::copies_of(model), base));
}

TEST_CASE("load_weights: with a prefix, names that the file and the module share take precedence") {
  auto model = zeros_like(with_head);
  CHECK(ga::io::load_weights(model, File(with_head).path, {.base_model_prefix = "transformer"}).complete());
  CHECK(testing::equal(testing::copies_of(model), with_head));

  const File both({{"a.weight", numbers(1)}, {"weight", numbers(5)}});
  auto one = zeros_like({{"a.weight", numbers(0)}});
  const auto report = ga::io::load_weights(one, both.path, {.strict = false, .base_model_prefix = "a"});
  CHECK(report.unexpected == Names{"weight"});
  CHECK(one.at("a.weight").equal(numbers(1)));
}

TEST_CASE("load_weights: with a prefix, one tensor does not go into two weights") {
  const File file({{"weight", numbers(5)}});
  auto model = zeros_like({{"a.weight", numbers(0)}, {"weight", numbers(0)}});
  const auto report = ga::io::load_weights(model, file.path, {.strict = false, .base_model_prefix = "a"});
  CHECK(report.missing == Names{"a.weight"});
  CHECK(model.at("a.weight").equal(torch::zeros({3})));
  CHECK(model.at("weight").equal(numbers(5)));
}

TEST_CASE("load_weights: a prefix must be a whole name") {
  const File file({{"former.weight", numbers(5)}});
  auto model = zeros_like({{"transformer.weight", numbers(0)}});
  REQUIRE_ERROR("missing (1):", ga::io::load_weights(model, file.path, {.base_model_prefix = "trans"}));
  REQUIRE_ERROR("base_model_prefix must be given without the dot at its end, got 'transformer.'",
                ga::io::load_weights(model, file.path, {.strict = false, .base_model_prefix = "transformer."}));
  auto same = zeros_like({{"former", numbers(0)}});
  CHECK(ga::io::load_weights(same, File({{"former.former", numbers(2)}}).path, {.base_model_prefix = "former"})
            .complete());
  CHECK(same.at("former").equal(numbers(2)));
  auto nested = zeros_like({{"a.b.former.weight", numbers(0)}});
  CHECK(ga::io::load_weights(nested, file.path, {.base_model_prefix = "a.b"}).complete());
  CHECK(nested.at("a.b.former.weight").equal(numbers(5)));
}

TEST_CASE("load_weights: weights of wrong shape are reported with the module's names") {
  const File file({{"weight", torch::ones({2})}});
  auto model = zeros_like({{"a.weight", numbers(0)}});
  REQUIRE_ERROR("mis-shaped (1):\n  a.weight: [2] in the file, [3] in the module",
                ga::io::load_weights(model, file.path, {.base_model_prefix = "a"}));
}

TEST_CASE("load_weights: a shared weight is there if one of its names is, with the prefix or without") {
  const File file({{"embeddings.weight", numbers(5)}});
  const auto shared = torch::zeros({3});
  ModuleOfTensors model({{"lm_head.weight", shared}, {"transformer.embeddings.weight", shared}});
  REQUIRE_ERROR("missing (2):", ga::io::load_weights(model, file.path));
  CHECK(ga::io::load_weights(model, file.path, {.base_model_prefix = "transformer"}).complete());
  CHECK(shared.equal(numbers(5)));
}

TEST_CASE("load_weights: optional weights are loaded if they exist") {
  const File file(with_head);
  auto model = zeros_like(with_head);
  const auto report = ga::io::load_weights(model, file.path, {.may_be_missing = {"score"}});
  CHECK(report.complete());
  CHECK(report.new_weights.empty());
  CHECK(testing::equal(testing::copies_of(model), with_head));

  auto of_other_shape = zeros_like(with_head);
  of_other_shape.named_children()["score"]->as<ModuleOfTensors>()->at("weight").resize_({4}).zero_();
  REQUIRE_ERROR("mis-shaped (1):\n  score.weight: [3] in the file, [4] in the module",
                ga::io::load_weights(of_other_shape, file.path, {.may_be_missing = {"score"}}));
}

TEST_CASE("load_weights: an optional name is a weight, or a whole module") {
  const File file(ga::io::Tensors{});
  auto model = zeros_like({{"head.a.bias", numbers(0)}, {"head.weight", numbers(0)}, {"header", numbers(0)}});
  const auto missing = [&](const Names& may_be_missing) {
    return ga::io::load_weights(model, file.path, {.strict = false, .may_be_missing = may_be_missing}).missing;
  };
  CHECK(missing({}) == Names{"head.a.bias", "head.weight", "header"});
  CHECK(missing({"head"}) == Names{"header"});
  CHECK(missing({"head.a"}) == Names{"head.weight", "header"});
  CHECK(missing({"header", "head.weight"}) == Names{"head.a.bias"});
  CHECK(missing({"head", "header"}).empty());
  for (const std::string wrong : {"hea", "head.", "head.a.b", ""})
    REQUIRE_ERROR("may_be_missing must have names of the module's weights or modules, got '" + wrong + "'",
                  missing({wrong}));
}

TEST_CASE("WeightsReport: prints new weights") {
  std::ostringstream stream;
  ga::io::WeightsReport report;
  report.new_weights = {"score.weight"};
  CHECK(report.complete());
  stream << report;
  CHECK(stream.str() == "new (1):\n  score.weight\n");
}
