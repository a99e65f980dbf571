// SPDX-License-Identifier: Apache-2.0
/// A new image in an arena, written into pages that are there already where the pool has some.
#pragma once

#include "core/image_output.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/arena_room.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace gpustasis {

/// Pages of a tmpfs that come new from the kernel are zeroed and charged first, and then written: a file of a drained
/// checkpoint has them. What is left of it beyond the new image is given back; where that is nearly all, the image is
/// copied into a file of its own, and the pool has the large one for the next dump.
class ArenaOutput final : public ImageOutput {
public:
    /// The file `name` in `directory`, a checkpoint's in `arena`; both stay the caller's, and open. `alignment`: of
    /// the chunks. What is added to the arena is taken from `room`. Throws Error: io.
    ArenaOutput(ArenaRoom& room, int arena, int directory, const std::string& name,
                std::uint32_t alignment);
    ~ArenaOutput() override;

    /// Before anything is written: take room for an image of `size` bytes, and give back what of a file of the pool is more
    /// than that. 0: it is not known. Throws Error: io.
    void reserve(std::uint64_t size);

    /// Bytes that were taken from the room, less what was given to it.
    std::int64_t added() const noexcept { return added_; }

    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override;
    void put(std::uint64_t offset, Bytes bytes) override;
    /// Nothing is synced: memory is no medium.
    void commit(std::uint64_t size) override;
    bool is_direct() const noexcept override { return false; }

private:
    void cut(std::uint64_t size);
    bool return_to_pool(std::uint64_t size);
    void take(std::uint64_t offset, std::uint64_t end);
    void pay(std::uint64_t bytes);
    void give(std::uint64_t bytes) noexcept;

    ArenaRoom& room_;
    int arena_;
    int directory_;
    std::string name_;
    std::string part_;
    std::uint32_t alignment_;
    UniqueFd file_;
    std::uint64_t paid_ =
        0; ///< bytes from the file's beginning that are its own: of the pool, or taken from the room
    std::uint64_t backed_ = 0; ///< the first of these, which have their memory already
    std::atomic<std::int64_t> added_ = 0;
    std::mutex writing_; ///< by write(2)
    bool committed_ = false;
};

/// Give the largest file of the pool of `arena` the name `part` in `directory`. None: the pool is empty. Several
/// processes may take at once. Throws Error: io.
UniqueFd take_from_pool(int arena, int directory, const std::string& part);

} // namespace gpustasis
