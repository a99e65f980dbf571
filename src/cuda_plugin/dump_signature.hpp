// SPDX-License-Identifier: Apache-2.0
/// What `sign` asks of a dump: a statement of all of its files, signed when they are complete.
#pragma once

#include "cuda_plugin/config.hpp"
#include "seal/signature.hpp"
#include "seal/statement.hpp"

#include <optional>

namespace gpustasis {

/// The certificates that config.trusted names. Throws Error, naming the file: io, corrupt_data, bad_argument.
seal::Trusted read_trusted(const Config& config);

class DumpSignature {
public:
    /// While the tasks still run: signs something, so that what is wrong is known now, and warns of dates. The key
    /// is read again by sign(), and in no memory until then. `image_dir`: nothing of an earlier signature stays
    /// there. Throws Error: unsupported if criu is asked for what cannot be signed; io, corrupt_data, bad_argument.
    DumpSignature(const Config& config, int image_dir);

    /// While the tasks still run: the dump is built on the checkpoint in `parent`. Throws Error: bad_argument if that
    /// is not signed, or by none of config.trusted, where those are named.
    void build_on(int parent);

    /// Every file of the dump is in its directory. On an exception there is no signature. Throws Error.
    void sign();
    bool is_signed() const noexcept { return is_signed_; }
    /// The dump has failed after all.
    void withdraw() noexcept;

private:
    const Config& config_;
    int image_dir_;
    std::optional<seal::Sha256> parent_;
    bool is_signed_ = false;
};

} // namespace gpustasis
