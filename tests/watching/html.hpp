// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

/// A page taken apart, more strictly than a browser would: what is not in it cannot run.
namespace testing {

struct Tag {
  std::string name;  // with a slash where it ends an element
  std::map<std::string, std::string> attributes = {};
  std::string text = {};  // that comes after it
};

/// Throws where a tag is not written as `<name key="value">`, or ends what is not open.
class Html {
 public:
  explicit Html(const std::string& page) : page_(page) {
    expect("<!DOCTYPE html>\n");
    while (at_ < page_.size()) take_tag();
    if (!open_.empty()) throw std::runtime_error("not ended: " + open_.back());
  }

  const std::vector<Tag>& tags() const { return tags_; }
  std::vector<Tag> all(const std::string& name) const {
    std::vector<Tag> found;
    for (auto& tag : tags_)
      if (tag.name == name) found.push_back(tag);
    return found;
  }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (auto& tag : tags_) names.insert(tag.name);
    return names;
  }
  std::set<std::string> attributes() const {
    std::set<std::string> names;
    for (auto& tag : tags_)
      for (auto& [name, value] : tag.attributes) names.insert(name);
    return names;
  }
  /// The first element of this class.
  std::string text_of_class(const std::string& kind) const {
    for (auto& tag : tags_)
      if (const auto found = tag.attributes.find("class"); found != tag.attributes.end() && found->second == kind)
        return tag.text;
    throw std::runtime_error("no element of class " + kind);
  }
  /// `data-value` of the number of this name.
  std::string number(const std::string& name) const { return cell({{"data-name", name}}, "td"); }
  /// The exact last, lowest or highest number of a curve.
  std::string curve(const std::string& name, const std::string& what = "last", const std::string& run = "") const {
    return cell({{"data-curve", name}, {"data-run", run}}, what);
  }

 private:
  std::string cell(const std::map<std::string, std::string>& row, const std::string& what) const {
    for (std::size_t i = 0; i < tags_.size(); ++i) {
      const auto has = [this, i](auto& item) {
        const auto found = tags_[i].attributes.find(item.first);
        return found != tags_[i].attributes.end() && found->second == item.second;
      };
      if (tags_[i].name != "tr" || !std::all_of(row.begin(), row.end(), has)) continue;
      for (auto j = i; tags_[j].name != "/tr"; ++j)
        if (tags_[j].name == "td" && (what == "td" || tags_[j].attributes.at("data-what") == what))
          return tags_[j].attributes.at("data-value");
    }
    throw std::runtime_error("no number " + row.begin()->second);
  }

  void expect(const std::string& text) {
    if (page_.compare(at_, text.size(), text) != 0)
      throw std::runtime_error("not " + text + " but " + page_.substr(at_, 60));
    at_ += text.size();
  }
  std::string take_until(const std::string& any) {
    const auto end = std::min(page_.find_first_of(any, at_), page_.size());
    auto text = page_.substr(at_, end - at_);
    at_ = end;
    return text;
  }

  void take_tag() {
    expect("<");
    Tag tag{.name = take_until(" >")};
    while (page_.at(at_) == ' ') {
      ++at_;
      const auto name = take_until("=");
      expect("=\"");
      if (!tag.attributes.emplace(name, take_until("\"")).second) throw std::runtime_error("twice: " + name);
      expect("\"");
    }
    const bool ends_itself = page_.at(at_) == '/' || (tag.name.ends_with('/') && tag.name.size() > 1);
    if (page_.at(at_) == '/') ++at_;
    expect(">");
    const auto style_end = page_.find("</style>", at_);
    tag.text = tag.name == "style" ? page_.substr(at_, style_end - at_) : take_until("<");
    if (tag.name == "style") at_ = style_end;
    if (tag.name.starts_with('/'))
      end(tag.name.substr(1));
    else if (!ends_itself && tag.name != "meta" && tag.name != "wbr")
      open_.push_back(tag.name);
    tags_.push_back(std::move(tag));
  }
  void end(const std::string& name) {
    if (open_.empty() || open_.back() != name) throw std::runtime_error("ended: " + name);
    open_.pop_back();
  }

  std::string page_;
  std::size_t at_ = 0;
  std::vector<std::string> open_;
  std::vector<Tag> tags_;
};

}  // namespace testing
