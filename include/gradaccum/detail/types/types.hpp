// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/libtorch.hpp>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <typeinfo>

namespace gradaccum {

/// A module, a `ModuleHolder`, a `shared_ptr` to a module, or any other pointer to one.
template <class M>
concept model = std::derived_from<std::remove_cvref_t<M>, torch::nn::Module> || requires(M& model) {
  { *model } -> std::convertible_to<const torch::nn::Module&>;
};

/// A count in an option. Accepts every integer type, so `{.steps = files.size()}` is not a narrowing conversion.
class Count {
 public:
  template <std::convertible_to<std::int64_t> Number>
  requires(!std::floating_point<Number> && !std::same_as<Number, bool>) constexpr Count(
      Number value)  // NOLINT(google-explicit-constructor): an option is a plain number
      : value_(static_cast<std::int64_t>(value)) {}

  constexpr operator std::int64_t() const { return value_; }  // NOLINT(google-explicit-constructor)

 private:
  std::int64_t value_;
};

}  // namespace gradaccum

namespace gradaccum::detail {

template <class M>
concept plain_module = std::derived_from<std::remove_cvref_t<M>, torch::nn::Module>;

/// Returns the module that `model` is or points to.
template <model Model>
torch::nn::Module& module_of(Model& model) {
  if constexpr (plain_module<Model>) {
    return model;
  } else {
    if constexpr (requires { model == nullptr; })
      TORCH_CHECK(!(model == nullptr), "the model pointer must not be null; was it moved from?");
    return *model;
  }
}

/// Returns a class's name without namespaces and template arguments: `SGD`.
inline std::string name_of_class(const std::type_info& type) {
  const auto name = c10::demangle(type.name());
  const auto end = name.find('<');
  const auto colon = name.rfind(':', end);
  return name.substr(colon == std::string::npos ? 0 : colon + 1);
}

/// Returns the name of an object's dynamic class.
template <class T>
std::string type_name(const T& object) {
  return name_of_class(typeid(object));
}

/// Joins its arguments to a text like c10::str, but equally in every locale, for texts that are stored or compared.
template <class... Parts>
std::string plain_text(const Parts&... parts) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  (stream << ... << parts);
  return stream.str();
}

/// Returns a stream that reads a result of plain_text.
inline std::istringstream plain_stream(const std::string& text) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  return stream;
}

/// Returns a message without the stack trace that follows it in LibTorch's errors.
inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Returns the result of `run`. Adds the text of `context` to an error of LibTorch that contains `says`, unless null.
auto explaining(const char* says, const auto& context, const auto& run) try {
  return run();
} catch (c10::Error& error) {
  if (says && std::string_view(error.what_without_backtrace()).find(says) != std::string_view::npos)
    error.add_context(context());
  throw;
}

/// Returns the result of `start`, which starts a thread for `who`. Explains the error if the system has no threads
/// left, for which the standard library's message is only "Resource temporarily unavailable".
auto starting_thread(const char* who, const auto& start) try {
  return start();
} catch (const std::system_error& error) {
  TORCH_CHECK(error.code() != std::errc::resource_unavailable_try_again, who,
              ": must start a thread, but the system has none left (", error.what(),
              "): raise the limit of processes (ulimit -u, or pids.max of a container), or start fewer");
  throw;
}

}  // namespace gradaccum::detail
