// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/exit_kill.hpp"

#include "cuda_plugin/host.hpp"

#include <sys/ptrace.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

std::atomic<ExitKill*> living = nullptr;
// Not by name: in a test, this is the main program itself.
using Ptrace = long (*)(__ptrace_request, ...);
std::atomic<Ptrace> real_ptrace = nullptr;

/// The function to take the place of.
const char* find_ptrace() {
    real_ptrace = reinterpret_cast<Ptrace>(ImportSlot::find_imported("ptrace"));
    return "ptrace";
}

} // namespace

ExitKill::ExitKill(std::function<void(pid_t)> before_detach)
    : before_detach_(std::move(before_detach)), owner_(::getpid()),
      slot_(find_ptrace(), reinterpret_cast<void*>(&ExitKill::ptrace_of_criu)) {
    living = this;
}

ExitKill::~ExitKill() {
    living = nullptr;
}

void ExitKill::end() noexcept {
    living = nullptr;
    for (const auto& [tid, options] : options_)
        if (real_ptrace.load()(PTRACE_SETOPTIONS, tid, nullptr, options) != 0 && errno != ESRCH)
            host::warn("thread " + std::to_string(tid) +
                       " is killed if this criu dies before it has detached from it: " +
                       std::strerror(errno));
    options_.clear();
}

long ExitKill::ptrace_of_criu(int request, pid_t tid, void* address, void* data) noexcept {
    const auto number = static_cast<__ptrace_request>(request);
    ExitKill* self = living;
    if (self == nullptr || self->owner_ != ::getpid())
        return real_ptrace.load()(number, tid, address, data);
    if (number == PTRACE_DETACH) {
        try {
            self->before_detach_(tid);
        } catch (const std::exception& e) {
            host::error(e.what());
        }
        return real_ptrace.load()(number, tid, address,
                                  data); // of a dying task, or of none: an error
    }
    if (number != PTRACE_SEIZE && number != PTRACE_SETOPTIONS)
        return real_ptrace.load()(number, tid, address, data);
    const auto options = reinterpret_cast<long>(data);
    const long result = real_ptrace.load()(number, tid, address, options | PTRACE_O_EXITKILL);
    const int error = errno;
    try {
        if (result == 0)
            self->options_[tid] = options;
    } catch (const std::exception&) {
        host::warn("thread " + std::to_string(tid) + " dies with this criu");
    }
    errno = error;
    return result;
}

} // namespace gpustasis
