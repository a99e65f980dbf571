// SPDX-License-Identifier: Apache-2.0
/// What `trusted` asks of a restore: a signature of everything that is read, by one who is trusted.
#pragma once

#include "core/lineage.hpp"
#include "cuda_plugin/config.hpp"
#include "seal/signature.hpp"
#include "seal/statement.hpp"

#include <cstdint>
#include <optional>

namespace gpustasis {

class SignatureCheck {
public:
    /// All outlive it.
    SignatureCheck(const Config& config, int image_dir) : config_(config), image_dir_(image_dir) {}

    /// Before anything in the directory is believed; nothing if `config` names nobody. Throws Error: corrupt_data
    /// unless all in it is signed by one who is trusted; bad_argument if others can write there; unsupported if
    /// criu takes pages from elsewhere; io.
    void check_own();

    /// After check_own(): the same of those that it is built on, as many as its manifest says, but only of what is read
    /// of them. Throws as check_own().
    void check_chain(Lineage& lineage, std::uint32_t length);

private:
    void tell(const seal::SignedBy& by, const std::string& whose) const;

    const Config& config_;
    int image_dir_;
    seal::Trusted trusted_;
    std::optional<seal::Sha256> parent_; ///< of the checkpoint checked last
};

} // namespace gpustasis
