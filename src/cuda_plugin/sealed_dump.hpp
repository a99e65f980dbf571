// SPDX-License-Identifier: Apache-2.0
/// What a dump writes beside CRIU's images when it is for recipients: sealed, and never in the clear.
#pragma once

#include "core/manifest.hpp"
#include "cuda_plugin/config.hpp"
#include "seal/frame_cipher.hpp"
#include "seal/sealed_output.hpp"
#include "seal/sealed_writer.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

class SealedDump {
public:
    /// While the tasks still run: reads the certificates of `config.recipients`, warns of what is wrong with
    /// their dates, and makes the data key. `image_dir` stays the caller's. Throws Error: bad_argument for what
    /// a sealed dump cannot have; io, corrupt_data.
    SealedDump(const Config& config, int image_dir);

    /// Only opens. It seals under nothing else.
    const seal::DataKey& key() const noexcept { return key_.key(); }

    /// The key of the sealed parent in `dir`, by `source`, the key `private_key`. A descriptor is read and closed
    /// once: what it gave is given again. Throws as open_sealed_key().
    seal::DataKey open_parent(int dir, const std::string& source);

    /// Before the envelope is written: the dump is built on the sealed checkpoint of `parent`, and who opens it
    /// gets that key as well, and those of all that is built on. Throws Error: bad_argument, io.
    void build_on(const seal::DataKey& parent);
    /// It is built on none after all.
    void build_on_nothing() noexcept { key_.build_on_nothing(); }

    /// Writes the envelope, durable on return, unless it has been. Whoever writes anything sealed does so first.
    /// Throws Error: io.
    void write_envelope();

    /// Writes one image, which `write` puts into an output for chunks of this alignment. It is complete and
    /// durable on return. Throws Error: io, and what `write` throws.
    void write_image(const std::string& name, std::uint32_t alignment,
                     const std::function<void(ImageOutput&)>& write);

    /// The number of a sealed file that another process is to write, with the key handed on to it
    /// (seal::FreshKey::of_left_file). The envelope is written. No number is given twice, whatever becomes of the file.
    /// Throws Error: io.
    std::uint32_t leave_image();
    /// What that process has written is complete and durable.
    void list(const seal::OtherFile& written);

    /// Once, when all images are written, in place of write_manifest(): the manifest, and the files `names` of
    /// `directory`, which are CRIU's. `directory` gets the manifest, too. Throws as seal::write_sealed.
    seal::SealedSizes write_files(const Manifest& manifest, int directory,
                                  std::vector<std::string> names, unsigned threads);

    /// Once, when all images are written: the manifest, and with it which sealed files there are. It has no name
    /// before publish_manifest(). Throws Error: io; unsupported if nothing would be sealed.
    void write_manifest(const Manifest& manifest);
    /// Once; nothing if none was written. Throws Error: io.
    void publish_manifest();

private:
    int image_dir_;
    IoMode io_;
    std::vector<std::byte> make_envelope() const;

    std::vector<std::vector<std::byte>> pems_; ///< of the recipients
    bool has_envelope_ = false;
    bool descriptor_is_read_ = false;
    std::optional<seal::DataKey> parent_; ///< from a descriptor
    seal::FreshKey key_;
    std::uint32_t next_file_ = seal::kFirstOther; ///< whose number was not given yet
    std::vector<seal::OtherFile> written_;        ///< ascending by number
    std::optional<seal::SealedOutput> manifest_;  ///< written, and without its name
};

/// How the image `name` of this plugin's, with chunks of this alignment, is sealed.
seal::SealedOutput::Options options_of_image(std::uint32_t file_id, const std::string& name,
                                             std::uint32_t alignment, IoMode io);

/// Throws Error: unsupported or bad_argument, with what to do, for what `config` asks for and a dump for
/// recipients does not do.
void require_sealable(const Config& config);

} // namespace gpustasis
