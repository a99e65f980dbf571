// SPDX-License-Identifier: Apache-2.0
/// All sealed files of a checkpoint, as one: none is missing, and none is there that does not belong to it.
#pragma once

#include "core/image_input.hpp"
#include "seal/sealed_reader.hpp"
#include "seal/unsealed_files.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace gpustasis::seal {

/// Used by any number of threads.
class SealedCheckpoint {
public:
    /// Opens the sealed files of `dir`. Throws Error: io; corrupt_data, also if `key` is that of another
    /// checkpoint, a file is missing, or one is there that is not of it; unsupported. `io`: of the images that
    /// were sealed while they were made.
    SealedCheckpoint(int dir, const DataKey& key, IoMode io = IoMode::automatic);

    /// Of all files, ascending by name.
    std::vector<SealedEntry> entries() const;
    std::uint64_t file_size() const noexcept; ///< of all sealed files
    bool has(const std::string& name) const;

    /// The whole file `name`. Throws Error: bad_argument if there is none, or it has more than `limit`
    /// bytes; io, corrupt_data.
    std::vector<std::byte> read(const std::string& name, std::uint64_t limit) const;
    /// The file `name`, to be read as an image. It outlives this. Throws Error: bad_argument, if there is none.
    std::shared_ptr<const ImageInput> input(const std::string& name) const;

    /// As those of unsealed_files.hpp, for all sealed files.
    void extract(int dir, unsigned threads = 0, const SealProgress& tell = {}) const;
    /// Write those files whose names `wanted` takes into `dir`, as extract() does, but one after the other, and
    /// unsynced. Throws as extract().
    void extract_some(int dir, const std::function<bool(const std::string&)>& wanted) const;
    void compare(int dir, unsigned threads = 0, const SealProgress& tell = {}) const;
    /// Check that every frame is authentic, but of sealed files all of whose files are among `elsewhere`. Throws
    /// Error: io, corrupt_data.
    void check(const std::set<std::string>& elsewhere, unsigned threads = 0,
               const SealProgress& tell = {}) const;

private:
    struct Place {
        std::shared_ptr<const SealedReader> holder;
        std::size_t file = 0;
    };
    Place find(const std::string& name) const;

    std::vector<std::shared_ptr<const SealedReader>> files_; ///< ascending by number
};

/// The one file in the sealed file `file_id` of `dir`, to be read as an image: of a dump that did not come to
/// its end. Throws Error: corrupt_data if that is not `name`; as SealedReader.
std::shared_ptr<const ImageInput> open_sealed_image(int dir, std::uint32_t file_id,
                                                    const std::string& name, const DataKey& key);

/// The same where the number is not known: the first sealed file that holds `name`. Throws Error: io (ENOENT) if
/// there is none.
std::shared_ptr<const ImageInput> find_sealed_image(int dir, const std::string& name,
                                                    const DataKey& key);

/// The numbers of all sealed files in `dir`, ascending. Throws Error: io.
std::vector<std::uint32_t> list_sealed_files(int dir);

/// Removes sealed files and envelope, which an earlier dump has left, and syncs nothing. Throws Error: io.
void remove_sealed_files(int dir);

} // namespace gpustasis::seal
