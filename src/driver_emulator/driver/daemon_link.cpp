// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/daemon_link.hpp"

#include "driver_emulator/driver/futex.hpp"
#include "driver_emulator/packet.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

constexpr const char* kDevicesVariable = "GPUSTASIS_EMULATOR_DEV";
constexpr const char* kDefaultPath = "/run/gpustasis-emulator/default/socket";

constexpr unsigned kAskAttempts = 8;

/// A task may be frozen, or dumped and restored, while it asks: the daemon has not waited for it,
/// or its socket has nobody behind it any more. It then asks again.
template <typename Request, typename Reply>
bool ask(const Request& request, Reply& reply) noexcept {
    bool done = false;
    for (unsigned attempt = 0; attempt < kAskAttempts && !done; ++attempt) {
        const int socket = connect_daemon(daemon_path());
        if (socket >= 0) {
            done = send_struct(socket, request) && receive_struct(socket, reply);
            close(socket);
        }
    }
    return done;
}

/// As in a container that has some of the machine's device files.
void keep_visible(DaemonInfo& info) noexcept {
    unsigned kept = 0;
    for (unsigned i = 0; i < info.gpu_count; ++i) {
        char path[256];
        std::snprintf(path, sizeof path, "%s/nvidia%u", device_directory(), info.gpus[i].minor);
        if (access(path, F_OK) == 0) {
            info.gpus[kept++] = info.gpus[i];
        }
    }
    info.gpu_count = kept;
}

} // namespace

const char* daemon_path() noexcept {
    static char path[108];
    static std::once_flag once;
    std::call_once(once, [] {
        const char* set = std::getenv("GPUSTASIS_EMULATOR");
        const char* chosen = set != nullptr && *set != '\0' ? set : kDefaultPath;
        std::strncpy(path, chosen, sizeof path - 1);
    });
    return path;
}

const char* device_directory() noexcept {
    static char path[sizeof DaemonInfo::device_path + 108];
    static std::once_flag once;
    std::call_once(once, [] {
        const char* set = std::getenv(kDevicesVariable);
        if (set != nullptr && *set != '\0') {
            std::strncpy(path, set, sizeof path - 1);
            return;
        }
        const char* slash = std::strrchr(daemon_path(), '/');
        const auto length =
            slash == nullptr ? 0 : static_cast<std::size_t>(slash - daemon_path() + 1);
        std::memcpy(path, daemon_path(), length);
        std::strcpy(path + length, "dev");
    });
    return path;
}

bool ask_info(DaemonInfo& info) noexcept {
    if (!ask(WireHeader{kWireMagic, WireOp::info}, info) || info.magic != kWireMagic ||
        info.gpu_count > kMaxGpus) {
        return false;
    }
    if (std::getenv(kDevicesVariable) != nullptr) {
        keep_visible(info);
    }
    return true;
}

bool ask_processes(unsigned gpu, ProcessList& list) noexcept {
    const ProcessesRequest request{{kWireMagic, WireOp::processes}, gpu, 0};
    return ask(request, list) && list.magic == kWireMagic && list.count <= kMaxClients;
}

OperationPlan ask_plan(Operation operation) noexcept {
    OperationPlan plan{};
    if (!ask(PlanRequest{{kWireMagic, WireOp::plan}, operation}, plan)) {
        return {};
    }
    return plan;
}

int ask_links() noexcept {
    int file = -1;
    WireReply reply{};
    const int socket = connect_daemon(daemon_path());
    if (socket >= 0) {
        static_cast<void>(send_struct(socket, WireHeader{kWireMagic, WireOp::links}) &&
                          receive_packet(socket, &reply, sizeof reply, &file) > 0);
        close(socket);
    }
    return file;
}

Result DaemonLink::open(const char* device, const char* mapping) noexcept {
    AttachClient hello{{kWireMagic, WireOp::attach_client}, submitted_.load(), {}, {}};
    std::strncpy(hello.device, device, sizeof hello.device - 1);
    std::strncpy(hello.mapping, mapping, sizeof hello.mapping - 1);
    socket_ = connect_daemon(daemon_path());
    if (socket_ < 0) {
        return Result::operating_system;
    }
    WireReply reply{};
    int fd = -1;
    Result result = exchange(&hello, sizeof hello, reply, -1, &fd);
    void* page = MAP_FAILED;
    if (fd >= 0) {
        page = mmap(nullptr, sizeof(CompletionPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ::close(fd);
    }
    if (result == Result::success && page == MAP_FAILED) {
        result = Result::operating_system;
    }
    if (result != Result::success) {
        ::close(socket_);
        socket_ = -1;
        return result;
    }
    page_ = static_cast<CompletionPage*>(page);
    lost_ = 0;
    return Result::success;
}

void DaemonLink::close() noexcept {
    if (socket_ >= 0) {
        const WireHeader request{kWireMagic, WireOp::detach_client};
        WireReply reply{};
        exchange(&request, sizeof request, reply); // a worker that is gone has given back as well
        ::close(socket_);
        socket_ = -1;
    }
    if (page_ != nullptr) {
        munmap(page_, sizeof(CompletionPage));
        page_ = nullptr;
    }
}

Result DaemonLink::exchange(const void* request, std::size_t size, WireReply& reply, int send_fd,
                            int* receive_fd) noexcept {
    const std::lock_guard lock(mutex_);
    if (!send_packet(socket_, {{const_cast<void*>(request), size}}, send_fd) ||
        receive_packet(socket_, &reply, sizeof reply, receive_fd) !=
            static_cast<ssize_t>(sizeof reply) ||
        reply.magic != kWireMagic) {
        return Result::operating_system;
    }
    return reply.result;
}

Result DaemonLink::attach_device(unsigned gpu, std::uint64_t window_base, std::uint64_t window_size,
                                 int* memory) noexcept {
    const AttachDevice request{
        {kWireMagic, WireOp::attach_device}, gpu, 0, window_base, window_size};
    WireReply reply{};
    return exchange(&request, sizeof request, reply, -1, memory);
}

Result DaemonLink::map_segment(unsigned gpu, std::uint64_t offset, std::uint64_t size) noexcept {
    const SegmentRequest request{{kWireMagic, WireOp::map_segment}, gpu, 0, offset, size};
    WireReply reply{};
    return exchange(&request, sizeof request, reply);
}

Result DaemonLink::unmap_segment(unsigned gpu, std::uint64_t offset, std::uint64_t size) noexcept {
    const SegmentRequest request{{kWireMagic, WireOp::unmap_segment}, gpu, 0, offset, size};
    WireReply reply{};
    return exchange(&request, sizeof request, reply);
}

Result DaemonLink::memory_info(unsigned gpu, std::uint64_t* free, std::uint64_t* total) noexcept {
    const SegmentRequest request{{kWireMagic, WireOp::memory_info}, gpu, 0, 0, 0};
    WireReply reply{};
    const Result result = exchange(&request, sizeof request, reply);
    *free = reply.value;
    *total = reply.value2;
    return result;
}

Result DaemonLink::load_module(std::uint64_t module, const void* image, std::size_t size) noexcept {
    const int fd = memfd_create("gpustasis-emulated-module", MFD_CLOEXEC);
    if (fd < 0) {
        return Result::operating_system;
    }
    Result result = Result::success;
    for (std::size_t done = 0; done < size && result == Result::success;) {
        const ssize_t written = write(fd, static_cast<const char*>(image) + done, size - done);
        if (written <= 0) {
            result = errno == EFAULT ? Result::invalid_image : Result::out_of_memory;
        } else {
            done += static_cast<std::size_t>(written);
        }
    }
    if (result == Result::success) {
        const ModuleRequest request{{kWireMagic, WireOp::load_module}, module};
        WireReply reply{};
        result = exchange(&request, sizeof request, reply, fd);
    }
    ::close(fd);
    return result;
}

Result DaemonLink::unload_module(std::uint64_t module) noexcept {
    const ModuleRequest request{{kWireMagic, WireOp::unload_module}, module};
    WireReply reply{};
    return exchange(&request, sizeof request, reply);
}

Result DaemonLink::find_function(std::uint64_t module, const char* name,
                                 FunctionReply& reply) noexcept {
    FunctionRequest request{{kWireMagic, WireOp::find_function}, module, {}};
    if (std::strlen(name) >= sizeof request.name) {
        return Result::not_found;
    }
    std::strcpy(request.name, name);
    const std::lock_guard lock(mutex_);
    if (!send_struct(socket_, request) || !receive_struct(socket_, reply)) {
        return Result::operating_system;
    }
    return reply.reply.result;
}

Result DaemonLink::launch(LaunchRequest& request, const void* params, std::uint64_t* sequence) {
    const std::lock_guard lock(mutex_);
    request.sequence = submitted_.load() + 1;
    if (!deferred_.empty()) {
        const auto* bytes = static_cast<const unsigned char*>(params);
        deferred_.push_back({request.sequence, {}, request, {bytes, bytes + request.param_bytes}});
        pending_.fetch_add(1);
    } else if (!send_packet(socket_, {{&request, sizeof request},
                                      {const_cast<void*>(params), request.param_bytes}})) {
        return Result::launch_failed;
    }
    *sequence = request.sequence;
    submitted_ = request.sequence;
    return Result::success;
}

void DaemonLink::defer(std::function<Result(Result)> body, std::uint64_t* sequence) {
    {
        const std::lock_guard lock(mutex_);
        const std::uint64_t number = submitted_.load() + 1;
        deferred_.push_back({number, std::move(body), {}, {}});
        pending_.fetch_add(1);
        *sequence = number;
        submitted_ = number;
    }
    deferrals_.fetch_add(1);
    futex_wake(deferrals_);
}

void DaemonLink::do_deferred() noexcept {
    const std::uint32_t seen = deferrals_.load();
    if (is_idle()) {
        futex_wait(deferrals_, seen, 0);
        return;
    }
    Deferred* front = nullptr; // a deque leaves its elements where they are
    {
        const std::lock_guard lock(mutex_);
        front = &deferred_.front();
    }
    if (front->body) {
        const Result before = wait(front->sequence - 1);
        const Result result = front->body(before);
        if (before == Result::success && result != Result::success) {
            lose(result);
        }
        finish(front->sequence);
    }
    {
        const std::lock_guard lock(mutex_);
        if (!front->body && sticky_error() == Result::success &&
            !send_packet(socket_, {{&front->request, sizeof front->request},
                                   {front->params.data(), front->params.size()}})) {
            lose(Result::launch_failed);
        }
        deferred_.pop_front();
    }
    pending_.fetch_sub(1);
}

/// The worker has nothing under way: what comes later has not been sent to it.
void DaemonLink::finish(std::uint64_t sequence) noexcept {
    page_->done_ns[sequence % CompletionPage::kTimes] = now_ns();
    page_->completed = sequence;
    page_->ticks.fetch_add(1);
    futex_wake(page_->ticks);
}

bool DaemonLink::is_done(std::uint64_t sequence) const noexcept {
    return page_ == nullptr || page_->completed.load() >= sequence;
}

std::uint64_t DaemonLink::done_ns(std::uint64_t sequence) const noexcept {
    if (page_ == nullptr || sequence + CompletionPage::kTimes <= submitted_.load()) {
        return 0;
    }
    return page_->done_ns[sequence % CompletionPage::kTimes].load();
}

Result DaemonLink::wait(std::uint64_t sequence, std::uint32_t milliseconds) noexcept {
    const std::uint64_t start = now_ns();
    while (!is_done(sequence)) {
        const Result error = sticky_error();
        if (error != Result::success) {
            return error;
        }
        if (milliseconds != 0 && now_ns() - start >= milliseconds * std::uint64_t{1'000'000}) {
            return Result::not_ready;
        }
        const std::uint32_t ticks = page_->ticks.load();
        if (!is_done(sequence)) {
            futex_wait(page_->ticks, ticks, milliseconds == 0 || milliseconds > 50 ? 50 : 1);
        }
        if (!is_done(sequence) && is_worker_gone()) {
            lost_ = static_cast<int>(Result::launch_failed);
        }
    }
    return sticky_error();
}

bool DaemonLink::is_worker_gone() const noexcept {
    pollfd event{socket_, POLLRDHUP, 0};
    return poll(&event, 1, 0) == 1 && (event.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

Result DaemonLink::sticky_error() const noexcept {
    const int error = page_ == nullptr ? 0 : page_->error.load();
    return static_cast<Result>(error != 0 ? error : lost_.load());
}

} // namespace gpustasis::emulator
