#include "core/stripe_file.hpp"

#include "core/chunk_codec.hpp"
#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

namespace gpustasis {
namespace {

constexpr std::size_t kHashSize = sizeof(Id);
constexpr std::size_t kHeaderReserved = 20;

Bytes header_magic() noexcept {
    return std::as_bytes(std::span("\x93"
                                   "GPUSST\n",
                                   8));
}
Bytes trailer_magic() noexcept {
    return std::as_bytes(std::span("GPSSEND\n", 8));
}

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

std::vector<std::byte> seal(FieldWriter& out) {
    out.append(hash128(out.bytes()));
    return out.take();
}

void check_seal(Bytes bytes, const char* part) {
    if (format::hash_at_end(bytes) != hash128(bytes.first(bytes.size() - kHashSize)))
        corrupt(std::string("its ") + part + " does not match its checksum");
}

std::vector<std::byte> pack_header(const Stripe& stripe) {
    FieldWriter out(kStripeHeaderSize);
    out.append(header_magic());
    out.number(format::kVersion);
    out.number(static_cast<std::uint32_t>(kStripeHeaderSize));
    out.number(format::kStripes); // required_features
    out.number(std::uint64_t{0}); // optional_features
    out.append(stripe.checkpoint_id);
    out.number(stripe.pid);
    out.number(stripe.number);
    out.number(stripe.alignment);
    out.reserved(kHeaderReserved);
    return seal(out);
}

void check_header(Bytes bytes, const Stripe& expected) {
    FieldReader in(bytes);
    if (!std::ranges::equal(in.take(header_magic().size()), header_magic()))
        corrupt("not a stripe of an image: wrong magic");
    check_seal(bytes, "header");
    if (const auto version = in.number<std::uint32_t>(); version != format::kVersion)
        throw Error(Errc::unsupported, "has format version " + std::to_string(version) +
                                           ", this build reads " +
                                           std::to_string(format::kVersion));
    if (in.number<std::uint32_t>() != kStripeHeaderSize)
        corrupt("header has the wrong size");
    const auto required = in.number<std::uint64_t>();
    format::check_required_features(required);
    if (required != format::kStripes)
        corrupt("has features that a stripe cannot have");
    in.number<std::uint64_t>(); // optional_features
    if (in.id() != expected.checkpoint_id)
        corrupt("belongs to another checkpoint");
    if (in.number<std::uint32_t>() != expected.pid)
        corrupt("belongs to the image of another process");
    if (const auto number = in.number<std::uint32_t>(); number != expected.number)
        corrupt("is stripe " + std::to_string(number));
    if (in.number<std::uint32_t>() != expected.alignment)
        corrupt("has another alignment than its image");
    in.reserved(kHeaderReserved);
}

std::vector<std::byte> pack_trailer(const Stripe& stripe, std::uint64_t file_size,
                                    const Id& header_hash) {
    FieldWriter out(kStripeTrailerSize);
    out.number(file_size);
    out.append(stripe.entries_hash);
    out.append(header_hash);
    out.append(trailer_magic());
    return seal(out);
}

void check_trailer(Bytes bytes, const Source& source, const Stripe& expected,
                   const Id& header_hash) {
    FieldReader in(bytes);
    const auto file_size = in.number<std::uint64_t>();
    const Id entries_hash = in.id();
    const Id found_header_hash = in.id();
    if (!std::ranges::equal(in.take(trailer_magic().size()), trailer_magic()))
        corrupt("does not end as a stripe does: cut short, or never finished");
    check_seal(bytes, "trailer");
    if (in.id() != source.digest)
        corrupt("is of another image: it has another digest");
    if (file_size != source.file_size)
        corrupt("does not have the size that it says");
    if (found_header_hash != header_hash)
        corrupt("header and trailer are of different stripes");
    if (entries_hash != expected.entries_hash)
        corrupt("does not hold the chunks that the image's index says");
}

void remove_file(int dir_fd, const std::string& name) {
    if (::unlinkat(dir_fd, name.c_str(), 0) != 0 && errno != ENOENT)
        throw io_error("cannot remove the old " + name, errno);
}

} // namespace

std::string stripe_name(const std::string& image, unsigned number) {
    constexpr std::string_view kEnding = ".img";
    if (number == 0)
        return image;
    const bool ends = image.ends_with(kEnding);
    const std::string stem = ends ? image.substr(0, image.size() - kEnding.size()) : image;
    return stem + "." + std::to_string(number) + (ends ? std::string(kEnding) : std::string{});
}

Source write_stripe_frame(int fd, const Stripe& stripe, std::uint64_t data_end) {
    const std::vector<std::byte> header = pack_header(stripe);
    const std::uint64_t file_size = data_end + kStripeTrailerSize;
    const std::vector<std::byte> trailer =
        pack_trailer(stripe, file_size, format::hash_at_end(header));
    write_at(fd, 0, header);
    write_at(fd, data_end, trailer);
    return {.checkpoint_id = stripe.checkpoint_id,
            .digest = format::hash_at_end(trailer),
            .file_size = file_size,
            .pid = stripe.pid,
            .depth = 0,
            .stripe = stripe.number};
}

UniqueFd open_stripe(int dir_fd, const std::string& name, const Source& source,
                     const Stripe& expected) {
    try {
        UniqueFd fd = open_regular(dir_fd, name);
        const std::uint64_t data_begin = format::align_up(kStripeHeaderSize, expected.alignment);
        if (const std::uint64_t size = file_size(fd.get()); size != source.file_size)
            corrupt("is " + std::to_string(size) + " bytes long, but should be " +
                    std::to_string(source.file_size));
        if (source.file_size < data_begin + kStripeTrailerSize)
            corrupt("too short for a stripe");
        const std::vector<std::byte> header = read_part(fd.get(), 0, kStripeHeaderSize);
        check_header(header, expected);
        check_trailer(
            read_part(fd.get(), source.file_size - kStripeTrailerSize, kStripeTrailerSize), source,
            expected, format::hash_at_end(header));
        if (!is_zero(read_part(fd.get(), kStripeHeaderSize, data_begin - kStripeHeaderSize)))
            corrupt("padding after its header is not zero");
        return fd;
    } catch (const Error& e) {
        throw Error(e.code(), "stripe file " + name + ": " + e.what());
    }
}

std::array<Id, kMaxStripes> hash_stripe_entries(Bytes index, unsigned stripes) {
    std::vector<StreamHash128> hashers(stripes);
    for (std::size_t at = 0; stripes > 1 && at < index.size(); at += format::kIndexEntrySize) {
        std::uint16_t source;
        std::memcpy(&source, index.data() + at + format::kIndexSourceOffset, sizeof source);
        if (source != 0 && source < stripes)
            hashers[source].add(index.subspan(at, format::kIndexEntrySize));
    }
    std::array<Id, kMaxStripes> hashes{};
    std::ranges::transform(hashers, hashes.begin(), &StreamHash128::value);
    return hashes;
}

void remove_stripes(int dir_fd, const std::string& image, unsigned first) {
    for (unsigned number = std::max(first, 1U); number < kMaxStripes; ++number) {
        const std::string name = stripe_name(image, number);
        remove_file(dir_fd, name);
        remove_file(dir_fd, PartFile::part_name(name));
    }
}

} // namespace gpustasis
