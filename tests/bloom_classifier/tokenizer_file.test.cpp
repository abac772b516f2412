// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include "tokenizer/tokenizer_file.hpp"

#include <sys/stat.h>

#include <functional>

#include "bloom_classifier/tokenizer_data.hpp"

using namespace testing;
using namespace bloom;

namespace {

using Json = nlohmann::json;

/// A small file of BLOOM's kind.
const Json& small_file() {
  static const auto file = tokenizer_kind("merges as pairs");
  return file;
}

void parse(const std::string& text) { TokenizerFileReader("tokenizer.json").parse(text); }

/// Requires this error, which begins with the path, for the small file with a change.
void require_error(const std::string& part, const std::function<void(Json&)>& change) {
  auto file = small_file();
  change(file);
  REQUIRE_ERROR("tokenizer.json: " + part, parse(file.dump()));
}

/// Requires this error for the file with another value at the pointer.
void require_error_at(const std::string& pointer, const Json& value, const std::string& part) {
  require_error(part, [&](Json& file) { file[Json::json_pointer(pointer)] = value; });
}

void require_accepted(const std::function<void(Json&)>& change) {
  auto file = small_file();
  change(file);
  REQUIRE(tokenizer_of(file).encode("abcd ab.") == tokenizer_of(small_file()).encode("abcd ab."));
}

std::string with_model(const std::string& vocab, const std::string& merges) {
  auto file = small_file();
  file["model"] = Json::object();
  file.erase("added_tokens");
  auto text = file.dump();
  const std::string empty = "\"model\":{}";
  return text.replace(text.find(empty), empty.size(),
                      R"("model":{"type":"BPE","vocab":)" + vocab + R"(,"merges":)" + merges + "}");
}

const Json unigram = {{"type", "Unigram"}, {"vocab", Json::array()}};

}  // namespace

TEST_CASE("tokenizer file: files of current and older versions of tokenizers are accepted", "[tokenizer]") {
  require_accepted([](Json&) {});
  require_accepted([](Json& file) {
    for (const auto* name : {"version", "truncation", "padding", "normalizer", "post_processor"}) file.erase(name);
    for (const auto* name : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                             "byte_fallback", "ignore_merges"})
      file["model"].erase(name);
  });
  require_accepted([](Json& file) { file.erase("added_tokens"); });
  require_accepted([](Json& file) { file["truncation"] = {{"max_length", 1}, {"direction", "Right"}}; });
  require_accepted([](Json& file) { file["padding"] = {{"strategy", {{"Fixed", 512}}}, {"pad_id", 3}}; });
  require_accepted([](Json& file) { file["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = false; });
  require_accepted([](Json& file) { file["post_processor"] = {{"type", "ByteLevel"}, {"trim_offsets", true}}; });
  require_accepted([](Json& file) { file["model"]["dropout"] = 0.0; });
}

TEST_CASE("tokenizer file: errors name each component that differs from BLOOM's", "[tokenizer]") {
  require_error_at("/normalizer", {{"type", "NFKC"}}, "normalizer must be null, as BLOOM's, got 'NFKC'");
  require_error_at("/model", unigram, "model must be BPE, as BLOOM's, got 'Unigram'");
  require_error_at("/model/type", "WordPiece", "model must be BPE, as BLOOM's, got 'WordPiece'");
  require_error_at("/model", 5, "model must be BPE, as BLOOM's, got '5'");
  require_error_at("/decoder", nullptr, "decoder must be ByteLevel, as BLOOM's, got 'null'");
  require_error_at("/decoder/type", "Metaspace", "decoder must be ByteLevel, as BLOOM's, got 'Metaspace'");
  require_error_at("/post_processor", {{"type", "TemplateProcessing"}},
                   "post_processor must be null or ByteLevel, as BLOOM's, got 'TemplateProcessing'");
  require_error_at("/version", "2.0", "version must be '1.0', got '\"2.0\"'");
  require_error_at("/other", 1, "the file must not have a member 'other', which is not known here");
  require_error("the file must have a member 'model'", [](Json& file) { file.erase("model"); });
  require_error("the file must have a member 'pre_tokenizer'", [](Json& file) { file.erase("pre_tokenizer"); });
  REQUIRE_ERROR("the file must be an object, got '[]'", parse("[]"));
}

TEST_CASE("tokenizer file: other pre-tokenizers are refused", "[tokenizer]") {
  const std::string split = "/pre_tokenizer/pretokenizers/0", byte_level = "/pre_tokenizer/pretokenizers/1";
  require_error_at("/pre_tokenizer", nullptr,
                   "pre_tokenizer must be a Sequence of Split and ByteLevel, as BLOOM's, got 'null'");
  require_error_at("/pre_tokenizer/type", "ByteLevel",
                   "pre_tokenizer must be a Sequence of Split and ByteLevel, as BLOOM's, got 'ByteLevel'");
  const auto flattened = " ?[^(\\s|.,!?…。，、।۔،)]+";
  require_error_at(
      split + "/pattern/Regex", flattened,
      "pre_tokenizer/pretokenizers/0/pattern/Regex must be BLOOM's, \" ?[^(\\\\s|[.,!?…。，、।۔،])]+\", got '\" ?[^(");
  require_error_at(split + "/pattern", {{"String", split_expression}},
                   "pre_tokenizer/pretokenizers/0/pattern/Regex must be BLOOM's,");
  require_error_at(split + "/behavior", "Removed",
                   "pre_tokenizer/pretokenizers/0/behavior must be BLOOM's, \"Isolated\", got '\"Removed\"'");
  require_error_at(split + "/invert", true, "pre_tokenizer/pretokenizers/0/invert must be BLOOM's, false, got 'true'");
  require_error_at(split + "/invert", 0, "pre_tokenizer/pretokenizers/0/invert must be BLOOM's, false, got '0'");
  require_error_at(byte_level + "/use_regex", true,
                   "pre_tokenizer/pretokenizers/1/use_regex must be BLOOM's, false, got 'true'");
  require_error_at(byte_level + "/add_prefix_space", true,
                   "pre_tokenizer/pretokenizers/1/add_prefix_space must be BLOOM's, false, got 'true'");
  require_error("pre_tokenizer/pretokenizers/1/use_regex must be BLOOM's, false, got 'none'", [](Json& file) {
    file["pre_tokenizer"]["pretokenizers"][1].erase("use_regex");  // the default is true
  });
  require_error("pre_tokenizer/pretokenizers", [](Json& file) {
    file["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}, {"individual_digits", true}});
  });
  require_error_at("/pre_tokenizer/pretokenizers", Json::object(), "pre_tokenizer/pretokenizers must be BLOOM's, ");
}

TEST_CASE("tokenizer file: options that change the ids are refused", "[tokenizer]") {
  require_error_at("/model/dropout", 0.1, "model.dropout must be off, as BLOOM's, got '0.1'");
  require_error_at("/model/byte_fallback", true, "model.byte_fallback must be off, as BLOOM's, got 'true'");
  require_error_at("/model/fuse_unk", true, "model.fuse_unk must be off, as BLOOM's, got 'true'");
  require_error_at("/model/continuing_subword_prefix", "##",
                   "model.continuing_subword_prefix must be off, as BLOOM's, got '\"##\"'");
  require_error_at("/model/end_of_word_suffix", "</w>",
                   "model.end_of_word_suffix must be off, as BLOOM's, got '\"</w>\"'");
  require_error_at("/model/ignore_merges", 1, "model.ignore_merges must be true or false, got '1'");
  require_error_at("/model/unk_token", "<none>", "model.unk_token must be in model.vocab, which has no '<none>'");
  require_error_at("/model/unk_token", 0, "model.unk_token must be a string, got '0'");
  require_error_at("/model/later_option", 0, "model must not have a member 'later_option', which is not known here");
}

TEST_CASE("tokenizer file: a vocabulary has every id once", "[tokenizer]") {
  const auto size = std::to_string(small_file().at("model").at("vocab").size());
  const auto require_id_error = [&](const Json& id) {
    require_error_at(
        "/model/vocab/ab", id,
        "model.vocab: the id of 'ab' must be a whole number below their count, " + size + ", got '" + id.dump() + "'");
  };
  for (const auto& id : {Json(-1), Json(size.size() * 1000), Json(1.0), Json("1"), Json(nullptr), Json(true),
                         Json::array(), Json(std::uint64_t{1} << 32), Json(~std::uint64_t{0})})
    require_id_error(id);
  require_error_at("/model/vocab/ab", 7, "model.vocab must have every id once, got 7 for ");
  require_error_at("/model/vocab", Json::array(), "model.vocab must be an object, got '[]'");
  require_error("model.vocab must be tokens of 1 to 8192 bytes, got 0",
                [](Json& file) { file["model"]["vocab"][""] = 5; });
  require_error("model.vocab must be tokens of 1 to 8192 bytes, got 8193",
                [](Json& file) { file["model"]["vocab"][std::string(8193, 'a')] = 5; });
  REQUIRE_ERROR("its JSON must have every name once, got 'a' twice", parse(with_model(R"({"a":0,"a":1})", "[]")));
  REQUIRE_ERROR("its JSON must have every name once, got 'a' twice", parse(with_model(R"({"a":0,"\u0061":1})", "[]")));

  std::string tokens = "{";
  for (std::size_t i = 0; i <= TokenizerFileReader::max_tokens; ++i)
    tokens += (i ? ",\"" : "\"") + std::to_string(i) + "\":" + std::to_string(i);
  REQUIRE_ERROR("model.vocab must be at most 1048576, got 1048577", parse(with_model(tokens + "}", "[]")));
}

TEST_CASE("tokenizer file: the parts and results of merges are tokens", "[tokenizer]") {
  const std::string vocab = R"({"a":0,"b":1,"ab":2,"c":3})";
  const auto require_merge_error = [&](const std::string& merges, const std::string& part) {
    REQUIRE_ERROR("tokenizer.json: " + part, parse(with_model(vocab, merges)));
  };
  parse(with_model(vocab, R"([["a","b"]])"));
  parse(with_model(vocab, R"(["a b"])"));
  const std::string unknown = "the parts and the result of a merge must be in model.vocab, which has no ";
  require_merge_error(R"([["a","x"]])", unknown + "'x'");
  require_merge_error(R"([["x","a"]])", unknown + "'x'");
  require_merge_error(R"([["a","c"]])", unknown + "'ac'");
  require_merge_error(R"([["a",""]])", unknown + "''");
  require_merge_error(R"(["a c"])", unknown + "'ac'");
  require_merge_error(R"(["a "])", unknown + "''");
  require_merge_error(R"(["ab"])", "model.merges must be two tokens with one space between them, got 'ab'");
  require_merge_error(R"(["a b c"])", "model.merges must be two tokens with one space between them, got 'a b c'");
  require_merge_error(R"([["a","b"],"a b"])", "model.merges must all be pairs, as the first is, got '\"a b\"'");
  require_merge_error(R"([["a","b"],["a"]])", "model.merges must all be pairs, as the first is, got '[\"a\"]'");
  require_merge_error(R"([["a","b"],"#version: 0.2"])", "model.merges must all be pairs, as the first is,");
  require_merge_error(R"(["a b",["a","b"]])", "a merge must be a string, got '[\"a\",\"b\"]'");
  require_merge_error(R"([["a",1]])", "a merge's right part must be a string, got '1'");
  require_merge_error(R"([[null,"b"]])", "a merge's left part must be a string, got 'null'");
  std::string many = "[[]";
  for (std::size_t i = 0; i < TokenizerFileReader::max_merges; ++i) many += ",[]";
  require_merge_error(many + "]", "model.merges must be at most 2097152, got 2097153");
  require_merge_error(R"({"a":"b"})", "model.merges must be an array, got '{\"a\":\"b\"}'");
}

TEST_CASE("tokenizer file: added tokens have the ids that tokenizers would give them", "[tokenizer]") {
  const Json token = {{"id", 0},         {"content", "<unk>"},  {"single_word", false}, {"lstrip", false},
                      {"rstrip", false}, {"normalized", false}, {"special", true}};
  const auto with = [&](const std::string& name, const Json& value) {
    auto changed = token;
    changed[name] = value;
    return Json::array({changed});
  };
  const auto size = small_file().at("model").at("vocab").size();
  const auto next = std::to_string(size);
  require_error_at("/added_tokens", with("id", 1), "added_tokens: '<unk>' must have the id 0, got '1'");
  require_error_at("/added_tokens", with("id", "0"), "added_tokens: '<unk>' must have the id 0, got '\"0\"'");
  require_error_at("/added_tokens", with("content", "<new>"),
                   "added_tokens: '<new>' must have the id " + next + ", got '0'");
  require_error_at("/added_tokens", with("content", ""), "added_tokens must be tokens of 1 to 8192 bytes, got 0");
  require_error_at("/added_tokens", with("content", 3), "added_tokens.content must be a string, got '3'");
  for (const auto* name : {"single_word", "lstrip", "rstrip"}) {
    require_error_at("/added_tokens", with(name, true),
                     std::string("added_tokens: '<unk>' must not be ") + name + ", which is not supported here");
    require_error_at("/added_tokens", with(name, 1),
                     std::string("added_tokens.") + name + " must be true or false, got '1'");
  }
  require_error_at("/added_tokens", with("normalized", "no"),
                   "added_tokens: '<unk>'.normalized must be true or false, got '\"no\"'");
  require_error_at("/added_tokens", with("pad", 1),
                   "added_tokens must not have a member 'pad', which is not known here");
  require_error_at("/added_tokens", Json::array({token, token}),
                   "added_tokens: '<unk>' must be there once, got it twice");
  require_error_at("/added_tokens", Json::array({5}), "added_tokens must be an object, got '5'");
  require_error_at("/added_tokens", Json::object(), "added_tokens must be an array, got '{}'");

  auto first = token, second = token;
  first["content"] = "<new>", second["content"] = "<newer>";
  first["id"] = size, second["id"] = size + 1;
  auto file = small_file();
  file["added_tokens"] = {second, first};
  REQUIRE_ERROR("added_tokens: '<newer>' must have the id " + next, parse(file.dump()));
  file["added_tokens"] = {first, second};
  REQUIRE(tokenizer_of(file).encode("a<newer>") ==
          Ids{*tokenizer_of(file).token_to_id("a"), static_cast<std::int64_t>(size + 1)});
}

TEST_CASE("tokenizer file: invalid JSON is refused", "[tokenizer]") {
  const auto text = small_file().dump();
  REQUIRE_ERROR("tokenizer.json: must be JSON in UTF-8, got what is none at byte 1", parse(""));
  for (std::size_t size = 0; size < text.size(); size += 7)
    REQUIRE_ERROR("tokenizer.json: must be JSON in UTF-8, got what is none", parse(text.substr(0, size)));
  REQUIRE_ERROR("must be JSON in UTF-8, got what is none", parse(text + "{}"));
  REQUIRE_ERROR("must be JSON in UTF-8, got a zero at byte " + std::to_string(text.size() + 1),
                parse(text + std::string(1, '\0')));
  REQUIRE_ERROR("must be JSON in UTF-8, got what is none", parse(with_model("{\"\xFF\":0}", "[]")));
  REQUIRE_ERROR("must be JSON in UTF-8, got what is none", parse(with_model("{\"\\ud800\":0}", "[]")));
  REQUIRE_ERROR("its JSON must not be nested deeper than 16", parse(std::string(1'000'000, '[')));
  std::string values = "[1";
  for (std::size_t i = 0; i < JsonBuilder::max_values; ++i) values += ",1";
  REQUIRE_ERROR("its JSON must have at most 8388608 values", parse(values + "]"));
}

TEST_CASE("tokenizer file: paths without a readable file are refused", "[tokenizer]") {
  Directory directory;
  REQUIRE_ERROR("must exist, but there is no such file", BloomTokenizer::from_file(directory / "none"));
  REQUIRE_ERROR("must be a regular file", BloomTokenizer::from_file(directory / "."));
  REQUIRE(mkfifo((directory / "pipe").c_str(), 0600) == 0);
  REQUIRE_ERROR("must be a regular file", BloomTokenizer::from_file(directory / "pipe"));
  write_text(directory / "large", "{}");
  std::filesystem::resize_file(directory / "large",
                               TokenizerFileReader::max_bytes + 1);  // zeros, which take no space on the disk
  REQUIRE_ERROR("must have at most 134217728 bytes, got 134217729", BloomTokenizer::from_file(directory / "large"));
}
