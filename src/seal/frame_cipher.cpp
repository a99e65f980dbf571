// SPDX-License-Identifier: Apache-2.0
#include "seal/frame_cipher.hpp"

#include "core/error.hpp"
#include "seal/openssl.hpp"

#include <array>
#include <cstring>
#include <string>

namespace gpustasis::seal {
namespace {

using Nonce = std::array<unsigned char, 12>;

/// Four zero bytes, then the number, little-endian.
Nonce nonce_of(std::uint64_t number) {
    Nonce nonce{};
    std::memcpy(nonce.data() + 4, &number, sizeof number);
    return nonce;
}

/// Looked up once: each fetch takes locks.
const EVP_CIPHER* aes_256_gcm() {
    static const Cipher cipher(EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr));
    if (!cipher)
        throw crypto_error(Errc::io, "cannot use AES-256-GCM");
    return cipher.get();
}

/// For one frame: its round keys are wiped when it goes. `sealing`: 1, or 0 to open.
CipherContext context_for(const Secret& key, std::uint64_t number, int sealing) {
    CipherContext made(EVP_CIPHER_CTX_new());
    if (!made)
        throw crypto_error(Errc::io, "cannot begin a frame");
    const Nonce nonce = nonce_of(number);
    require(EVP_CipherInit_ex2(made.get(), aes_256_gcm(), raw(key.bytes()), nonce.data(), sealing,
                               nullptr),
            "cannot begin a frame");
    return made;
}

void add(const CipherContext& context, Bytes in, unsigned char* out) {
    if (in.empty())
        return;
    int done = 0;
    require(EVP_CipherUpdate(context.get(), out, &done, raw(in), static_cast<int>(in.size())),
            "cannot go on with a frame");
}

void check_sizes(std::size_t plain, std::size_t sealed, std::size_t associated) {
    if (plain > kMaxFrameSize || associated > kMaxFrameSize || sealed != plain + kTagSize)
        throw Error(Errc::bad_argument, "a frame of " + std::to_string(plain) +
                                            " bytes does not become one of " +
                                            std::to_string(sealed));
}

} // namespace

FrameNumber FrameSealer::take() {
    const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    if (number >= kMaxFrames)
        throw Error(Errc::bad_argument, "more frames than a key may seal");
    return FrameNumber(number);
}

void FrameSealer::seal(FrameNumber&& number, Bytes associated, Bytes plain, MutBytes sealed) const {
    const FrameNumber used(std::move(number)); // whatever happens next
    if (!used.unused_)
        throw Error(Errc::bad_argument, "frame " + std::to_string(used.value()) +
                                            " was sealed before, and a nonce is used once");
    check_sizes(plain.size(), sealed.size(), associated.size());
    const CipherContext context = context_for(key_, used.value(), 1);
    add(context, associated, nullptr);
    add(context, plain, raw(sealed));
    int rest = 0;
    unsigned char* const tag = raw(sealed) + plain.size();
    require(EVP_CipherFinal_ex(context.get(), tag, &rest), "cannot end a frame");
    require(EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, kTagSize, tag),
            "cannot end a frame");
}

void FreshKey::use_up(std::uint32_t file_id) {
    if (only_ && *only_ != file_id)
        throw Error(Errc::bad_argument, "file " + std::to_string(file_id) +
                                            " is not the one that was left to this process, " +
                                            std::to_string(*only_));
    if (!given_.insert(file_id).second)
        throw Error(Errc::bad_argument,
                    "file " + std::to_string(file_id) + " has its sealer, here or elsewhere");
}

void FreshKey::leave(std::uint32_t file_id) {
    use_up(file_id);
}

FrameSealer FreshKey::sealer(std::uint32_t file_id, Bytes header) {
    use_up(file_id);
    return FrameSealer(frame_key(key_, file_id, header));
}

void FrameOpener::open(std::uint64_t number, Bytes associated, Bytes sealed, MutBytes plain) const {
    check_sizes(plain.size(), sealed.size(), associated.size());
    const CipherContext context = context_for(key_, number, 0);
    add(context, associated, nullptr);
    try {
        add(context, sealed.first(plain.size()), raw(plain));
        // OpenSSL takes the tag as if it wrote it.
        auto* const tag = const_cast<std::byte*>(sealed.data()) + plain.size();
        require(EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_SET_TAG, kTagSize, tag),
                "cannot check a frame");
        int rest = 0;
        std::array<unsigned char, kTagSize> nothing{};
        if (EVP_CipherFinal_ex(context.get(), nothing.data(), &rest) != 1)
            throw crypto_error(Errc::corrupt_data,
                               "frame " + std::to_string(number) + " is damaged, moved or forged");
    } catch (...) {
        wipe(plain); // no byte that is not authentic leaves here
        throw;
    }
}

} // namespace gpustasis::seal
