// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/dirty_tracker.hpp"

#include "core/error.hpp"
#include "dirty_tracker/soft_dirty.hpp"
#include "dirty_tracker/write_protect.hpp"

namespace gpustasis {
namespace {

std::unique_ptr<DirtyMethod> make(pid_t pid, DirtyBackend backend) {
    if (const std::string reason = why_not(backend); !reason.empty())
        throw Error(Errc::unsupported,
                    std::string(name_of(backend)) + " cannot work on this machine: " + reason);
    if (backend == DirtyBackend::soft_dirty)
        return std::make_unique<SoftDirty>(pid);
    return std::make_unique<WriteProtect>(pid);
}

} // namespace

std::string why_not(DirtyBackend backend) {
    return backend == DirtyBackend::soft_dirty ? SoftDirty::why_not() : WriteProtect::why_not();
}

DirtyTracker::DirtyTracker(pid_t pid, std::optional<DirtyBackend> backend) : pid_(pid) {
    if (backend) {
        method_ = make(pid, *backend);
        backend_ = *backend;
        return;
    }
    try {
        method_ = make(pid, DirtyBackend::write_protect);
        return;
    } catch (const Error& first) {
        if (first.code() == Errc::gone || first.code() == Errc::bad_argument)
            throw;
        try {
            method_ = make(pid, DirtyBackend::soft_dirty);
            backend_ = DirtyBackend::soft_dirty;
        } catch (const Error& second) {
            throw Error(first, std::string(first.what()) + "; " + second.what());
        }
    }
}

DirtyTracker::~DirtyTracker() = default;

void DirtyTracker::mark() {
    const std::lock_guard lock(mutex_);
    method().mark();
}

DirtyPages DirtyTracker::scan(bool remark) {
    const std::lock_guard lock(mutex_);
    DirtyPages pages = method().scan(remark);
    pages.backend = backend_;
    return pages;
}

void DirtyTracker::close() noexcept {
    const std::lock_guard lock(mutex_);
    method_.reset();
}

DirtyMethod& DirtyTracker::method() {
    if (!method_)
        throw Error(Errc::bad_argument,
                    "the tracker of process " + std::to_string(pid_) + " is closed");
    return *method_;
}

} // namespace gpustasis
