// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/signature_check.hpp"

#include "core/error.hpp"
#include "cuda_plugin/dump_signature.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/other_ways.hpp"
#include "seal/signed_directory.hpp"

#include <string>

namespace gpustasis {

void SignatureCheck::tell(const seal::SignedBy& by, const std::string& whose) const {
    const std::string when = by.date.empty() ? "" : ", on " + by.date + " by its own clock";
    host::info(whose + " is signed by " + by.subject + ", " + by.key + when);
    if (!by.warning.empty())
        host::warn("trusted: the certificate of " + by.subject + " " + by.warning);
}

void SignatureCheck::check_own() {
    if (config_.trusted.empty())
        return;
    trusted_ = read_trusted(config_);
    refuse_pages_from_elsewhere(image_dir_, "trusted");
    try {
        const seal::SignedStatement found =
            seal::read_signed(image_dir_, trusted_, seal::Owners::own);
        seal::check_files(image_dir_, found.statement, seal::Stated::all, seal::Owners::own,
                          config_.threads);
        parent_ = found.statement.parent;
        tell(found.by, "the checkpoint");
    } catch (const Error& e) {
        throw Error(e, "trusted: " + directory_path(image_dir_) + ": " + e.what());
    }
}

void SignatureCheck::check_chain(Lineage& lineage, std::uint32_t length) {
    if (config_.trusted.empty())
        return;
    for (std::uint32_t depth = 1; depth <= length; ++depth) {
        const std::string& path = lineage.path(depth);
        try {
            const seal::SignedStatement found =
                seal::read_signed(lineage.directory(depth), trusted_, seal::Owners::own);
            if (!parent_ || found.digest != *parent_)
                throw Error(Errc::corrupt_data,
                            "its statement is not the one that was signed with the checkpoint "
                            "built on it: it is another one, or an older one");
            seal::check_files(lineage.directory(depth), found.statement, seal::Stated::for_others,
                              seal::Owners::own, config_.threads);
            parent_ = found.statement.parent;
            tell(found.by, path);
        } catch (const Error& e) {
            throw Error(e, "trusted: " + path + ", which the checkpoint is built on: " + e.what());
        }
    }
    if (parent_)
        throw Error(
            Errc::corrupt_data,
            "trusted: the statement names a parent, and the manifest of this checkpoint, or "
            "of one that it is built on, does not");
}

} // namespace gpustasis
