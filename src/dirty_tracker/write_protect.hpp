// SPDX-License-Identifier: Apache-2.0
/// Writes seen by userfaultfd in asynchronous write-protect mode and PAGEMAP_SCAN.
#pragma once

#include "dirty_tracker/address_space.hpp"
#include "dirty_tracker/dirty_pages.hpp"
#include "dirty_tracker/userfault.hpp"
#include "tracee/page_scan.hpp"

#include <cstdint>
#include <map>
#include <string>

namespace gpustasis {

class WriteProtect : public DirtyMethod {
public:
    /// Throws Error: unsupported, gone, bad_argument, io.
    explicit WriteProtect(pid_t pid);
    ~WriteProtect() override;

    void mark() override;
    DirtyPages scan(bool remark) override;

    /// Empty if it works here, else why not.
    static std::string why_not();

private:
    DirtyPages scan_all(bool remark);
    /// Appends the written pages of one mapping. False if it cannot be tracked.
    bool scan_mapping(const Mapping& mapping, ScanMode mode, std::vector<PageRange>& written);
    std::uint64_t populated_bytes(const Mapping& mapping);
    /// Whether memory may be registered now: not while another process traces this one.
    bool may_take() const;
    /// Have [start, end) tracked, and remember it. False if the kernel refuses it.
    bool take(std::uint64_t start, std::uint64_t end);
    /// End the tracking of [start, end), unless it is another userfaultfd's by now.
    void give_up(std::uint64_t start, std::uint64_t end);
    /// The first of what was taken that ends behind `start`.
    std::map<std::uint64_t, std::uint64_t>::iterator first_of(std::uint64_t start);

    AddressSpace space_;
    Userfault userfault_;
    PageScanner scanner_;
    std::vector<PageRange> buffer_;
    std::map<std::uint64_t, std::uint64_t> ours_; ///< ends of what was taken, by start
};

} // namespace gpustasis
