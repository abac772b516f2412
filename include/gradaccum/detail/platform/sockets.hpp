// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/build/inline.hpp>

#include <cstdint>
#include <string>

namespace gradaccum::detail {

/// Returns the address of this machine from which packets to `host` are sent; "" if none leads there. Sends nothing.
std::string address_towards(const std::string& host);

/// Returns a socket for a server on `host`; -1 if there is none, for example because the port is in use.
int listening_socket(const std::string& host, std::uint16_t port);

}  // namespace gradaccum::detail

#ifndef GRADACCUM_COMPILED
#include <gradaccum/impl/platform/sockets.ipp>
#endif
