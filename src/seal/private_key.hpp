// SPDX-License-Identifier: Apache-2.0
/// A private key from a PEM file.
#pragma once

#include "core/bytes.hpp"

#include <memory>
#include <string>
#include <vector>

struct evp_pkey_st;

namespace gpustasis::seal {

/// RSA, EC or Ed25519. Its secret numbers are in OpenSSL's locked memory, and wiped when it goes.
class PrivateKey {
public:
    /// From a regular file, also through links, that belongs to root or to this user and that nobody else may
    /// read or write: looked at once it is open. Throws Error: io (EACCES if others have access); corrupt_data
    /// for what is no private key in PEM, or one under a password; bad_argument for kinds not used.
    static PrivateKey from_file(const std::string& path);

    /// The one certificate in that file, beside the key, as PEM. Throws Error as from_file(); corrupt_data if there
    /// is none, or several.
    static std::vector<std::byte> certificate_beside(const std::string& path);

    /// "RSA 3072", "EC P-256", "Ed25519".
    const std::string& kind() const noexcept { return kind_; }
    /// OpenSSL's object, which stays this one's.
    evp_pkey_st* get() const noexcept { return key_.get(); }

private:
    struct Free {
        void operator()(evp_pkey_st* key) const noexcept;
    };
    explicit PrivateKey(evp_pkey_st* key);

    std::unique_ptr<evp_pkey_st, Free> key_;
    std::string kind_;
};

} // namespace gpustasis::seal
