/// Stripe files (docs/format.md): more files that hold chunk data of one image.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"
#include "core/unique_fd.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// Files that the chunk data of one image can be in: its own, which is stripe 0, and stripe files.
inline constexpr unsigned kMaxStripes = 16;

inline constexpr std::size_t kStripeHeaderSize = 96;
inline constexpr std::size_t kStripeTrailerSize = 64;

/// The file of stripe `number` of the image file `image`: that of 2 of "gpustasis-7.img" is
/// "gpustasis-7.2.img"; 0: the image file itself.
std::string stripe_name(const std::string& image, unsigned number);

/// What a stripe file says about itself.
struct Stripe {
    Id checkpoint_id{};
    std::uint32_t pid = 0;
    std::uint32_t number = 0; ///< 1 … kMaxStripes - 1
    std::uint32_t alignment = 0;
    Id entries_hash{}; ///< of the index entries of all chunks in it, in their order
};

/// Write header and trailer around the chunk data in `fd`, which ends at `data_end`, padding
/// included. Returns the file as a source of its image: depth 0. Throws Error: io.
Source write_stripe_frame(int fd, const Stripe& stripe, std::uint64_t data_end);

/// Open the stripe file `name`, which must be `expected` and have the size and digest that `source`
/// says. Checks everything but the chunks and the padding after them.
/// Throws Error: io if it is missing, corrupt_data if it is another one or damaged, unsupported;
/// what() names the file.
UniqueFd open_stripe(int dir_fd, const std::string& name, const Source& source,
                     const Stripe& expected);

/// For each stripe below `stripes`, Stripe::entries_hash by a whole packed index of an image that has
/// so many; [0] is of no use.
std::array<Id, kMaxStripes> hash_stripe_entries(Bytes index, unsigned stripes);

/// Remove the stripe files of `image` from number `first` on, and what writers of them left
/// half-done: an earlier image of the name may have had more. Throws Error: io.
void remove_stripes(int dir_fd, const std::string& image, unsigned first);

} // namespace gpustasis
