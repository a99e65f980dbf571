// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/sealed_dump.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/sealed_key.hpp"
#include "seal/certificate.hpp"
#include "seal/envelope.hpp"
#include "seal/key_source.hpp"

#include <fcntl.h>

#include <algorithm>
#include <utility>

namespace gpustasis {
namespace {

std::vector<std::byte> read_certificate(const std::string& path) {
    try {
        const UniqueFd fd = open_regular(AT_FDCWD, path);
        const std::uint64_t size = file_size(fd.get());
        if (size > seal::kMaxPemSize)
            throw Error(Errc::corrupt_data, "has " + std::to_string(size) + " bytes");
        std::vector<std::byte> pem = read_part(fd.get(), 0, size);
        const seal::Recipient found = seal::check_recipient(pem);
        if (!found.warning.empty())
            host::warn("recipients: certificate " + path + " " + found.warning);
        host::info("the checkpoint is sealed for " + found.subject + ", " + found.key);
        return pem;
    } catch (const Error& e) {
        throw Error(e, "recipients: certificate " + path + ": " + e.what());
    }
}

} // namespace

seal::SealedOutput::Options options_of_image(std::uint32_t file_id, const std::string& name,
                                             std::uint32_t alignment, IoMode io) {
    return {.file_id = file_id,
            .name = name,
            .alignment = alignment,
            .frame_size = seal::kSealedImageFrame,
            .io = io};
}

void require_sealable(const Config& config) {
    if ((!config.parent.empty() || config.incremental) && config.private_key.empty())
        throw Error(Errc::bad_argument,
                    "recipients: with " +
                        std::string(config.incremental ? "incremental" : "parent") +
                        ", private_key has to name what opens the sealed parent "
                        "(`gpustasis checkpoint` takes it with --key)");
    if (!config.externalize)
        throw Error(Errc::bad_argument,
                    "recipients: needs externalize, which is off: CRIU would store the GPU memory, "
                    "in the clear");
    if (!config.is_packed() && !config.has_risk(risk::kClearImages))
        throw Error(
            Errc::unsupported,
            std::string("recipients: with layout = \"criu\" CRIU's own images would stay in "
                        "the clear, with the registers, the small mappings and, unless "
                        "cpu_memory = \"ours\", the CPU memory of every process; leave "
                        "out the layout, or name the risk \"") +
                risk::kClearImages + "\" if only what this plugin stores is to be encrypted");
}

SealedDump::SealedDump(const Config& config, int image_dir)
    : image_dir_(image_dir), io_(config.io) {
    require_sealable(config);
    pems_.reserve(config.recipients.size());
    for (const std::string& path : config.recipients)
        pems_.push_back(read_certificate(path));
    static_cast<void>(make_envelope()); // what is wrong is known while the tasks run
}

std::vector<std::byte> SealedDump::make_envelope() const {
    try {
        return seal::wrap(key_.key(), {pems_.begin(), pems_.end()});
    } catch (const Error& e) {
        throw Error(e, std::string("recipients: ") + e.what());
    }
}

// After that its number may be another file's, of criu's or of ours.
seal::DataKey SealedDump::open_parent(int dir, const std::string& source) {
    if (seal::key_descriptor(source) < 0)
        return open_sealed_key(dir, source, "it");
    if (!std::exchange(descriptor_is_read_, true))
        parent_.emplace(open_sealed_key(dir, source, "it"));
    if (!parent_)
        throw Error(Errc::bad_argument, source + " was read before, and did not open the parent");
    return parent_->at_depth(0);
}

void SealedDump::build_on(const seal::DataKey& parent) {
    if (has_envelope_)
        throw Error(Errc::bad_argument, "the envelope of the dump is written already");
    key_.build_on(parent);
}

void SealedDump::write_envelope() {
    if (has_envelope_)
        return;
    try {
        PartFile file(image_dir_, seal::kEnvelopeName);
        write_at(file.fd(), 0, make_envelope());
        file.commit();
        has_envelope_ = true;
    } catch (const Error& e) {
        throw Error(e, std::string(seal::kEnvelopeName) + ": " + e.what());
    }
}

void SealedDump::write_image(const std::string& name, std::uint32_t alignment,
                             const std::function<void(ImageOutput&)>& write) {
    write_envelope();
    const std::uint32_t file_id = next_file_++;
    try {
        seal::SealedOutput output(key_, image_dir_,
                                  options_of_image(file_id, name, alignment, io_));
        write(output);
        list(output.listed());
    } catch (const Error& e) {
        throw Error(e, seal::sealed_name(file_id) + " with " + name + ": " + e.what());
    }
}

std::uint32_t SealedDump::leave_image() {
    write_envelope();
    const std::uint32_t file_id = next_file_++;
    key_.leave(file_id);
    return file_id;
}

void SealedDump::list(const seal::OtherFile& written) {
    const auto behind =
        std::ranges::upper_bound(written_, written.file_id, {}, &seal::OtherFile::file_id);
    written_.insert(behind, written);
}

seal::SealedSizes SealedDump::write_files(const Manifest& manifest, int directory,
                                          std::vector<std::string> names, unsigned threads) {
    write_envelope();
    gpustasis::write_manifest(directory, manifest);
    names.emplace_back(kManifestName);
    try {
        return seal::write_sealed(key_, directory, std::move(names), image_dir_,
                                  {.threads = threads, .others = written_});
    } catch (const Error& e) {
        throw Error(e, std::string(seal::kSealedName) + ": " + e.what());
    }
}

void SealedDump::write_manifest(const Manifest& manifest) {
    write_envelope();
    if (written_.empty())
        throw Error(Errc::unsupported, "recipients: nothing of this checkpoint would be encrypted: "
                                       "it has no GPU memory, and no CPU memory that is stored by "
                                       "this plugin");
    try {
        manifest_.emplace(key_, image_dir_,
                          seal::SealedOutput::Options{.file_id = seal::kSealedFile,
                                                      .name = kManifestName,
                                                      .others = written_});
        const std::vector<std::byte> bytes = pack_manifest(manifest);
        manifest_->put(0, bytes);
        manifest_->end(bytes.size());
    } catch (const Error& e) {
        manifest_.reset();
        throw Error(e, std::string(seal::kSealedName) + ": " + e.what());
    }
}

void SealedDump::publish_manifest() {
    if (!manifest_)
        return;
    try {
        manifest_->publish();
        manifest_.reset();
    } catch (const Error& e) {
        throw Error(e, std::string(seal::kSealedName) + ": " + e.what());
    }
}

} // namespace gpustasis
