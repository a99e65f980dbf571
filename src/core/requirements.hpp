// SPDX-License-Identifier: Apache-2.0
/// The files that the tasks of a checkpoint had mapped: what CRIU opens by their paths when it makes the
/// tasks again, and takes for the same. docs/format.md, "Requirements section".
#pragma once

#include "core/error.hpp"
#include "core/fields.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// Whose paths they are.
enum class FilePlace : std::uint8_t {
    host = 0,      ///< of the mount namespace that criu was in
    container = 1, ///< of that of the tree's root task, if it is another
    inner = 2,     ///< of a third one, of a task further down
};

/// What is known of a file's content.
enum class FileIdentity : std::uint8_t {
    size = 0,     ///< nothing but its size: no task had it mapped executable, or it is too large
    build_id = 1, ///< the build id of an ELF file
    content = 2,  ///< hash128 of all of it
};

struct RequiredFile {
    FilePlace place = FilePlace::host;
    std::string path; ///< absolute, 2..4095 bytes
    std::uint64_t size = 0;
    FileIdentity identity = FileIdentity::size;
    std::vector<std::byte> id{}; ///< 1..32 bytes of a build id, 16 of a hash, none of a size

    bool operator==(const RequiredFile&) const = default;
};

struct Requirements {
    std::vector<RequiredFile> files; ///< ascending by place, then path; each pair once
    std::uint32_t unrecorded =
        0; ///< mapped files that are not among them: they could not be read, or
           ///< broke a limit

    bool operator==(const Requirements&) const = default;
};

/// The order of Requirements::files.
inline bool comes_before(const RequiredFile& one, const RequiredFile& other) noexcept {
    return one.place != other.place ? one.place < other.place : one.path < other.path;
}

namespace format {

inline constexpr std::size_t kRequirementsFixedSize = 16;
inline constexpr std::size_t kRequiredFileSize = 48;
inline constexpr std::uint32_t kMaxRequiredFiles = 16384;
inline constexpr std::uint32_t kMaxRequiredPaths = 2U << 20; ///< bytes of all paths
inline constexpr std::size_t kMaxRequiredPath = 4095;
inline constexpr std::size_t kMaxBuildId = 32;
/// Of files with FileIdentity::content, in bytes: a restore reads them whole.
inline constexpr std::uint64_t kMaxHashedFile = 64U << 20;
inline constexpr std::uint64_t kMaxHashedFiles = 256U << 20; ///< of all of them

/// The largest section there can be, in bytes.
inline constexpr std::size_t kMaxRequirementsSize =
    kRequirementsFixedSize + kRequiredFileSize * kMaxRequiredFiles + kMaxRequiredPaths;

/// Throws Error with code `blame` if `requirements` break a limit of docs/format.md.
void check_requirements(const Requirements& requirements, Errc blame);

/// Bytes of the section. `requirements` have passed check_requirements().
std::size_t requirements_size(const Requirements& requirements) noexcept;

void pack_requirements(const Requirements& requirements, FieldWriter& out);

/// The section at the front of `in`, of which the caller has checked the hash and checks the values
/// (check_requirements). Allocates no more than the limits. Throws Error: corrupt_data.
Requirements unpack_requirements(FieldReader& in);

} // namespace format
} // namespace gpustasis
