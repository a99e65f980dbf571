// SPDX-License-Identifier: Apache-2.0
/// Writes the sealed file: all files of a checkpoint in frames.
#pragma once

#include "seal/frame_cipher.hpp"
#include "seal/sealed_format.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace gpustasis::seal {

/// A file that is only in memory.
struct GivenFile {
    std::vector<std::byte> content;
    std::uint64_t mtime_ns = 0; ///< since 1970
};

struct SealOptions {
    std::uint32_t frame_size =
        kDefaultSealedFrame;         ///< a power of two, kMinSealedFrame…kMaxSealedFrame
    unsigned threads = 0;            ///< 0: as many as there are processors
    std::vector<OtherFile> others{}; ///< sealed under the same key before, ascending by number
    std::map<std::string, GivenFile> given{}; ///< by name: in place of files of `source`
};

struct SealedSizes {
    std::uint64_t files = 0;
    std::uint64_t plain_size = 0; ///< bytes of these files
    std::uint64_t file_size = 0;  ///< of the sealed file
};

/// Told how many bytes are done, now and then, from one thread at a time.
using SealProgress = std::function<void(std::uint64_t done)>;

/// Seal the files `names` of `source`, and those that `options` gives, into kSealedName in `target`, synced before it gets the name; what
/// was under that name is replaced. Nothing is left of it on an exception. Links are not followed.
/// Throws Error: bad_argument for an option, a name that cannot be sealed, or what is no ordinary
/// file; corrupt_data if a file changes meanwhile; io if one cannot be read; OutputError.
SealedSizes write_sealed(FreshKey& key, int source, std::vector<std::string> names, int target,
                         const SealOptions& options = {}, const SealProgress& tell = {});

} // namespace gpustasis::seal
