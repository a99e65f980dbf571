// SPDX-License-Identifier: Apache-2.0
#include "seal/key_source.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"
#include "seal/envelope.hpp"
#include "seal/private_key.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string_view>

namespace gpustasis::seal {
namespace {

constexpr std::string_view kDescriptor = "fd:";

} // namespace

DataKey read_record(Bytes envelope, int fd) {
    Secret record(room_for_record(envelope));
    std::size_t size = 0;
    while (size < record.size()) {
        const ssize_t got = ::read(fd, record.bytes().data() + size, record.size() - size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0 || (got < 0 && errno == EAGAIN))
            break;
        if (got < 0)
            throw io_error("read the key record", errno);
        size += static_cast<std::size_t>(got);
    }
    return open_record(envelope, record.bytes().first(size));
}

int key_descriptor(const std::string& source) noexcept {
    if (!source.starts_with(kDescriptor))
        return -1;
    int fd = -1;
    const char* const end = source.data() + source.size();
    const auto [at, error] = std::from_chars(source.data() + kDescriptor.size(), end, fd);
    return error == std::errc{} && at == end && fd > STDERR_FILENO ? fd : -1;
}

DataKey open_envelope(Bytes envelope, const std::string& source) {
    if (source.starts_with(kToken))
        throw Error(Errc::unsupported,
                    "private_key is a PKCS #11 URI, and no token is used from within criu: restore "
                    "with gpustasis restore, which has openssl use it, or hand the key record over "
                    "(\"fd:N\")");
    const int fd = key_descriptor(source);
    if (fd < 0)
        return unwrap(envelope, PrivateKey::from_file(source));
    const UniqueFd ours(fd); // nobody else is to read it
    // Whoever holds the other end of a pipe open does not hold this process up.
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
        throw io_error("read the key record from " + source, errno);
    return read_record(envelope, fd);
}

} // namespace gpustasis::seal
