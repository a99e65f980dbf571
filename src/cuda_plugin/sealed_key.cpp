// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/sealed_key.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "seal/envelope.hpp"
#include "seal/key_source.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

namespace gpustasis {

bool holds_sealed(int dir) {
    return ::faccessat(dir, seal::kEnvelopeName, F_OK, AT_SYMLINK_NOFOLLOW) == 0 ||
           !seal::list_sealed_files(dir).empty();
}

seal::DataKey open_sealed_key(int dir, const std::string& source, const std::string& what) {
    if (source.empty())
        throw Error(Errc::bad_argument,
                    what + " is sealed, and the configuration names no private_key that opens it; "
                           "`gpustasis restore` takes one with --key");
    try {
        const UniqueFd fd = open_regular(dir, seal::kEnvelopeName);
        const std::uint64_t size = file_size(fd.get());
        if (size > seal::kMaxEnvelopeSize)
            throw Error(Errc::corrupt_data, "has " + std::to_string(size) + " bytes");
        return seal::open_envelope(read_part(fd.get(), 0, size), source);
    } catch (const Error& e) {
        throw Error(e, std::string(seal::kEnvelopeName) + ": " + e.what());
    }
}

} // namespace gpustasis
