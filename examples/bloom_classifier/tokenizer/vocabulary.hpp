// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "byte_pairs.hpp"

namespace bloom {

/// Maps the ids 0, 1, ... to tokens, and tokens to ids.
class Vocabulary {
 public:
  Vocabulary() = default;

  /// The tokens must be distinct.
  explicit Vocabulary(std::vector<std::string> tokens) : tokens_(std::move(tokens)) {
    ids_.reserve(tokens_.size());
    for (std::size_t i = 0; i < tokens_.size(); ++i) ids_.emplace(tokens_[i], static_cast<TokenId>(i));
  }

  std::size_t size() const { return tokens_.size(); }
  const std::string& token(TokenId id) const { return tokens_[static_cast<std::size_t>(id)]; }

  std::optional<TokenId> find(std::string_view token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }

  TokenId add(std::string token) {
    const auto id = static_cast<TokenId>(tokens_.size());
    ids_.emplace(token, id);
    tokens_.push_back(std::move(token));
    return id;
  }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, TokenId, Hash, std::equal_to<>> ids_;
};

}  // namespace bloom
