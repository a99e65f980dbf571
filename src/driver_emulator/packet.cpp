// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/packet.hpp"

#include <cerrno>
#include <cstring>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

union ControlBuffer { // room for one descriptor, aligned as the kernel wants it
    cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
};

} // namespace

bool send_packet(int socket, std::initializer_list<iovec> parts, int fd) noexcept {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.begin());
    message.msg_iovlen = parts.size();
    ControlBuffer control{};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    ssize_t sent = 0;
    do {
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent >= 0;
}

ssize_t receive_packet(int socket, void* buffer, std::size_t size, int* fd) noexcept {
    iovec part{buffer, size};
    ControlBuffer control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    ssize_t received = 0;
    do {
        received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (received < 0 && errno == EINTR);
    int came = -1;
    if (received >= 0) {
        const cmsghdr* header = CMSG_FIRSTHDR(&message);
        if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
            std::memcpy(&came, CMSG_DATA(header), sizeof came);
        }
    }
    if (received >= 0 && (message.msg_flags & MSG_TRUNC) != 0) {
        received = -1;
        errno = EMSGSIZE;
    }
    if (fd != nullptr && received >= 0) {
        *fd = came;
    } else if (came >= 0) {
        const int saved = errno;
        close(came);
        errno = saved;
    }
    return received;
}

int connect_daemon(const char* path) noexcept {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::size_t length = std::strlen(path);
    if (length >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    std::memcpy(address.sun_path, path, length + 1);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
        const int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

} // namespace gpustasis::emulator
