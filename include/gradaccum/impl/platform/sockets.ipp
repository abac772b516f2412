// SPDX-License-Identifier: Apache-2.0
// Looks up addresses and binds sockets.
#pragma once

#include <gradaccum/detail/platform/sockets.hpp>

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>

#include <gradaccum/impl/begin.ipp>

namespace gradaccum::detail {

/// Returns the addresses of a host, null if it has none.
GRADACCUM_INLINE std::shared_ptr<const ::addrinfo> addresses_of(const std::string& host, const std::string& port,
                                                                int kind) {
  ::addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = kind;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return nullptr;
  return {found, ::freeaddrinfo};
}

/// Connects a datagram socket, which sends nothing.
GRADACCUM_INLINE std::string address_towards(const std::string& host) {
  const auto addresses = addresses_of(host, "9", SOCK_DGRAM);
  for (const auto* one = addresses.get(); one != nullptr; one = one->ai_next) {
    const int descriptor = ::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const std::shared_ptr<const void> closed(nullptr, [descriptor](auto) { ::close(descriptor); });
    ::sockaddr_storage own{};
    ::socklen_t length = sizeof own;
    std::array<char, NI_MAXHOST> text{};
    auto* const address = reinterpret_cast<::sockaddr*>(&own);
    if (::connect(descriptor, one->ai_addr, one->ai_addrlen) == 0 && ::getsockname(descriptor, address, &length) == 0 &&
        ::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0)
      return text.data();
  }
  return "";
}

GRADACCUM_INLINE int listening_socket(const std::string& host, std::uint16_t port) {
  const auto addresses = addresses_of(host, std::to_string(port), SOCK_STREAM);
  if (!addresses) return -1;
  const int descriptor = ::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(descriptor, addresses->ai_addr, addresses->ai_addrlen) == 0) return descriptor;
  ::close(descriptor);
  return -1;
}

}  // namespace gradaccum::detail

#undef GRADACCUM_INLINE
