// SPDX-License-Identifier: Apache-2.0
#include "core/pack_index.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/image_format.hpp"
#include "core/image_metadata.hpp"

#include <span>
#include <string>

namespace gpustasis {
namespace {

constexpr std::size_t kHeadReserved = 16;
constexpr std::size_t kEntryFixed = 24;
constexpr std::size_t kMaxPackedName = 255;

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

PackedFile take_entry(FieldReader& fields) {
    PackedFile file;
    const auto name_size = fields.number<std::uint16_t>();
    file.mode = fields.number<std::uint16_t>();
    fields.reserved(sizeof(std::uint32_t));
    file.size = fields.number<std::uint64_t>();
    file.mtime_ns = fields.number<std::uint64_t>();
    const Bytes name = fields.take(name_size);
    file.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    if (!can_be_packed(file.name))
        corrupt("an entry has a name that no file of CRIU has");
    if ((file.mode & ~format::kPackedModeBits) != 0 || file.size > format::kMaxPackSize)
        corrupt("entry of " + file.name + ": mode or size out of bounds");
    return file;
}

} // namespace

bool can_be_packed(const std::string& name) {
    return !name.empty() && name != "." && name != ".." && name.size() <= kMaxPackedName &&
           name.find('/') == std::string::npos && name.find('\0') == std::string::npos &&
           !name.starts_with("gpustasis-");
}

namespace format {

std::vector<std::byte> encode_pack_index(const std::vector<PackedFile>& files) {
    std::uint64_t size = 0;
    for (const PackedFile& file : files)
        size += kEntryFixed + file.name.size();
    if (files.size() > kMaxPackedFiles || size > kMaxPackIndexSize)
        throw Error(Errc::bad_argument, "more files than a pack can hold");
    const std::uint64_t end = align_up(kPackHeadSize + size, kPageSize);
    FieldWriter out(end);
    out.number(std::uint64_t{files.size()});
    out.number(size);
    out.reserved(kHeadReserved);
    for (const PackedFile& file : files) {
        out.number(static_cast<std::uint16_t>(file.name.size()));
        out.number(static_cast<std::uint16_t>(file.mode & kPackedModeBits));
        out.reserved(sizeof(std::uint32_t));
        out.number(file.size);
        out.number(file.mtime_ns);
        out.append(std::as_bytes(std::span(file.name)));
    }
    out.reserved(end - out.size());
    return out.take();
}

PackHead decode_pack_head(Bytes bytes) {
    FieldReader fields(bytes);
    PackHead head;
    head.file_count = fields.number<std::uint64_t>();
    head.index_size = fields.number<std::uint64_t>();
    fields.reserved(kHeadReserved);
    // Each entry takes more than kEntryFixed bytes, so a count costs no more than the index has.
    if (head.file_count > kMaxPackedFiles || head.index_size > kMaxPackIndexSize ||
        head.file_count * kEntryFixed > head.index_size)
        corrupt("its index has a number out of bounds");
    return head;
}

std::vector<PackedFile> decode_pack_entries(Bytes bytes, const PackHead& head) {
    std::vector<PackedFile> files;
    files.reserve(head.file_count);
    FieldReader fields(bytes);
    for (std::uint64_t number = 0; number < head.file_count; ++number) {
        files.push_back(take_entry(fields));
        if (number > 0 && files[number - 1].name >= files[number].name)
            corrupt("names in the index are not in ascending order");
    }
    if (fields.size() != 0)
        corrupt("the index is longer than its entries");
    return files;
}

std::vector<std::uint64_t> place_packed(const std::vector<PackedFile>& files,
                                        std::uint64_t index_size) {
    std::vector<std::uint64_t> starts;
    starts.reserve(files.size() + 1);
    std::uint64_t at = align_up(kPackHeadSize + index_size, kPageSize);
    for (const PackedFile& file : files) {
        starts.push_back(at);
        at += align_up(file.size, kPageSize); // both are far below 2^64
        if (at > kMaxPackSize)
            corrupt("the files are larger than a pack can be");
    }
    starts.push_back(at);
    return starts;
}

} // namespace format
} // namespace gpustasis
