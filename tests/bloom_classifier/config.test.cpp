// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <filesystem>

#include "model/config.hpp"
#include "support/files.hpp"

using bloom::BloomConfig;
using nlohmann::json;

namespace {

const auto data = std::filesystem::path(__FILE__).parent_path() / "data";

json small() { return {{"model_type", "bloom"}, {"hidden_size", 12}, {"n_head", 3}}; }

BloomConfig read(const json& config) { return BloomConfig::from_json(config, "config.json"); }

BloomConfig with(const std::string& name, const json& value) {
  auto config = small();
  config[name] = value;
  return read(config);
}

BloomConfig read_text(const std::string& text) {
  const testing::Directory directory;
  testing::write_text(directory / "config.json", text);
  return BloomConfig::from_file(directory / "config.json");
}

}  // namespace

TEST_CASE("BloomConfig: reads a file of transformers") {
  const auto config = BloomConfig::from_file(data / "heads_3" / "config.json");
  CHECK(config.vocab_size == 40);
  CHECK(config.hidden_size == 12);
  CHECK(config.n_layer == 2);
  CHECK(config.n_head == 3);
  CHECK(config.head_dim() == 4);
  CHECK(config.layer_norm_epsilon == 1e-5);
  CHECK(config.initializer_range == 0.3);
  CHECK(config.hidden_dropout == 0.1);
  CHECK(config.attention_dropout == 0.2);
  CHECK(config.apply_residual_connection_post_layernorm);
  CHECK(config.pad_token_id == 3);
  CHECK(config.num_labels == 3);
  CHECK(BloomConfig::from_file(data / "heads_6" / "config.json").layer_norm_epsilon == 1e-4);
}

TEST_CASE("BloomConfig: writes a file that transformers reads") {
  const auto config = BloomConfig::from_file(data / "heads_3" / "config.json");
  CHECK(config.to_json().dump(2) + "\n" == testing::text_of(data / "config_of_cpp.json"));  // model_values.py reads it
  CHECK(read(config.to_json()).to_json() == config.to_json());
  CHECK(read(small()).to_json()["pad_token_id"].is_null());
}

TEST_CASE("BloomConfig: defaults are those of transformers") {
  const auto config = read({{"model_type", "bloom"}});
  CHECK(config.to_json() == BloomConfig{}.to_json());
  CHECK(config.vocab_size == 250880);
  CHECK(config.hidden_size == 64);
  CHECK(config.n_layer == 2);
  CHECK(config.n_head == 8);
  CHECK(config.num_labels == 2);
  CHECK_FALSE(config.pad_token_id);
}

TEST_CASE("BloomConfig: names have the aliases that BLOOM's files use") {
  const auto config = read({{"model_type", "bloom"},
                            {"n_embed", 1024},
                            {"num_attention_heads", 16},
                            {"num_hidden_layers", 24},
                            {"hidden_size", nullptr},
                            {"n_inner", nullptr},
                            {"masked_softmax_fusion", true},
                            {"hidden_dropout", 0}});
  CHECK(config.hidden_size == 1024);
  CHECK(config.n_head == 16);
  CHECK(config.n_layer == 24);
  CHECK(config.parameter_count() == 559'214'592 + 2 * 1024);  // BLOOM-560m's, and the classification head's
  CHECK(with("n_embed", 12).hidden_size == 12);
  CHECK(with("", 24).hidden_size == 12);  // an unknown name
  REQUIRE_ERROR("config.json: hidden_size and n_embed must agree, got '12' and '24'", with("n_embed", 24));
  CHECK(with("num_labels", 5).num_labels == 5);
  CHECK(with("id2label", {{"0", "no"}, {"1", "yes"}, {"2", "so so"}}).num_labels == 3);
  auto both = small();
  both["id2label"] = {{"0", "no"}, {"1", "yes"}};
  both["num_labels"] = 3;
  REQUIRE_ERROR("config.json: num_labels must be the size of id2label, 2, got 3", read(both));
}

TEST_CASE("BloomConfig: names of labels are kept unless they are defaults") {
  const auto config = with("id2label", {{"1", "bad"}, {"0", "good"}, {"2", "bad"}});
  CHECK(config.labels == std::vector<std::string>{"good", "bad", "bad"});
  CHECK(config.to_json()["id2label"] == json({{"0", "good"}, {"1", "bad"}, {"2", "bad"}}));
  CHECK(config.to_json()["label2id"]["good"] == 0);
  CHECK(read(config.to_json()).labels == config.labels);
  CHECK(with("id2label", {{"0", "LABEL_0"}, {"1", "LABEL_1"}}).labels.empty());
  CHECK(with("id2label", {{"0", "LABEL_1"}, {"1", "LABEL_0"}}).label_name(1) == "LABEL_0");
  CHECK(read(small()).label_name(1) == "LABEL_1");

  REQUIRE_ERROR("config.json: id2label must have the numbers from 0 on, but has no 1",
                with("id2label", {{"0", "no"}, {"2", "yes"}}));
  REQUIRE_ERROR("id2label must be a string, got '5'", with("id2label", {{"0", "no"}, {"1", 5}}));
  for (const auto* name : {"", "\x1b[2J", "a\nb", "\x7f"})
    REQUIRE_ERROR("the name of a label must be 1 to 200 bytes without control characters, got",
                  with("id2label", {{"0", "no"}, {"1", name}}));
  REQUIRE_ERROR("must be 1 to 200 bytes", with("id2label", {{"0", "no"}, {"1", std::string(201, 'x')}}));
  auto fewer = config;
  fewer.num_labels = 2;
  REQUIRE_ERROR("BloomConfig: labels must be as many as num_labels, 2, got 3", fewer.check());
}

TEST_CASE("BloomConfig: another model is refused by its name") {
  REQUIRE_ERROR("config.json: model_type must be 'bloom', got '\"llama\"'", with("model_type", "llama"));
  REQUIRE_ERROR("config.json: model_type must be 'bloom', got none", read({{"hidden_size", 8}}));
  REQUIRE_ERROR("config.json: model_type must be 'bloom', got '5'", with("model_type", 5));
  REQUIRE_ERROR("problem_type must be 'single_label_classification', got '\"regression\"'",
                with("problem_type", "regression"));
  CHECK(with("problem_type", "single_label_classification").n_head == 3);
  CHECK(with("problem_type", nullptr).n_head == 3);
}

TEST_CASE("BloomConfig: values are checked, and named") {
  REQUIRE_ERROR("config.json: hidden_size must be divisible by n_head, got 12 and 5", with("n_head", 5));
  REQUIRE_ERROR("n_head must be in [1, 12], got 13", with("n_head", 13));
  REQUIRE_ERROR("n_head must be in [1, 12], got 0", with("n_head", 0));
  REQUIRE_ERROR("n_head must be in [1, 12], got -3", with("n_head", -3));
  REQUIRE_ERROR("hidden_size must be in [1, 65536], got 65540", with("hidden_size", 65540));
  REQUIRE_ERROR("hidden_size must be in [1, 65536], got 0", with("hidden_size", 0));
  REQUIRE_ERROR("vocab_size must be in [1, 16777216], got 9223372036854775807",
                with("vocab_size", std::numeric_limits<std::int64_t>::max()));
  REQUIRE_ERROR("n_layer must be in [1, 1024], got 0", with("n_layer", 0));
  REQUIRE_ERROR("num_labels must be in [2, 65536], got 1", with("num_labels", 1));
  REQUIRE_ERROR("layer_norm_epsilon must be in [1e-12, 1.0], got 0.0", with("layer_norm_epsilon", 0));
  REQUIRE_ERROR("initializer_range must be in", with("initializer_range", -0.02));
  REQUIRE_ERROR("hidden_dropout must be in [0.0, 0.99], got 1.0", with("hidden_dropout", 1));
  REQUIRE_ERROR("attention_dropout must be in [0.0, 0.99], got -0.1", with("attention_dropout", -0.1));
  REQUIRE_ERROR("pad_token_id must be in [0, 250879], got 250880", with("pad_token_id", 250880));
  REQUIRE_ERROR("pad_token_id must be in [0, 250879], got -1", with("pad_token_id", -1));
  auto large = small();
  large.update({{"hidden_size", 65536}, {"n_head", 1}, {"n_layer", 1024}});
  REQUIRE_ERROR("must have at most 2^38 parameters, got 52", read(large));
  auto config = read(small());
  config.layer_norm_epsilon = std::numeric_limits<double>::quiet_NaN();
  REQUIRE_ERROR("BloomConfig: layer_norm_epsilon must be in", config.check());
}

TEST_CASE("BloomConfig: types are checked") {
  for (const json& other : {json("12"), json(12.0), json(true), json::array({12}), json::object()}) {
    REQUIRE_ERROR("config.json: n_layer must be a whole number, got '" + other.dump() + "'", with("n_layer", other));
    REQUIRE_ERROR("pad_token_id must be a whole number", with("pad_token_id", other));
  }
  REQUIRE_ERROR("vocab_size must be a whole number, got '18446744073709551615'", with("vocab_size", ~std::uint64_t{0}));
  REQUIRE_ERROR("hidden_dropout must be a number, got '\"0\"'", with("hidden_dropout", "0"));
  REQUIRE_ERROR("apply_residual_connection_post_layernorm must be true or false, got '1'",
                with("apply_residual_connection_post_layernorm", 1));
  REQUIRE_ERROR("id2label must be an object, got '[\"no\",\"yes\"]'", with("id2label", {"no", "yes"}));
}

TEST_CASE("BloomConfig: files are checked") {
  CHECK(read_text(R"({"model_type": "bloom", "n_head": 4})").n_head == 4);
  REQUIRE_ERROR("config.json: must be JSON in UTF-8, got what is none at byte 1", read_text(""));
  REQUIRE_ERROR("must be JSON in UTF-8", read_text(R"({"model_type": "bloom"} x)"));
  REQUIRE_ERROR("must be JSON in UTF-8", read_text(R"({"model_type": "bloom", "hidden_dropout": NaN})"));
  REQUIRE_ERROR("must be JSON in UTF-8", read_text("{\"model_type\": \"\xff\"}"));
  REQUIRE_ERROR("its JSON must have every name once, got 'n_head' twice",
                read_text(R"({"model_type": "bloom", "n_head": 4, "n_head": 8})"));
  REQUIRE_ERROR("the file must be an object, got '[]'", read_text("[]"));
  REQUIRE_ERROR("must not be nested deeper than 16", read_text(std::string(5'000'000, '[')));
  REQUIRE_ERROR("must not be nested deeper than 16",
                read_text(R"({"model_type": "bloom", "x": )" + std::string(40, '[') + std::string(40, ']') + "}"));
  REQUIRE_ERROR("must have at most 16777216 bytes, got 17000000", read_text(std::string(17'000'000, ' ')));
  REQUIRE_ERROR("config.json: must exist, but there is no such file",
                BloomConfig::from_file(testing::Directory() / "config.json"));
  REQUIRE_ERROR("must be a regular file", BloomConfig::from_file(data));
}

TEST_CASE("BloomConfig: a message is short for any content of the file") {
  const std::string large(100'000, 'x');
  CHECK(testing::error_of([&] { with("model_type", large); }).size() < 200);
  CHECK(testing::error_of([&] { with("n_layer", json::array({large})); }).size() < 200);
  CHECK(testing::error_of([&] { read_text("\"" + large); }).size() < 200);
}
