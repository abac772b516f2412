// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "json/json_reader.hpp"

namespace bloom {

/// Reads values from a config.json. A missing or null name keeps the value; other names are ignored.
class ConfigReader {
 public:
  using Json = nlohmann::json;

  /// Both arguments must outlive the reader.
  ConfigReader(const Json& json, const JsonReader& reader) : json_(json), reader_(reader) {
    reader_.require_object(json, "the file");
  }

  template <class Value>
  void read(Value& value, const std::string& name) const {
    if (const auto* found = find(name)) assign(value, *found, name);
  }

  /// Reads one of two names that files use.
  template <class Value>
  void read(Value& value, const std::string& name, const std::string& alias) const {
    const auto *found = find(name), *other = find(alias);
    if (found && other && *found != *other)
      reader_.fail(name, " and ", alias, " must agree, got ", reader_.shown_json(*found), " and ",
                   reader_.shown_json(*other));
    if (found || other) assign(value, found ? *found : *other, name);
  }

  /// Reads the labels from id2label, with their names unless these are transformers' defaults; else from num_labels.
  void read_labels(std::int64_t& count, std::vector<std::string>& names) const {
    read(count, "num_labels");
    const auto* labels = find("id2label");
    if (!labels) return;
    reader_.require_object(*labels, "id2label");
    const auto size = static_cast<std::int64_t>(labels->size());
    if (find("num_labels") && count != size)
      reader_.fail("num_labels must be the size of id2label, ", size, ", got ", count);
    count = size;
    bool are_own = false;
    for (std::int64_t label = 0; label < size; ++label) {
      const auto number = std::to_string(label);
      if (!labels->contains(number)) reader_.fail("id2label must have the numbers from 0 on, but has no ", number);
      names.push_back(reader_.text(labels->at(number), "id2label"));
      are_own |= names.back() != "LABEL_" + number;
    }
    if (!are_own) names.clear();
  }

  void require_text(const std::string& name, const std::string& text, bool if_absent = false) const {
    const auto* found = find(name);
    if (found ? *found == text : if_absent) return;
    reader_.fail(name, " must be ", shown(text), ", got ", found ? reader_.shown_json(*found) : "none");
  }

 private:
  const Json* find(const std::string& name) const {
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  template <class Value>
  void assign(Value& value, const Json& json, const std::string& name) const {
    if constexpr (std::is_same_v<Value, bool>)
      value = reader_.flag(json, name);
    else if constexpr (std::is_same_v<Value, double>)
      value = reader_.number(json, name);
    else
      value = reader_.whole_number(json, name);
  }

  const Json& json_;
  const JsonReader& reader_;
};

}  // namespace bloom
