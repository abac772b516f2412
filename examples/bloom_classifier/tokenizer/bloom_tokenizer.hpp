// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "added_tokens.hpp"
#include "byte_alphabet.hpp"
#include "byte_pairs.hpp"
#include "piece_cache.hpp"
#include "splitter.hpp"
#include "tokenizer_file.hpp"
#include "utf8.hpp"

namespace bloom {

/// The tokenizer of a BLOOM: byte-level BPE, with the ids that Python's `tokenizers` gives.
///
///     const auto tokenizer = BloomTokenizer::from_file("bloom-560m/tokenizer.json");
///     const auto ids = tokenizer.encode("A text of any language.", 1024);  // at most 1024 ids
///     const auto text = tokenizer.decode(ids);
///
/// Text is UTF-8; invalid bytes are read as U+FFFD. The file's `truncation` and `padding` are ignored, as in
/// `transformers`. Thread safe; each thread caches the ids of words.
class BloomTokenizer {
 public:
  /// @throws std::runtime_error naming the file, the requirement and the value, for other kinds of tokenizers.
  static BloomTokenizer from_file(const std::filesystem::path& tokenizer_json) {
    return BloomTokenizer(TokenizerFileReader(tokenizer_json).read());
  }

  explicit BloomTokenizer(TokenizerFile file);

  /// Returns the first `max_length` ids of the text; BLOOM adds no tokens at the beginning or end.
  std::vector<std::int64_t> encode(std::string_view text,
                                   std::size_t max_length = std::numeric_limits<std::size_t>::max()) const;

  /// Returns the text of these ids, special tokens included. Throws `std::out_of_range` for an invalid id.
  std::string decode(std::span<const std::int64_t> ids) const;

  /// Returns Python's `len(tokenizer)`, including added tokens. A model may have more embeddings.
  std::int64_t vocabulary_size() const { return static_cast<std::int64_t>(file_.vocabulary.size() + added_.size()); }

  /// Returns the id of a token as tokenizer.json writes it: "<pad>", or "Ġword" with a space before it.
  std::optional<std::int64_t> token_to_id(std::string_view token) const;

 private:
  void encode_piece(std::string_view piece, std::vector<TokenId>& ids) const;
  void encode_pieces(std::string_view text, PieceCache& cache, std::size_t max_length,
                     std::vector<std::int64_t>& ids) const;

  static std::uint64_t new_owner() {
    static std::atomic<std::uint64_t> count = 0;
    return ++count;
  }

  TokenizerFile file_;
  std::array<TokenId, 256> ids_of_bytes_{};
  AddedTokens verbatim_, normalized_;        // the second are matched in the text between the first
  Vocabulary added_;                         // tokens with ids after the model's vocabulary
  std::uint64_t cache_owner_ = new_owner();  // a copy has the same ids
};

inline BloomTokenizer::BloomTokenizer(TokenizerFile file) : file_(std::move(file)) {
  for (std::size_t byte = 0; byte < 256; ++byte)
    ids_of_bytes_[byte] = file_.vocabulary.find(byte_characters()[byte]).value_or(file_.unknown.value_or(-1));
  for (const auto& token : file_.added_tokens) {
    (token.normalized ? normalized_ : verbatim_).add(token.content, token.id);
    if (!file_.vocabulary.find(token.content)) added_.add(token.content);
  }
}

inline std::vector<std::int64_t> BloomTokenizer::encode(std::string_view text, std::size_t max_length) const {
  if (!is_utf8(text)) return encode(to_utf8(text), max_length);
  static thread_local PieceCache cache;
  std::vector<std::int64_t> ids;
  const auto use_token = [&](TokenId id) { ids.push_back(id); };
  const auto use_text = [&](std::string_view part) { encode_pieces(part, cache, max_length, ids); };
  verbatim_.split(
      text, [&](std::string_view part) { normalized_.split(part, use_text, use_token); }, use_token);
  if (ids.size() > max_length) ids.resize(max_length);
  return ids;
}

inline void BloomTokenizer::encode_pieces(std::string_view text, PieceCache& cache, std::size_t max_length,
                                          std::vector<std::int64_t>& ids) const {
  const auto encode = [this](std::string_view piece, std::vector<TokenId>& result) { encode_piece(piece, result); };
  while (!text.empty() && ids.size() < max_length) {
    const auto piece = next_piece(text);
    text.remove_prefix(piece.size());
    if (piece.size() <= PieceCache::longest_piece) {
      const auto& known = cache.ids_of(cache_owner_, piece, encode);
      ids.insert(ids.end(), known.begin(), known.end());
    } else {
      std::vector<TokenId> result;
      encode_piece(piece, result);
      ids.insert(ids.end(), result.begin(), result.end());
    }
  }
}

inline void BloomTokenizer::encode_piece(std::string_view piece, std::vector<TokenId>& ids) const {
  if (file_.ignore_merges)
    if (const auto id = file_.vocabulary.find(bytes_to_characters(piece))) return ids.push_back(*id);
  for (const char byte : piece)
    if (const auto id = ids_of_bytes_[static_cast<unsigned char>(byte)]; id != -1) ids.push_back(id);
  merge_pairs(ids, file_.merges);
}

inline std::string BloomTokenizer::decode(std::span<const std::int64_t> ids) const {
  std::string bytes;
  const auto size = static_cast<std::int64_t>(file_.vocabulary.size());
  for (const auto id : ids) {
    if (id < 0 || id >= vocabulary_size())
      throw std::out_of_range("BloomTokenizer: ids must be at least 0 and below " + std::to_string(vocabulary_size()) +
                              ", got " + std::to_string(id));
    bytes += id < size ? characters_to_bytes(file_.vocabulary.token(static_cast<TokenId>(id)))
                       : added_.token(static_cast<TokenId>(id - size));
  }
  return to_utf8(bytes);  // the ids may end within a character
}

inline std::optional<std::int64_t> BloomTokenizer::token_to_id(std::string_view token) const {
  if (const auto id = file_.vocabulary.find(token)) return *id;
  if (const auto id = added_.find(token)) return *id + static_cast<std::int64_t>(file_.vocabulary.size());
  return std::nullopt;
}

}  // namespace bloom
