// SPDX-License-Identifier: Apache-2.0
#include "seal/data_key.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "seal/openssl.hpp"

#include <openssl/core_names.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

namespace gpustasis::seal {
namespace {

constexpr std::string_view kRecordMagic = "GPUSKEY\n";
constexpr std::uint32_t kWithoutAncestors = 1; // versions of a record
constexpr std::uint32_t kWithAncestors = 2;
constexpr std::string_view kFrames = "gpustasis frames";

void fill_random(MutBytes out) {
    if (RAND_priv_bytes(raw(out), static_cast<int>(out.size())) != 1)
        throw crypto_error(Errc::io, "cannot make a random key");
}

Id id_of(Bytes ancestor) {
    Id id{};
    std::ranges::copy(ancestor.first(id.size()), id.begin());
    return id;
}

Secret copy_of(Bytes bytes) {
    Secret copy(bytes.size());
    std::ranges::copy(bytes, copy.bytes().begin());
    return copy;
}

// A checkpoint that came twice would be a chain without an end.
void require_each_once(const Id& own, Bytes ancestors) {
    std::set<Id> seen{own};
    for (std::size_t at = 0; at < ancestors.size(); at += DataKey::kAncestorSize)
        if (!seen.insert(id_of(ancestors.subspan(at))).second)
            throw Error(Errc::corrupt_data, "a key record names a checkpoint twice");
}

} // namespace

DataKey DataKey::from_record(Bytes record) {
    start_openssl();
    if (record.size() < kRecordSize || record.size() > kMaxRecordSize ||
        (record.size() - kRecordSize) % kAncestorSize != 0)
        throw Error(Errc::corrupt_data, "a key record has " + std::to_string(kRecordSize) +
                                            " bytes, not " + std::to_string(record.size()) +
                                            "; and " + std::to_string(kAncestorSize) +
                                            " more for each earlier checkpoint");
    FieldReader fields(record);
    if (!std::ranges::equal(fields.take(kRecordMagic.size()),
                            std::as_bytes(std::span(kRecordMagic))))
        throw Error(Errc::corrupt_data, "is no key record of gpustasis");
    const auto version = fields.number<std::uint32_t>();
    if (version != kWithoutAncestors && version != kWithAncestors)
        throw Error(Errc::unsupported, "key record of version " + std::to_string(version) +
                                           "; this build reads up to " +
                                           std::to_string(kWithAncestors));
    const auto count = fields.number<std::uint32_t>();
    if (count != (record.size() - kRecordSize) / kAncestorSize ||
        (count != 0) != (version == kWithAncestors))
        throw Error(Errc::corrupt_data, "a key record of version " + std::to_string(version) +
                                            " with " + std::to_string(record.size()) +
                                            " bytes says that it holds the keys of " +
                                            std::to_string(count) + " earlier checkpoints");
    const Id sealed_id = fields.id();
    DataKey read(sealed_id, copy_of(fields.take(kSize)));
    if (count != 0) {
        read.ancestors_ = copy_of(fields.take(count * kAncestorSize));
        require_each_once(sealed_id, read.ancestors_->bytes());
    }
    return read;
}

DataKey DataKey::at_depth(std::size_t depth) const {
    if (depth > ancestor_count())
        throw Error(Errc::corrupt_data, "the key record holds the keys of " +
                                            std::to_string(ancestor_count()) +
                                            " earlier checkpoints, and not of one " +
                                            std::to_string(depth) + " links away");
    const Bytes all = ancestors_ ? ancestors_->bytes() : Bytes();
    const Bytes own =
        depth == 0 ? Bytes() : all.subspan((depth - 1) * kAncestorSize, kAncestorSize);
    DataKey found = depth == 0 ? DataKey(sealed_id_, copy_of(key_.bytes()))
                               : DataKey(id_of(own), copy_of(own.subspan(sizeof(Id))));
    if (const Bytes above = all.subspan(depth * kAncestorSize); !above.empty())
        found.ancestors_ = copy_of(above);
    return found;
}

DataKey DataKey::built_on(const DataKey& parent) const {
    const std::size_t count = parent.ancestor_count() + 1;
    if (count > kMaxAncestors)
        throw Error(Errc::bad_argument, "a sealed checkpoint is built on " +
                                            std::to_string(kMaxAncestors) + " others at most");
    Secret all(count * kAncestorSize);
    auto at = std::ranges::copy(parent.sealed_id_, all.bytes().begin()).out;
    at = std::ranges::copy(parent.key_.bytes(), at).out;
    if (parent.ancestors_)
        std::ranges::copy(parent.ancestors_->bytes(), at);
    require_each_once(sealed_id_, all.bytes());
    DataKey built(sealed_id_, copy_of(key_.bytes()));
    built.ancestors_ = std::move(all);
    return built;
}

DataKey DataKey::random() {
    start_openssl();
    Id sealed_id{};
    fill_random(sealed_id);
    Secret key(kSize);
    fill_random(key.bytes());
    return {sealed_id, std::move(key)};
}

Secret DataKey::record() const {
    FieldWriter head(kRecordSize - kSize); // what is secret goes into locked memory only
    head.append(std::as_bytes(std::span(kRecordMagic)));
    head.number(ancestors_ ? kWithAncestors : kWithoutAncestors);
    head.number(static_cast<std::uint32_t>(ancestor_count()));
    head.append(sealed_id_);
    Secret out(kRecordSize + ancestor_count() * kAncestorSize);
    auto rest = std::ranges::copy(head.bytes(), out.bytes().begin()).out;
    rest = std::ranges::copy(key_.bytes(), rest).out;
    if (ancestors_)
        std::ranges::copy(ancestors_->bytes(), rest);
    return out;
}

Secret DataKey::subkey(std::string_view label, Bytes context) const {
    const Kdf kdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
    const KdfContext made(kdf ? EVP_KDF_CTX_new(kdf.get()) : nullptr);
    if (!made)
        throw crypto_error(Errc::io, "cannot use HKDF");
    FieldWriter info(label.size() + 1 + context.size());
    info.append(std::as_bytes(std::span(label)));
    info.reserved(1);
    info.append(context);
    std::vector<std::byte> info_bytes = info.take();
    std::string digest = "SHA256";
    // OSSL_PARAM takes what it only reads as if it wrote.
    const auto writable = [](Bytes bytes) { return const_cast<std::byte*>(bytes.data()); };
    const std::array<OSSL_PARAM, 5> params = {
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest.data(), 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, writable(key_.bytes()), kSize),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, writable(sealed_id_),
                                          sealed_id_.size()),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info_bytes.data(),
                                          info_bytes.size()),
        OSSL_PARAM_construct_end()};
    Secret out(kSize);
    require(EVP_KDF_derive(made.get(), raw(out.bytes()), out.size(), params.data()),
            "cannot derive a key");
    return out;
}

Secret frame_key(const DataKey& key, std::uint32_t file_id, Bytes header) {
    FieldWriter context(sizeof file_id + header.size());
    context.number(file_id);
    context.append(header);
    return key.subkey(kFrames, context.bytes());
}

} // namespace gpustasis::seal
