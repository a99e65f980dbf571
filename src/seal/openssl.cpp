// SPDX-License-Identifier: Apache-2.0
#include "seal/openssl.hpp"

#include "seal/errors.hpp"

#include <openssl/crypto.h>
#include <openssl/err.h>

#include <cerrno>
#include <limits>
#include <mutex>

namespace gpustasis::seal {
namespace {

// Secret numbers of a few private keys: one of RSA with 16384 bits takes 10 KiB. Below the 64 KiB
// that an ordinary user may lock.
constexpr std::size_t kLockedHeap = 32U << 10;
constexpr int kSmallestPiece = 32; // bytes

void start_once() {
    if (OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG, nullptr) != 1)
        throw crypto_error(Errc::io, "cannot start OpenSSL");
    if (CRYPTO_secure_malloc_init(kLockedHeap, kSmallestPiece) != 1)
        throw KeyMemoryError(io_error("cannot lock memory for private keys (RLIMIT_MEMLOCK; raise "
                                      "it, as with `ulimit -l 1024`)",
                                      ENOMEM));
}

} // namespace

void start_openssl() {
    static std::once_flag started;
    std::call_once(started, start_once);
}

Error crypto_error(Errc code, const std::string& what) {
    const unsigned long last = ERR_peek_last_error();
    const char* reason = last == 0 ? nullptr : ERR_reason_error_string(last);
    ERR_clear_error();
    return {code, reason == nullptr ? what : what + ": " + reason};
}

void require(int done, const char* what) {
    if (done != 1)
        throw crypto_error(Errc::io, what);
}

Bio reader_of(Bytes bytes) {
    if (bytes.size() > std::numeric_limits<int>::max())
        throw Error(Errc::bad_argument, "more than OpenSSL reads at once");
    const void* const data = bytes.empty() ? "" : static_cast<const void*>(bytes.data());
    Bio bio(BIO_new_mem_buf(data, static_cast<int>(bytes.size())));
    if (!bio)
        throw crypto_error(Errc::io, "cannot read from memory");
    return bio;
}

} // namespace gpustasis::seal
