// SPDX-License-Identifier: Apache-2.0
/// OpenSSL's objects, which free themselves, and its errors. Included by what is in src/seal only.
#pragma once

#include "core/bytes.hpp"
#include "core/error.hpp"

#include <openssl/bio.h>
#include <openssl/cms.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace gpustasis::seal {

template <auto Free>
struct Freed {
    template <class T>
    void operator()(T* object) const noexcept {
        Free(object);
    }
};

struct FreeAllocated {
    void operator()(void* bytes) const noexcept { OPENSSL_free(bytes); }
};
template <class T>
using Allocated = std::unique_ptr<T, FreeAllocated>;

using Bio = std::unique_ptr<BIO, Freed<&BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Freed<&X509_free>>;
using Cipher = std::unique_ptr<EVP_CIPHER, Freed<&EVP_CIPHER_free>>;
using CipherContext = std::unique_ptr<EVP_CIPHER_CTX, Freed<&EVP_CIPHER_CTX_free>>;
using Cms = std::unique_ptr<CMS_ContentInfo, Freed<&CMS_ContentInfo_free>>;
using DigestContext = std::unique_ptr<EVP_MD_CTX, Freed<&EVP_MD_CTX_free>>;
using Kdf = std::unique_ptr<EVP_KDF, Freed<&EVP_KDF_free>>;
using KdfContext = std::unique_ptr<EVP_KDF_CTX, Freed<&EVP_KDF_CTX_free>>;
using Pkey = std::unique_ptr<EVP_PKEY, Freed<&EVP_PKEY_free>>;

/// Makes OpenSSL ready, once for the process: without its configuration file, which could have code
/// loaded into a program that runs as root, and with locked memory for private keys. Throws Error: io
/// (KeyMemoryError) if memory cannot be locked.
void start_openssl();

/// "<what>: <the reason that OpenSSL gives>". Empties OpenSSL's queue of errors.
[[nodiscard]] Error crypto_error(Errc code, const std::string& what);

/// Throws crypto_error(Errc::io, `what`) unless `done` is 1. For what fails only for want of memory or of
/// an algorithm.
void require(int done, const char* what);

/// A BIO that reads `bytes`, which outlive it. Throws Error: io.
Bio reader_of(Bytes bytes);

inline unsigned char* raw(MutBytes bytes) noexcept {
    return reinterpret_cast<unsigned char*>(bytes.data());
}
inline const unsigned char* raw(Bytes bytes) noexcept {
    return reinterpret_cast<const unsigned char*>(bytes.data());
}

} // namespace gpustasis::seal
