// SPDX-License-Identifier: Apache-2.0
#include "core/requirements.hpp"

#include "core/image_info.hpp"

#include <algorithm>
#include <span>
#include <string_view>

namespace gpustasis::format {
namespace {

constexpr std::size_t kReserved = 4;
constexpr std::size_t kFileReserved = 1;

/// nullptr: nothing is wrong with the file by itself.
const char* fault_of(const RequiredFile& file) noexcept {
    if (file.place > FilePlace::inner)
        return "unknown place";
    if (file.path.size() < 2 || file.path.size() > kMaxRequiredPath || file.path[0] != '/' ||
        file.path.find('\0') != std::string::npos)
        return "its path is none";
    switch (file.identity) {
    case FileIdentity::size: return file.id.empty() ? nullptr : "an identity where there is none";
    case FileIdentity::build_id:
        return !file.id.empty() && file.id.size() <= kMaxBuildId ? nullptr : "no build id";
    case FileIdentity::content:
        if (file.size > kMaxHashedFile)
            return "too large for a hash of its content";
        return file.id.size() == sizeof(Id) ? nullptr : "no hash of its content";
    }
    return "unknown identity";
}

std::size_t size_of_paths(const Requirements& requirements) noexcept {
    std::size_t size = 0;
    for (const RequiredFile& file : requirements.files)
        size += file.path.size();
    return size;
}

} // namespace

void check_requirements(const Requirements& requirements, Errc blame) {
    if (requirements.files.size() > kMaxRequiredFiles)
        throw Error(blame, "too many mapped files: " + std::to_string(requirements.files.size()));
    if (size_of_paths(requirements) > kMaxRequiredPaths)
        throw Error(blame, "the paths of mapped files are too long: " +
                               std::to_string(size_of_paths(requirements)) + " bytes");
    std::uint64_t hashed = 0;
    const RequiredFile* last = nullptr;
    for (const RequiredFile& file : requirements.files) {
        if (const char* fault = fault_of(file); fault != nullptr)
            throw Error(blame, "mapped file " + file.path + ": " + fault);
        if (last != nullptr && !comes_before(*last, file))
            throw Error(blame, "mapped file " + file.path + ": is out of order");
        if (file.identity == FileIdentity::content)
            hashed += file.size;
        last = &file;
    }
    if (hashed > kMaxHashedFiles)
        throw Error(blame, "mapped files with a hash of their content have " +
                               std::to_string(hashed) + " bytes");
}

std::size_t requirements_size(const Requirements& requirements) noexcept {
    return kRequirementsFixedSize + kRequiredFileSize * requirements.files.size() +
           size_of_paths(requirements);
}

void pack_requirements(const Requirements& requirements, FieldWriter& out) {
    out.number(static_cast<std::uint32_t>(requirements.files.size()));
    out.number(static_cast<std::uint32_t>(size_of_paths(requirements)));
    out.number(requirements.unrecorded);
    out.reserved(kReserved);
    for (const RequiredFile& file : requirements.files) {
        out.number(file.size);
        out.number(static_cast<std::uint32_t>(file.path.size()));
        out.number(static_cast<std::uint8_t>(file.identity));
        out.number(static_cast<std::uint8_t>(file.place));
        out.number(static_cast<std::uint8_t>(file.id.size()));
        out.reserved(kFileReserved);
        out.append(file.id);
        out.reserved(kMaxBuildId - file.id.size());
    }
    for (const RequiredFile& file : requirements.files)
        out.append(std::as_bytes(std::span(file.path)));
}

Requirements unpack_requirements(FieldReader& in) {
    const auto count = in.number<std::uint32_t>();
    const auto paths_size = in.number<std::uint32_t>();
    Requirements requirements;
    requirements.unrecorded = in.number<std::uint32_t>();
    in.reserved(kReserved);
    if (count > kMaxRequiredFiles || paths_size > kMaxRequiredPaths)
        throw Error(Errc::corrupt_data, "too many mapped files, or too long paths");
    FieldReader entries(in.take(kRequiredFileSize * count));
    Bytes paths = in.take(paths_size);
    requirements.files.reserve(count);
    for (std::uint32_t i = 0; i < count; ++i) {
        RequiredFile& file = requirements.files.emplace_back();
        file.size = entries.number<std::uint64_t>();
        const auto length = entries.number<std::uint32_t>();
        file.identity = static_cast<FileIdentity>(entries.number<std::uint8_t>());
        file.place = static_cast<FilePlace>(entries.number<std::uint8_t>());
        const auto id_size = entries.number<std::uint8_t>();
        entries.reserved(kFileReserved);
        if (id_size > kMaxBuildId || length > paths.size())
            throw Error(Errc::corrupt_data, "a mapped file's path or identity is too long");
        const Bytes id = entries.take(id_size);
        file.id.assign(id.begin(), id.end());
        entries.reserved(kMaxBuildId - id_size);
        const Bytes path = paths.first(length);
        file.path.assign(reinterpret_cast<const char*>(path.data()), path.size());
        paths = paths.subspan(length);
    }
    if (!paths.empty())
        throw Error(Errc::corrupt_data, "more paths than mapped files");
    return requirements;
}

} // namespace gpustasis::format
