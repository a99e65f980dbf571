// SPDX-License-Identifier: Apache-2.0
#include "rank_script/talk.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace gpustasis {
namespace {

constexpr int kLookMs = 100;              // how often criu is looked after
constexpr std::size_t kMaxAnswer = 16384; // bytes

void require_criu(pid_t criu) {
    if (::getppid() != criu)
        throw Error(Errc::gone, "criu has ended");
}

UniqueFd connect_to_agent() {
    UniqueFd sock(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!sock)
        throw io_error("cannot make a socket", errno);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, kSocket, sizeof address.sun_path - 1);
    if (::connect(sock.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
        throw io_error(std::string("no agent answers at ") + kSocket, errno);
    // Whoever decides here is root, as criu is: nobody else could have put a socket there, unless the way to
    // it is another's.
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(sock.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        throw io_error("cannot tell whose socket it is", errno);
    if (peer.uid != 0 && peer.uid != ::geteuid())
        throw Error(Errc::io, std::string(kSocket) + " is a socket of user " +
                                  std::to_string(peer.uid) + ", which is not root");
    return sock;
}

std::string read_answer(int sock, pid_t criu) {
    std::string text;
    while (text.find('\n') == std::string::npos) {
        pollfd waits{sock, POLLIN, 0};
        const int ready = ::poll(&waits, 1, kLookMs);
        require_criu(criu);
        if (ready <= 0)
            continue;
        char part[1024];
        const ssize_t count = ::read(sock, part, sizeof part);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0 || text.size() > kMaxAnswer)
            throw Error(Errc::io, "the agent has ended without an answer");
        text.append(part, static_cast<std::size_t>(count));
    }
    text.resize(text.find('\n'));
    return text;
}

} // namespace

Answer ask(const std::string& line, pid_t criu) {
    const UniqueFd sock = connect_to_agent();
    for (std::size_t sent = 0; sent < line.size();) {
        const ssize_t count =
            ::send(sock.get(), line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EINTR)
            throw io_error("the agent has ended without an answer", errno);
        sent += count > 0 ? static_cast<std::size_t>(count) : 0;
    }
    const std::string answer = read_answer(sock.get(), criu);
    if (answer == "go")
        return {.go = true, .reason = {}};
    if (answer.starts_with("no "))
        return {.go = false, .reason = answer.substr(3)};
    throw Error(Errc::io, "the agent has answered what this program does not know");
}

Answer ask_until_answered(const std::string& line, pid_t criu) {
    for (;;) {
        require_criu(criu);
        try {
            return ask(line, criu);
        } catch (const Error& e) {
            if (e.code() == Errc::gone)
                throw;
        }
        ::poll(nullptr, 0, kLookMs);
    }
}

} // namespace gpustasis
