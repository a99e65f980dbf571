// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/worker.hpp"

#include "driver_emulator/daemon/executor.hpp"
#include "driver_emulator/daemon/module_table.hpp"
#include "driver_emulator/include/gpustasis_emulator.h"
#include "driver_emulator/packet.hpp"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <grp.h>
#include <memory>
#include <poll.h>
#include <set>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace gpustasis::emulator {
namespace {

// 30 s for the memory of a client that has ended: its worker gives it back, once it gets a processor.
constexpr int kReleaseTries = 6000;
constexpr int kReleasePollMs = 5;

class UniqueFd {
public:
    explicit UniqueFd(int fd = -1) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~UniqueFd() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    int get() const { return fd_; }

private:
    int fd_;
};

/// The client's address space of one GPU: a sparse file, mapped where it is allocated.
struct Window {
    UniqueFd memory;
    std::uint64_t base = 0;
    std::uint64_t size = 0;
    std::map<std::uint64_t, std::uint64_t> segments; // offset -> size
};

/// What a client may send that carries a payload.
union Message {
    WireHeader header;
    AttachDevice attach;
    SegmentRequest segment;
    ModuleRequest module;
    FunctionRequest function;
    LaunchRequest launch;
    unsigned char bytes[sizeof(LaunchRequest) + kMaxParamBytes];
    Message() : bytes{} {}
};

class Worker {
public:
    /// client: a pidfd of it; -1: none is to be had.
    Worker(int socket, int client, const DaemonInfo& info, Ledger& ledger, LedgerSlot& slot,
           CompletionPage& page)
        : socket_(socket), client_(client), info_(info), ledger_(ledger), slot_(slot),
          executor_(page) {}

    void handle(const Message& message, std::size_t size, UniqueFd fd);
    void reply(Result result, int fd = -1, std::uint64_t value = 0, std::uint64_t value2 = 0);

private:
    void attach(const AttachDevice& request);
    bool acquire(unsigned gpu, std::uint64_t size);
    Result map_segment(const SegmentRequest& request);
    Result unmap_segment(const SegmentRequest& request);
    void submit(const Message& message, std::size_t size);
    void release_memory();

    int socket_;
    int client_;
    const DaemonInfo& info_;
    Ledger& ledger_;
    LedgerSlot& slot_;
    Window windows_[kMaxGpus];
    ModuleTable modules_;
    Executor executor_;
};

void Worker::reply(Result result, int fd, std::uint64_t value, std::uint64_t value2) {
    if (!send_struct(socket_, WireReply{kWireMagic, result, value, value2}, fd)) {
        _exit(1);
    }
}

void Worker::attach(const AttachDevice& request) {
    if (request.gpu >= info_.gpu_count || request.window_size % kSegmentSize != 0 ||
        windows_[request.gpu].size != 0) {
        reply(Result::invalid_value);
        return;
    }
    void* wanted = reinterpret_cast<void*>(request.window_base);
    void* got = mmap(wanted, request.window_size, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != wanted) { // the client tries another address, if it still can
        reply(Result::not_ready);
        return;
    }
    UniqueFd memory(memfd_create("gpustasis-emulated-vram", MFD_CLOEXEC));
    if (memory.get() < 0 || ftruncate(memory.get(), static_cast<off_t>(request.window_size)) != 0) {
        reply(Result::operating_system);
        return;
    }
    Window& window = windows_[request.gpu];
    window.memory = std::move(memory);
    window.base = request.window_base;
    window.size = request.window_size;
    slot_.attached |= 1U << request.gpu;
    reply(Result::success, window.memory.get());
}

/// Takes memory of a GPU; that of clients which have just died counts as free.
bool Worker::acquire(unsigned gpu, std::uint64_t size) {
    for (int tries = 0; tries < kReleaseTries; ++tries) {
        if (ledger_.acquire(slot_, gpu, size)) {
            return true;
        }
        if (size > ledger_.capacity(gpu) || !ledger_.is_awaiting_release(slot_)) {
            break;
        }
        pollfd end{client_, POLLIN, 0};
        if (poll(&end, 1, kReleasePollMs) > 0) {
            _exit(0); // its own client has ended, too
        }
    }
    return ledger_.acquire(slot_, gpu, size);
}

Result Worker::map_segment(const SegmentRequest& request) {
    Window& window = windows_[request.gpu];
    if (request.size == 0 || request.size % kSegmentSize != 0 ||
        request.offset % kSegmentSize != 0 || request.offset > window.size ||
        request.size > window.size - request.offset) {
        return Result::invalid_value;
    }
    if (!acquire(request.gpu, request.size)) {
        return Result::out_of_memory;
    }
    void* address = reinterpret_cast<void*>(window.base + request.offset);
    if (mmap(address, request.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             window.memory.get(), static_cast<off_t>(request.offset)) == MAP_FAILED) {
        ledger_.release(slot_, request.gpu, request.size);
        return Result::operating_system;
    }
    window.segments[request.offset] = request.size;
    return Result::success;
}

Result Worker::unmap_segment(const SegmentRequest& request) {
    Window& window = windows_[request.gpu];
    const auto found = window.segments.find(request.offset);
    if (found == window.segments.end() || found->second != request.size) {
        return Result::invalid_value;
    }
    void* address = reinterpret_cast<void*>(window.base + request.offset);
    if (mmap(address, request.size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        return Result::operating_system;
    }
    fallocate(window.memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(request.offset), static_cast<off_t>(request.size));
    window.segments.erase(found);
    ledger_.release(slot_, request.gpu, request.size);
    return Result::success;
}

/// The driver's checkpoint returns when the GPU's memory is free. Left to our exit, that would take
/// processors from whoever goes on with the client's answer in hand. Cut off, not only unmapped:
/// a forked child of the client may hold the file. Those of several GPUs at once: one thread would
/// need processor time for each of them in turn, which no GPU does.
void Worker::release_memory() {
    signal(SIGBUS, [](int) { _exit(0); }); // a kernel that still runs ends with its memory
    std::vector<std::thread> others;
    for (const Window& window : windows_) {
        if (window.size == 0) {
            continue;
        }
        const auto release = [&window] {
            if (ftruncate(window.memory.get(), 0) != 0) {
                _exit(1);
            }
        };
        try {
            others.emplace_back(release);
        } catch (const std::system_error&) { // the client's user may have no more threads
            release();
        }
    }
    for (std::thread& other : others) {
        other.join();
    }
    ledger_.release_all(slot_);
}

void Worker::submit(const Message& message, std::size_t size) {
    const LaunchRequest& request = message.launch;
    Launch launch;
    launch.sequence = request.sequence;
    const char* name_end =
        static_cast<const char*>(std::memchr(request.name, '\0', sizeof request.name));
    const gpustasis_emulator::Kernel* kernel =
        name_end == nullptr ? nullptr : modules_.find(request.module, request.name);
    if (size < sizeof request || size - sizeof request != request.param_bytes ||
        describe(kernel).reply.result != Result::success ||
        kernel->param_bytes != request.param_bytes) {
        launch.refused = Result::invalid_value;
    } else {
        launch.run = kernel->run;
        std::memcpy(launch.grid, request.grid, sizeof launch.grid);
        std::memcpy(launch.block, request.block, sizeof launch.block);
        const unsigned char* params = message.bytes + sizeof request;
        launch.params.assign(params, params + request.param_bytes);
    }
    executor_.submit(std::move(launch));
}

void Worker::handle(const Message& message, std::size_t size, UniqueFd fd) {
    const auto is = [size](WireOp op, WireOp wanted, std::size_t length) {
        return op == wanted && size == length;
    };
    const WireOp op = message.header.op;
    if (op == WireOp::launch) {
        submit(message, size);
    } else if (is(op, WireOp::detach_client, sizeof(WireHeader))) {
        release_memory();
        reply(Result::success);
        _exit(0);
    } else if (is(op, WireOp::attach_device, sizeof(AttachDevice))) {
        attach(message.attach);
    } else if (size == sizeof(SegmentRequest) && message.segment.gpu < info_.gpu_count &&
               op == WireOp::memory_info) {
        const unsigned gpu = message.segment.gpu;
        reply(Result::success, -1, ledger_.capacity(gpu) - ledger_.used(gpu),
              ledger_.capacity(gpu));
    } else if (is(op, WireOp::map_segment, sizeof(SegmentRequest)) &&
               message.segment.gpu < info_.gpu_count) {
        reply(map_segment(message.segment));
    } else if (is(op, WireOp::unmap_segment, sizeof(SegmentRequest)) &&
               message.segment.gpu < info_.gpu_count) {
        reply(unmap_segment(message.segment));
    } else if (is(op, WireOp::load_module, sizeof(ModuleRequest)) && fd.get() >= 0) {
        reply(modules_.load(message.module.module, fd.get()));
    } else if (is(op, WireOp::unload_module, sizeof(ModuleRequest))) {
        reply(modules_.unload(message.module.module));
    } else if (is(op, WireOp::find_function, sizeof(FunctionRequest)) &&
               std::memchr(message.function.name, '\0', sizeof message.function.name) != nullptr) {
        const FunctionReply answer =
            describe(modules_.find(message.function.module, message.function.name));
        if (!send_struct(socket_, answer)) {
            _exit(1);
        }
    } else {
        reply(Result::invalid_value);
    }
}

/// Runs the client's code with the client's rights, no more. Only root can, and has to.
void take_identity(const ucred& peer) {
    if (geteuid() == 0 && peer.uid != 0 &&
        (setgroups(0, nullptr) != 0 || setresgid(peer.gid, peer.gid, peer.gid) != 0 ||
         setresuid(peer.uid, peer.uid, peer.uid) != 0)) {
        _exit(1);
    }
}

} // namespace

void run_worker(int socket, const ucred& peer, const DaemonInfo& info, Ledger& ledger,
                LedgerSlot& slot, const AttachClient& hello) {
    take_identity(peer);
    const UniqueFd page_fd(memfd_create("gpustasis-emulated-doorbell", MFD_CLOEXEC));
    void* memory = MAP_FAILED;
    if (page_fd.get() >= 0 && ftruncate(page_fd.get(), sizeof(CompletionPage)) == 0) {
        memory = mmap(nullptr, sizeof(CompletionPage), PROT_READ | PROT_WRITE, MAP_SHARED,
                      page_fd.get(), 0);
    }
    if (memory == MAP_FAILED) {
        _exit(1);
    }
    auto& page = *static_cast<CompletionPage*>(memory); // zeroes are its initial state
    page.completed = hello.completed;

    // A forked child of the client keeps its end open, so the end of the client is seen by its pid.
    const UniqueFd client(peer.pid > 0 ? static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0))
                                       : -1);
    const auto worker = std::make_unique<Worker>(socket, client.get(), info, ledger, slot, page);
    worker->reply(Result::success, page_fd.get());
    const auto message = std::make_unique<Message>();
    while (true) {
        pollfd events[] = {{socket, POLLIN, 0}, {client.get(), POLLIN, 0}};
        if (poll(events, 2, -1) < 0) {
            continue;
        }
        if ((events[1].revents & POLLIN) != 0) {
            _exit(0);
        }
        if (events[0].revents == 0) {
            continue;
        }
        int fd = -1;
        const ssize_t size = receive_packet(socket, message.get(), sizeof(Message), &fd);
        UniqueFd attachment(fd);
        if (size < static_cast<ssize_t>(sizeof(WireHeader)) ||
            message->header.magic != kWireMagic) {
            _exit(0);
        }
        worker->handle(*message, static_cast<std::size_t>(size), std::move(attachment));
    }
}

} // namespace gpustasis::emulator
