// SPDX-License-Identifier: Apache-2.0
/// Writes seen by userfaultfd in asynchronous write-protect mode and PAGEMAP_SCAN.
#pragma once

#include "dirty_tracker/address_space.hpp"
#include "dirty_tracker/dirty_pages.hpp"
#include "dirty_tracker/page_scan.hpp"
#include "dirty_tracker/userfault.hpp"

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

    AddressSpace space_;
    Userfault userfault_;
    PageScanner scanner_;
    std::vector<PageRange> buffer_;
};

} // namespace gpustasis
