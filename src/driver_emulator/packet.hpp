// SPDX-License-Identifier: Apache-2.0
/// One packet of a SOCK_SEQPACKET socket, perhaps with a descriptor. No memory is allocated: the
/// restore thread calls these while other threads are stopped and may hold malloc's lock.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <sys/types.h>
#include <sys/uio.h>

namespace gpustasis::emulator {

/// Sends the parts as one packet, with descriptor `fd` unless it is -1. Never raises SIGPIPE.
/// Returns false with errno set if it was not sent.
[[nodiscard]] bool send_packet(int socket, std::initializer_list<iovec> parts,
                               int fd = -1) noexcept;

template <typename T>
[[nodiscard]] bool send_struct(int socket, const T& message, int fd = -1) {
    return send_packet(socket, {{const_cast<T*>(&message), sizeof(T)}}, fd);
}

/// Receives one packet into `buffer`. A descriptor that came along goes to *fd (close-on-exec,
/// the caller's to close), or is closed if `fd` is null.
/// Returns its length, 0 at the end of the connection, -1 with errno; a packet that does not fit is
/// an error (EMSGSIZE).
[[nodiscard]] ssize_t receive_packet(int socket, void* buffer, std::size_t size,
                                     int* fd = nullptr) noexcept;

/// Receives a packet that must be exactly one T.
template <typename T>
[[nodiscard]] bool receive_struct(int socket, T& message, int* fd = nullptr) {
    return receive_packet(socket, &message, sizeof(T), fd) == static_cast<ssize_t>(sizeof(T));
}

/// Connects to the daemon at `path`. Returns a close-on-exec socket, or -1 with errno.
[[nodiscard]] int connect_daemon(const char* path) noexcept;

} // namespace gpustasis::emulator
