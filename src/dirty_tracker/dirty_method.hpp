// SPDX-License-Identifier: Apache-2.0
/// One way of seeing writes; DirtyTracker chooses.
#pragma once

#include "dirty_tracker/dirty_pages.hpp"

namespace gpustasis {

class DirtyMethod {
public:
    DirtyMethod() = default;
    DirtyMethod(const DirtyMethod&) = delete;
    DirtyMethod& operator=(const DirtyMethod&) = delete;
    virtual ~DirtyMethod() = default;

    /// As DirtyTracker::mark() and scan(); `backend` of the result is the caller's to set.
    virtual void mark() = 0;
    virtual DirtyPages scan(bool remark) = 0;
};

} // namespace gpustasis
