// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <string_view>
#include <vector>

#include "byte_pairs.hpp"

namespace bloom {

/// Tokens that are matched before a text is split, also within words: "<pad>".
class AddedTokens {
 public:
  void add(std::string_view content, TokenId id) {
    begins_[static_cast<unsigned char>(content.front())] = true;
    std::size_t node = 0;
    for (const char byte : content) {
      const auto [child, is_new] = nodes_[node].children.try_emplace(byte, nodes_.size());
      node = child->second;
      if (is_new) nodes_.emplace_back();
    }
    nodes_[node].id = id;
  }

  /// Calls `use_token(id)` for each token in the text, in order, preferring the longest at each position, and
  /// `use_text(part)` for the text between them.
  template <class UseText, class UseToken>
  void split(std::string_view text, const UseText& use_text, const UseToken& use_token) const {
    std::size_t begin = 0, at = 0;
    while (at < text.size()) {
      const auto match = begins_[static_cast<unsigned char>(text[at])] ? longest(text.substr(at)) : Match();
      if (match.size == 0) {
        ++at;
        continue;
      }
      if (begin < at) use_text(text.substr(begin, at - begin));
      use_token(match.id);
      begin = at += match.size;
    }
    if (begin < at) use_text(text.substr(begin));
  }

 private:
  struct Node {
    std::map<char, std::size_t> children;
    TokenId id = -1;
  };
  struct Match {
    std::size_t size = 0;
    TokenId id = -1;
  };

  /// Returns the longest token at the beginning of the text.
  Match longest(std::string_view text) const {
    Match match;
    const Node* node = nodes_.data();
    for (std::size_t size = 0; size < text.size();) {
      const auto child = node->children.find(text[size]);
      if (child == node->children.end()) break;
      node = &nodes_[child->second], ++size;
      if (node->id != -1) match = {size, node->id};
    }
    return match;
  }

  std::vector<Node> nodes_ = std::vector<Node>(1);  // the first is the root
  std::array<bool, 256> begins_{};
};

}  // namespace bloom
