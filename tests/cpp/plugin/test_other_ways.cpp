// SPDX-License-Identifier: Apache-2.0
// What criu may be told that takes pages elsewhere, and how that is seen.
#include "check.hpp"
#include "pagemap.hpp"
#include "sample.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/other_ways.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <string>
#include <string_view>

using namespace gpustasis;
using namespace std::string_view_literals;

namespace {

void words_are_taken_as_criu_takes_them() {
    CHECK(asks_for("criu\0dump\0--page-server\0"sv, "--page-server"));
    CHECK(asks_for("criu\0dump\0--page-s\0-t\0005\0"sv, "--page-server"));
    CHECK(asks_for("criu\0dump\0--lazy"sv, "--lazy-pages"));
    CHECK(asks_for("criu\0--str\0dump\0"sv, "--stream"));
    CHECK(!asks_for("criu\0dump\0--page-servers\0"sv, "--page-server"));
    CHECK(!asks_for("criu\0dump\0-t\0005\0--leave-running\0"sv, "--lazy-pages"));
    CHECK(!asks_for("--lazy-pages\0dump\0"sv, "--lazy-pages")); // the program
    CHECK(!asks_for("criu\0dump\0--\0--lazy-pages\0"sv, "--lazy-pages"));
    CHECK(!asks_for(""sv, "--lazy-pages") && !asks_for("criu"sv, "--lazy-pages"));
}

UniqueFd listen_at(const std::string& path) {
    UniqueFd listening(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    CHECK(path.size() < sizeof address.sun_path);
    path.copy(address.sun_path, path.size());
    CHECK(::bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) ==
          0);
    return listening;
}

void sockets_of_helpers_are_seen() {
    const sample::TempDir images;
    const sample::TempDir work;
    CHECK(::chdir(work.path().c_str()) == 0);
    refuse_pages_elsewhere(images.fd(), "sign");
    refuse_pages_from_elsewhere(images.fd(), "trusted");
    {
        const UniqueFd streamer = listen_at(images.path("streamer-serve.sock"));
        refuse_pages_elsewhere(images.fd(), "sign");
        CHECK_THROWS(Errc::unsupported, refuse_pages_from_elsewhere(images.fd(), "trusted"));
        CHECK(::unlink(images.path("streamer-serve.sock").c_str()) == 0);
    }
    {
        const UniqueFd daemon = listen_at("lazy-pages.socket");
        refuse_pages_elsewhere(images.fd(), "sign");
        CHECK_THROWS(Errc::unsupported, refuse_pages_from_elsewhere(images.fd(), "trusted"));
    }
    const UniqueFd streamer = listen_at(images.path("streamer-capture.sock"));
    CHECK_THROWS(Errc::unsupported, refuse_pages_elsewhere(images.fd(), "sign"));
}

void a_connection_for_pages_is_seen() {
    const sample::TempDir images;
    const UniqueFd connection(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(connection);
    refuse_pages_elsewhere(images.fd(), "sign");
    const int corked = 1;
    CHECK(::setsockopt(connection.get(), IPPROTO_TCP, TCP_CORK, &corked, sizeof corked) == 0);
    CHECK_THROWS(Errc::unsupported, refuse_pages_elsewhere(images.fd(), "sign"));
}

void pages_that_are_not_there_are_missed() {
    const sample::TempDir images;
    const auto require = [&](const sample::Buffer& pagemap) {
        sample::write_file(images.fd(), "pagemap-7.img", pagemap);
        require_all_pages(images.fd(), {"core-7.img", "pagemap-7.img"});
    };
    CHECK_THROWS(Errc::unsupported, require_all_pages(images.fd(), {"core-7.img"}));
    using sample::pagemap;
    require(pagemap({}));
    require(pagemap({4, 6, 4}));                                  // present, and what could be lazy
    CHECK_THROWS(Errc::unsupported, require(pagemap({4, 2, 4}))); // lazy, and not there
    CHECK_THROWS(Errc::unsupported, require(pagemap({4, 1})));    // in a parent
    const auto require_chain = [&](const sample::Buffer& image) {
        sample::write_file(images.fd(), "pagemap-7.img", image);
        require_all_pages(images.fd(), {"pagemap-7.img"}, InParent::there);
    };
    CHECK_THROWS(Errc::unsupported, require_chain(pagemap({4, 1}))); // without criu's link to one
    CHECK(::symlinkat("../1", images.fd(), "parent") == 0);
    require_chain(pagemap({4, 1}));
    CHECK_THROWS(Errc::unsupported, require_chain(pagemap({4, 2, 1})));
    CHECK_THROWS(Errc::unsupported, require(pagemap({4, 1})));
    for (std::size_t size = 1; size < pagemap({4, 6}).size(); ++size) {
        sample::Buffer cut = pagemap({4, 6});
        cut.resize(size);
        const bool is_whole = size == pagemap({}).size() || size == pagemap({4}).size();
        if (!is_whole)
            CHECK_THROWS(Errc::corrupt_data, require(cut));
    }
    sample::Buffer other = pagemap({4});
    other[4] ^= std::byte{1};
    CHECK_THROWS(Errc::corrupt_data, require(other));
}

} // namespace

int main() {
    words_are_taken_as_criu_takes_them();
    sockets_of_helpers_are_seen();
    a_connection_for_pages_is_seen();
    pages_that_are_not_there_are_missed();
}
