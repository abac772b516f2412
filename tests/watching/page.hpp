// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/run_page.hpp>
#include <gradaccum/detail/watching/page_template.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace testing {

/// A parsed page of a run. It must be the library's fixed text around JSON in printable ASCII without a `<`, so that a
/// browser finds the same elements for any JSON.
class Page {
 public:
  explicit Page(const std::string& text) {
    using namespace gradaccum::detail;
    if (!text.starts_with(page_before_json) || !text.ends_with(page_after_json))
      throw std::runtime_error("not the library's text: " + text.substr(0, 100));
    const auto size = text.size() - page_before_json.size() - page_after_json.size();
    const auto inside = text.substr(page_before_json.size(), size);
    const auto breaks_out = [](char c) { return c < ' ' || c > '~' || c == '<'; };
    if (std::any_of(inside.begin(), inside.end(), breaks_out)) throw std::runtime_error("can break out: " + inside);
    json_ = nlohmann::json::parse(inside);
  }

  const nlohmann::json& operator[](const std::string& name) const { return json_.at(name); }
  /// Returns `stopped: reason`.
  std::string state() const {
    const auto reason = json_.at("reason").get<std::string>();
    return json_.at("state").get<std::string>() + (reason.empty() ? "" : ": " + reason);
  }
  nlohmann::json number(const std::string& name) const { return row(json_.at("numbers"), name)[1]; }
  nlohmann::json setting(const std::string& name) const { return row(json_.at("settings"), name)[1]; }
  nlohmann::json tile(const std::string& name) const { return row(json_.at("tiles"), name)[1]; }
  /// Returns `[name, last value, pieces]`.
  nlohmann::json curve(const std::string& name, const std::string& run = "") const {
    for (auto& one : json_.at("runs"))
      if (one.at("name") == run) return row(one.at("curves"), name);
    throw std::runtime_error("no run " + run);
  }
  double last(const std::string& name, const std::string& run = "") const { return curve(name, run)[1]; }
  double lowest(const std::string& name, const std::string& run = "") const {
    double lowest = std::numeric_limits<double>::infinity();
    const auto found = curve(name, run);
    for (auto& piece : found[2]) lowest = std::min(lowest, piece[3].get<double>());
    return lowest;
  }
  double highest(const std::string& name, const std::string& run = "") const {
    double highest = -std::numeric_limits<double>::infinity();
    const auto found = curve(name, run);
    for (auto& piece : found[2]) highest = std::max(highest, piece[4].get<double>());
    return highest;
  }

 private:
  static nlohmann::json row(const nlohmann::json& rows, const std::string& name) {
    for (auto& one : rows)
      if (one.at(0) == name) return one;
    throw std::runtime_error("nothing is called " + name);
  }

  nlohmann::json json_;
};

/// Returns the number of points that a curve has been given.
inline std::int64_t points_of(const gradaccum::Curve& curve) {
  std::int64_t all = 0;
  for (auto& piece : curve.pieces()) all += piece.finite + piece.gaps;
  return all;
}

inline std::int64_t gaps_of(const gradaccum::Curve& curve) {
  std::int64_t all = 0;
  for (auto& piece : curve.pieces()) all += piece.gaps;
  return all;
}

}  // namespace testing
