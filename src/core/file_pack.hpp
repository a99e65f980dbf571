// SPDX-License-Identifier: Apache-2.0
/// The pack of docs/format.md: all files that CRIU has made in one image of ours.
#pragma once

#include "core/direct_io.hpp"
#include "core/image_info.hpp"
#include "core/image_reader.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

inline constexpr const char* kPackName = "gpustasis-files.img";

/// A file in a pack.
struct PackedFile {
    std::string name;
    std::uint32_t mode = 0; ///< permission bits
    std::uint64_t size = 0;
    std::uint64_t mtime_ns = 0; ///< since 1970

    friend bool operator==(const PackedFile&, const PackedFile&) = default;
};

/// False for what could lead out of a directory, or is a name of ours.
bool can_be_packed(const std::string& name);

struct PackOptions {
    unsigned threads = 0;         ///< as of WriteOptions
    bool compress = true;         ///< as of WriteOptions
    std::uint32_t chunk_size = 0; ///< 0: the format's default
    IoMode io = IoMode::automatic;
};

struct PackResult {
    std::uint64_t files = 0;
    std::uint64_t plain_size = 0; ///< bytes of these files
    std::uint64_t file_size = 0;  ///< of the pack
    Id digest{};                  ///< the manifest holds it
};

/// Pack the files `names` of `source` into kPackName in `target`, synced before it gets the name; what
/// was under that name is replaced. Nothing is left of it on an exception. Links are not followed.
/// Throws Error: bad_argument for a name that cannot be packed, or comes twice, or what is no
/// ordinary file; corrupt_data if a file gets shorter meanwhile; io.
PackResult write_pack(const Id& checkpoint_id, int source, std::vector<std::string> names,
                      int target, const PackOptions& options = {});

/// One pack, which may be damaged or hostile. Opening checks all that ImageReader::open checks, and
/// names, sizes and places of the files; what is read is checked before it is used.
class PackReader {
public:
    /// Throws Error: io, corrupt_data, unsupported; what() names the file.
    static PackReader open(int dir, IoMode io = IoMode::automatic);
    /// A pack that is that part of the file `fd`, as ImageReader::open_part.
    static PackReader open_part(int fd, std::uint64_t offset, std::uint64_t length,
                                const std::string& name);

    const ImageReader& image() const noexcept { return image_; }
    const std::vector<PackedFile>& files() const noexcept { return files_; } ///< ascending by name
    std::uint64_t size() const noexcept { return size_; }                    ///< of all files

    /// nullptr: there is none.
    const PackedFile* find(const std::string& name) const noexcept;
    /// All of one file, which the caller has found to be of bearable size. Throws Error.
    std::vector<std::byte> read(const PackedFile& file) const;

    /// Make all files, but for the one called `without`, in `dir`, where none of these names is. What was made
    /// before an Error stays. `threads` as in WriteOptions. Throws Error: io, corrupt_data; bad_argument.
    void extract(int dir, unsigned threads, const std::string& without = {}) const;
    /// Check all of it. Throws Error as ImageReader::verify; corrupt_data.
    void verify(unsigned threads) const;

private:
    PackReader(ImageReader image, const std::string& name);
    void read_content(std::uint64_t offset, MutBytes out) const;

    ImageReader image_;
    std::vector<PackedFile> files_;
    std::vector<std::uint64_t> starts_; ///< of each file in the content, and the end
    std::uint64_t entries_end_ = 0;
    std::uint64_t size_ = 0;
};

} // namespace gpustasis
