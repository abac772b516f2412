// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string>

namespace gradaccum::detail {

/// Notes for a scope which operation of LibTorch's ran last on this thread.
class [[nodiscard]] OperationNames {
 public:
  OperationNames()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::FUNCTION}))) {
    last().clear();
  }
  OperationNames(const OperationNames&) = delete;
  OperationNames& operator=(const OperationNames&) = delete;
  ~OperationNames() { at::removeCallback(handle_); }

  static std::string& last() {
    static thread_local std::string name;
    return name;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& operation) {
    last() = operation.name();
    return nullptr;
  }

  at::CallbackHandle handle_;
};

}  // namespace gradaccum::detail
