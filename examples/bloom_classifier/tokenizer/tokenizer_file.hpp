// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_pairs.hpp"
#include "data/text_file.hpp"
#include "json/json_reader.hpp"
#include "json/parse_json.hpp"
#include "tokenizer_kind.hpp"
#include "vocabulary.hpp"

namespace bloom {

struct AddedToken {
  std::string content;
  TokenId id = -1;
  bool normalized = false;
};

/// The content of a BLOOM's tokenizer.json.
struct TokenizerFile {
  Vocabulary vocabulary;  // the model's, without added tokens
  MergeTable merges;
  std::vector<AddedToken> added_tokens;
  std::optional<TokenId> unknown;  // for bytes without a token; empty: such bytes are left out
  bool ignore_merges = false;      // a piece that is a token is not built by merges
};

/// Reads an untrusted tokenizer.json.
class TokenizerFileReader {
 public:
  static constexpr std::uint64_t max_bytes = std::uint64_t{1} << 27;
  static constexpr std::size_t max_tokens = std::size_t{1} << 20, max_merges = std::size_t{1} << 21;
  static constexpr std::size_t max_token_bytes = std::size_t{1} << 13;

  explicit TokenizerFileReader(const std::filesystem::path& path) : where_(path.string()), reader_(where_) {}

  TokenizerFile read() const { return parse(read_text_file(where_, max_bytes)); }

  TokenizerFile parse(std::string_view text) const {
    const auto json = parse_json(text, where_);
    TokenizerKind(reader_).require(json);
    const auto& model = json.at("model");
    TokenizerFile file;
    file.vocabulary = read_vocabulary(model.at("vocab"));
    file.merges = read_merges(model.at("merges"), file.vocabulary);
    file.added_tokens = read_added_tokens(json.value("added_tokens", Json::array()), file.vocabulary);
    file.ignore_merges = reader_.flag(model, "model", "ignore_merges");
    if (const auto unknown = model.value("unk_token", Json()); !unknown.is_null())
      file.unknown = known_id(reader_.text(unknown, "model.unk_token"), file.vocabulary, "model.unk_token");
    return file;
  }

 private:
  using Json = nlohmann::json;

  void require_count(const Json& list, const std::string& what, std::size_t max) const {
    if (list.size() > max) reader_.fail(what, " must be at most ", max, ", got ", list.size());
  }

  void require_size(const std::string& token, const std::string& what) const {
    if (token.empty() || token.size() > max_token_bytes)
      reader_.fail(what, " must be tokens of 1 to ", max_token_bytes, " bytes, got ", token.size());
  }

  TokenId known_id(const std::string& token, const Vocabulary& vocabulary, const std::string& what) const {
    const auto id = vocabulary.find(token);
    if (!id) reader_.fail(what, " must be in model.vocab, which has no ", shown(token));
    return *id;
  }

  Vocabulary read_vocabulary(const Json& json) const {
    reader_.require_object(json, "model.vocab");
    require_count(json, "model.vocab", max_tokens);
    std::vector<std::string> tokens(json.size());
    for (const auto& item : json.items()) {
      const auto& id = item.value();
      require_size(item.key(), "model.vocab");
      if (!id.is_number_integer() || id < 0 || id >= json.size())
        reader_.fail("model.vocab: the id of ", shown(item.key()), " must be a whole number below their count, ",
                     json.size(), ", got ", reader_.shown_json(id));
      auto& token = tokens[id.get<std::size_t>()];
      if (!token.empty())
        reader_.fail("model.vocab must have every id once, got ", id, " for ", shown(token), " and ",
                     shown(item.key()));
      token = item.key();
    }
    return Vocabulary(std::move(tokens));
  }

  /// Reads a merge: ["a", "b"], or "a b" in older files.
  std::pair<std::string, std::string> read_merge(const Json& merge, bool is_pair) const {
    if (is_pair) {
      if (!merge.is_array() || merge.size() != 2)
        reader_.fail("model.merges must all be pairs, as the first is, got ", reader_.shown_json(merge));
      return {reader_.text(merge[0], "a merge's left part"), reader_.text(merge[1], "a merge's right part")};
    }
    const auto& text = reader_.text(merge, "a merge");
    const auto space = text.find(' ');
    if (space == text.npos || text.find(' ', space + 1) != text.npos)
      reader_.fail("model.merges must be two tokens with one space between them, got ", shown(text));
    return {text.substr(0, space), text.substr(space + 1)};
  }

  /// Reads merges; their indices are the ranks. Repeated merges are overwritten; a merges.txt's first line is skipped.
  MergeTable read_merges(const Json& json, const Vocabulary& vocabulary) const {
    if (!json.is_array()) reader_.fail("model.merges must be an array, got ", reader_.shown_json(json));
    require_count(json, "model.merges", max_merges);
    const bool are_pairs = !json.empty() && json.front().is_array();
    const std::string what = "the parts and the result of a merge";
    MergeTable merges(json.size());
    std::int32_t rank = 0;
    for (const auto& merge : json) {
      if (!are_pairs && merge.is_string() && merge.get_ref<const std::string&>().starts_with("#version")) continue;
      const auto [left, right] = read_merge(merge, are_pairs);
      const auto left_id = known_id(left, vocabulary, what), right_id = known_id(right, vocabulary, what);
      merges.set(left_id, right_id, {rank++, known_id(left + right, vocabulary, what)});
    }
    return merges;
  }

  std::vector<AddedToken> read_added_tokens(const Json& json, const Vocabulary& vocabulary) const {
    if (!json.is_array()) reader_.fail("added_tokens must be an array, got ", reader_.shown_json(json));
    require_count(json, "added_tokens", max_tokens);
    std::vector<AddedToken> tokens;
    Vocabulary seen;
    auto next_id = vocabulary.size();  // further tokens follow the vocabulary, in their order
    for (const auto& token : json) {
      const auto& content = added_content(token);
      const auto what = "added_tokens: " + shown(content);
      if (seen.find(content)) reader_.fail(what, " must be there once, got it twice");
      seen.add(content);
      const auto known = vocabulary.find(content);
      const auto id = known ? static_cast<std::size_t>(*known) : next_id++;
      if (token.at("id") != id)
        reader_.fail(what, " must have the id ", id, ", got ", reader_.shown_json(token.at("id")));
      tokens.push_back({content, static_cast<TokenId>(id), reader_.flag(token, what, "normalized")});
    }
    return tokens;
  }

  const std::string& added_content(const Json& token) const {
    reader_.require_members(token, "added_tokens", {"id", "content", "normalized"},
                            {"special", "single_word", "lstrip", "rstrip"});
    const auto& content = reader_.text(token.at("content"), "added_tokens.content");
    require_size(content, "added_tokens");
    for (const auto* name : {"single_word", "lstrip", "rstrip"})
      if (reader_.flag(token, "added_tokens", name))
        reader_.fail("added_tokens: ", shown(content), " must not be ", name, ", which is not supported here");
    return content;
  }

  std::string where_;
  JsonReader reader_;
};

}  // namespace bloom
