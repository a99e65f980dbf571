// SPDX-License-Identifier: Apache-2.0
/// Memory of another process, on a GPU, in this process's GPU address space: custom storage.
#pragma once

#include "driver_emulator/driver/link_clock.hpp"
#include "driver_emulator/driver/passing_fd.hpp"
#include "driver_emulator/driver/storage_table.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace gpustasis::emulator {

/// Immutable, and safe from any thread: it can be used until the last who has it lets go, also when
/// the other process is dead. What it gave back itself can then be read no more.
class StorageMapping {
public:
    /// @param memory the file that `runs` lie in; it is closed at the end
    StorageMapping(std::uint64_t address, int memory, const std::vector<StorageRun>& runs,
                   LinkRates rates);

    [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
    [[nodiscard]] DeviceOrdinal device() const noexcept { return rates_.device; }

    [[nodiscard]] bool contains(std::uint64_t address, std::uint64_t size) const noexcept {
        return address - address_ < size_ && size <= size_ - (address - address_);
    }

    // The range must be contained. invalid_value if the memory is gone. The first two take the time
    // that the GPU's link needs, which all who copy at once share.
    Result read_to_host(std::uint64_t address, void* to, std::uint64_t size) const noexcept;
    Result write_from_host(std::uint64_t address, const void* from,
                           std::uint64_t size) const noexcept;
    Result read(std::uint64_t address, void* to, std::uint64_t size) const noexcept;
    Result write(std::uint64_t address, const void* from, std::uint64_t size) const noexcept;

    /// Repeats `pattern` of `pattern_size` (1, 2 or 4) bytes; zeros give memory back to the host.
    Result fill(std::uint64_t address, const void* pattern, std::size_t pattern_size,
                std::uint64_t size) const noexcept;

private:
    template <typename Visit>
    Result for_each_part(std::uint64_t address, std::uint64_t size, Visit visit) const noexcept;

    std::uint64_t address_;
    std::uint64_t size_ = 0;
    PassingFd memory_;
    std::map<std::uint64_t, StorageRun> runs_; ///< by where they begin in the mapping
    LinkRates rates_;
    mutable std::mutex writing_; ///< of the file, which one thread at a time can write to
};

/// The mappings, and the addresses that some had. The caller serialises calls.
class MappingTable {
public:
    /// Reserves addresses, of an earlier mapping if they are enough. 0 if there are none.
    std::uint64_t reserve(std::uint64_t size);

    void add(const std::shared_ptr<const StorageMapping>& mapping);

    /// Ends a mapping, or gives up what was reserved for one.
    void remove(std::uint64_t address);

    /// What an address lies in; null if that is no mapping.
    [[nodiscard]] std::shared_ptr<const StorageMapping> find(std::uint64_t address) const noexcept;

    /// Whether it is an address of a mapping that has ended: nobody's memory, and not the host's.
    [[nodiscard]] bool is_dead(std::uint64_t address) const noexcept;

private:
    struct Range {
        std::uint64_t size = 0;
        bool taken = false;
        std::shared_ptr<const StorageMapping> mapping; ///< null once it has ended
    };
    [[nodiscard]] const Range* find_range(std::uint64_t address) const noexcept;

    std::map<std::uint64_t, Range> ranges_; ///< by address; reserved until the process ends
};

} // namespace gpustasis::emulator
