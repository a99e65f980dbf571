// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/dump_signature.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/lineage.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/other_ways.hpp"
#include "seal/certificate.hpp"
#include "seal/signed_directory.hpp"

#include <fcntl.h>

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

namespace gpustasis {
namespace {

template <class Work>
auto named(const std::string& what, const Work& work) {
    try {
        return work();
    } catch (const Error& e) {
        throw Error(e, what + ": " + e.what());
    }
}

seal::Signer open_signer(const Config& config) {
    return named("sign",
                 [&] { return seal::Signer::from_files(config.sign, config.sign_certificate); });
}

} // namespace

seal::Trusted read_trusted(const Config& config) {
    seal::Trusted trusted;
    for (const std::string& path : config.trusted)
        named("trusted: certificate " + path, [&] {
            const UniqueFd fd = open_regular(AT_FDCWD, path);
            const std::uint64_t size = file_size(fd.get());
            if (size > seal::kMaxPemSize)
                throw Error(Errc::corrupt_data, "has " + std::to_string(size) + " bytes");
            trusted.add(read_part(fd.get(), 0, size));
        });
    return trusted;
}

DumpSignature::DumpSignature(const Config& config, int image_dir)
    : config_(config), image_dir_(image_dir) {
    refuse_pages_elsewhere(image_dir, "sign");
    named("sign", [&] { seal::remove_signed(image_dir); });
    const seal::Signer signer = open_signer(config);
    static_cast<void>(named("sign", [&] { return signer.sign(Bytes()); }));
    if (!signer.facts().warning.empty())
        host::warn("sign: the certificate " + signer.facts().warning);
    host::info("the checkpoint is signed by " + signer.facts().subject + ", " + signer.facts().key);
}

void DumpSignature::build_on(int parent) {
    named("sign: the parent " + directory_path(parent), [&] {
        if (config_.trusted.empty()) {
            parent_ = seal::read_statement_digest(parent);
            return;
        }
        parent_ = seal::read_signed(parent, read_trusted(config_), seal::Owners::any).digest;
    });
}

void DumpSignature::sign() {
    try {
        const seal::Signer signer = open_signer(config_);
        const std::vector<std::byte> statement = named("sign", [&] {
            return encode_statement(seal::make_statement(image_dir_, parent_, config_.threads));
        });
        named("sign", [&] { seal::write_signed(image_dir_, statement, signer.sign(statement)); });
        is_signed_ = true;
    } catch (const std::exception&) {
        withdraw();
        throw;
    }
}

void DumpSignature::withdraw() noexcept {
    is_signed_ = false;
    try {
        seal::remove_signed(image_dir_);
    } catch (const std::exception& e) {
        host::error(std::string("what this dump has left is no checkpoint: ") + e.what());
    }
}

} // namespace gpustasis
