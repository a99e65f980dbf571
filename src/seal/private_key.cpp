// SPDX-License-Identifier: Apache-2.0
#include "seal/private_key.hpp"

#include "core/file.hpp"
#include "seal/certificate.hpp"
#include "seal/openssl.hpp"
#include "seal/secret.hpp"

#include <fcntl.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace gpustasis::seal {
namespace {

constexpr mode_t kOthers = 077;

Secret read_private(const std::string& path) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0)
        throw io_error("cannot open the private key " + path, errno);
    if (!S_ISREG(status.st_mode))
        throw Error(Errc::corrupt_data, "private key " + path + " is no ordinary file");
    if ((status.st_uid != 0 && status.st_uid != ::geteuid()) || (status.st_mode & kOthers) != 0)
        throw io_error("private key " + path + " belongs to user " + std::to_string(status.st_uid) +
                           ", or others have access to it; make it root's or yours, with mode 0600 "
                           "(chmod 600)",
                       EACCES);
    if (status.st_size <= 0 || static_cast<std::size_t>(status.st_size) > kMaxPemSize)
        throw Error(Errc::corrupt_data,
                    "private key " + path + " has " + std::to_string(status.st_size) + " bytes");
    Secret content(static_cast<std::size_t>(status.st_size));
    read_at(fd.get(), 0, content.bytes());
    return content;
}

/// Where a password would be asked for: `asked` says that.
int note_password(char* /*buffer*/, int /*size*/, int /*writing*/, void* asked) {
    *static_cast<bool*>(asked) = true;
    return -1;
}

} // namespace

void PrivateKey::Free::operator()(evp_pkey_st* key) const noexcept {
    EVP_PKEY_free(key);
}

PrivateKey::PrivateKey(evp_pkey_st* key) : key_(key), kind_(key_kind(key)) {}

PrivateKey PrivateKey::from_file(const std::string& path) {
    start_openssl();
    const Secret content = read_private(path);
    const Bio bio = reader_of(content.bytes());
    bool locked = false;
    evp_pkey_st* const key = PEM_read_bio_PrivateKey(bio.get(), nullptr, &note_password, &locked);
    if (key == nullptr && locked)
        throw crypto_error(Errc::corrupt_data,
                           "private key " + path +
                               " is under a password, which nobody is asked for");
    if (key == nullptr)
        throw crypto_error(Errc::corrupt_data, path + " holds no private key in PEM");
    try {
        return PrivateKey(key);
    } catch (const Error& error) {
        throw Error(error, "private key " + path + ": " + error.what());
    }
}

// Only that part of the text is given away: what reads PEM would copy the key past on its way.
std::vector<std::byte> PrivateKey::certificate_beside(const std::string& path) {
    constexpr std::string_view begin = "-----BEGIN CERTIFICATE-----";
    constexpr std::string_view end = "-----END CERTIFICATE-----";
    const Secret content = read_private(path);
    const std::string_view text(reinterpret_cast<const char*>(content.bytes().data()),
                                content.size());
    const std::size_t first = text.find(begin);
    const std::size_t last = first == std::string_view::npos ? first : text.find(end, first);
    if (last == std::string_view::npos)
        throw Error(Errc::corrupt_data, path + " holds no certificate beside the private key");
    if (text.find(begin, first + begin.size()) != std::string_view::npos)
        throw Error(Errc::corrupt_data, path + " holds more than one certificate");
    const Bytes found = content.bytes().subspan(first, last + end.size() - first);
    return {found.begin(), found.end()};
}

} // namespace gpustasis::seal
