// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "json/json_reader.hpp"
#include "splitter.hpp"

namespace bloom {

/// Returns BLOOM's rules to split text and to write its bytes as characters, as in tokenizer.json.
inline nlohmann::json bloom_pre_tokenizer() {
  return {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", split_expression}}}, {"behavior", "Isolated"}, {"invert", false}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}}}};
}

/// Refuses other kinds of tokenizers by name, because almost correct ids would be worse than an error.
class TokenizerKind {
 public:
  using Json = nlohmann::json;

  explicit TokenizerKind(const JsonReader& reader) : reader_(reader) {}

  void require(const Json& file) const {
    reader_.require_members(file, "the file", {"model", "pre_tokenizer", "decoder"},
                            {"version", "truncation", "padding", "added_tokens", "normalizer", "post_processor"});
    if (const auto version = file.value("version", Json("1.0")); version != "1.0")
      reader_.fail("version must be '1.0', got ", reader_.shown_json(version));
    if (const auto normalizer = file.value("normalizer", Json()); !normalizer.is_null())
      reader_.fail("normalizer must be null, as BLOOM's, got ", type_of(normalizer));
    if (const auto post = file.value("post_processor", Json()); !post.is_null() && type_of(post) != "'ByteLevel'")
      reader_.fail("post_processor must be null or ByteLevel, as BLOOM's, got ", type_of(post));
    if (const auto& decoder = file.at("decoder"); type_of(decoder) != "'ByteLevel'")
      reader_.fail("decoder must be ByteLevel, as BLOOM's, got ", type_of(decoder));
    require_pre_tokenizer(file.at("pre_tokenizer"));
    require_model(file.at("model"));
  }

 private:
  /// Returns the type of a part of the file: 'ByteLevel'.
  static std::string type_of(const Json& part) {
    const auto type = part.is_object() ? part.value("type", Json()) : Json();
    return type.is_string() ? shown(type.get_ref<const std::string&>()) : JsonReader::shown_json(part);
  }

  void require_pre_tokenizer(Json found) const {
    if (type_of(found) != "'Sequence'")
      reader_.fail("pre_tokenizer must be a Sequence of Split and ByteLevel, as BLOOM's, got ", type_of(found));
    const auto trim_offsets = Json::json_pointer("/pretokenizers/1/trim_offsets");
    if (found.contains(trim_offsets)) found[trim_offsets] = true;  // changes no ids
    const auto expected = bloom_pre_tokenizer();
    if (found == expected) return;
    const auto path = Json::diff(expected, found).front().at("path").get<std::string>();
    const auto at = [pointer = Json::json_pointer(path)](const Json& json) {
      return json.contains(pointer) ? json.at(pointer).dump() : "none";
    };
    reader_.fail("pre_tokenizer", path, " must be BLOOM's, ", at(expected), ", got ", shown(at(found)));
  }

  void require_model(const Json& model) const {
    if (type_of(model) != "'BPE'") reader_.fail("model must be BPE, as BLOOM's, got ", type_of(model));
    reader_.require_members(model, "model", {"type", "vocab", "merges"},
                            {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                             "byte_fallback", "ignore_merges"});
    for (const auto* name :
         {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"}) {
      const auto value = model.value(name, Json());
      if (!value.is_null() && value != false && value != "" && value != 0)
        reader_.fail("model.", name, " must be off, as BLOOM's, got ", reader_.shown_json(value));
    }
  }

  const JsonReader& reader_;
};

}  // namespace bloom
