// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/daemon/server.hpp"

#include "driver_emulator/daemon/admin_text.hpp"
#include "driver_emulator/daemon/worker.hpp"
#include "driver_emulator/packet.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

namespace gpustasis::emulator {
namespace {

[[noreturn]] void fail(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

/// Nothing a client does, or leaves undone, may hold the daemon up for longer.
constexpr timeval kClientPatience{2, 0};

union ShortRequest {
    WireHeader header;
    PlanRequest plan;
    ProcessesRequest processes;
    AttachClient attach;
    char bytes[kMaxAdminText];
    ShortRequest() : bytes{} {}
};

ucred peer_of(int socket) {
    ucred peer{};
    socklen_t size = sizeof peer;
    getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return peer;
}

void read_name(pid_t pid, char (&name)[16]) {
    std::memset(name, 0, sizeof name);
    const std::string path = "/proc/" + std::to_string(pid) + "/comm";
    std::FILE* file = std::fopen(path.c_str(), "re");
    if (file != nullptr) {
        if (std::fgets(name, sizeof name, file) != nullptr) {
            name[std::strcspn(name, "\n")] = '\0';
        }
        std::fclose(file);
    }
}

} // namespace

Server::Server(Machine machine)
    : machine_(std::move(machine)), ledger_(Ledger::create(machine_.info)) {
    rlimit files{};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);

    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigprocmask(SIG_BLOCK, &mask, nullptr);
    signals_ = signalfd(-1, &mask, SFD_CLOEXEC);

    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (machine_.socket_path.size() >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        fail(machine_.socket_path);
    }
    std::memcpy(address.sun_path, machine_.socket_path.c_str(), machine_.socket_path.size() + 1);
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (signals_ < 0 || listener_ < 0) {
        fail("socket");
    }
    links_ = memfd_create("gpustasis-emulated-links", MFD_CLOEXEC);
    if (links_ < 0 || ftruncate(links_, sizeof(LinkPage)) != 0) {
        fail("memory for the GPUs' links");
    }
    // Any user's programs may use the GPUs, as with a real driver; workers run as the user.
    const mode_t old = umask(0);
    const int bound = bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address);
    umask(old);
    if (bound != 0 || listen(listener_, 128) != 0) {
        fail(machine_.socket_path);
    }
    make_device_files();
    if (machine_.ready_fd >= 0) {
        if (write(machine_.ready_fd, "1", 1) != 1) {
            fail("ready-fd");
        }
        close(machine_.ready_fd);
    }
}

Server::~Server() {
    if (listener_ >= 0) {
        close(listener_);
        unlink(machine_.socket_path.c_str());
        remove_device_files();
    }
    for (const int fd : {signals_, links_}) {
        if (fd >= 0) {
            close(fd);
        }
    }
}

std::string Server::device_directory() const {
    return machine_.socket_path.substr(0, machine_.socket_path.rfind('/') + 1) + "dev";
}

/// They only have names: which GPUs a process can see is told by those that it has open.
void Server::make_device_files() const {
    const std::string directory = device_directory();
    if (mkdir(directory.c_str(), 0755) != 0 && errno != EEXIST) {
        fail(directory);
    }
    for (const std::string& name : device_names()) {
        std::string path = directory;
        path.append("/").append(name);
        const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd < 0 || ftruncate(fd, sysconf(_SC_PAGESIZE)) != 0) {
            fail(path);
        }
        close(fd);
    }
}

void Server::remove_device_files() const {
    for (const std::string& name : device_names()) {
        unlink((device_directory() + "/" + name).c_str());
    }
    rmdir(device_directory().c_str());
}

std::vector<std::string> Server::device_names() const {
    std::vector<std::string> names = {"nvidia-uvm"};
    for (unsigned i = 0; i < machine_.info.gpu_count; ++i) {
        names.push_back("nvidia" + std::to_string(i));
    }
    return names;
}

void Server::run() {
    while (!stopping_) {
        pollfd events[] = {{listener_, POLLIN, 0}, {signals_, POLLIN, 0}};
        if (poll(events, 2, -1) < 0) {
            continue;
        }
        if (events[1].revents != 0) {
            signalfd_siginfo signal{};
            if (read(signals_, &signal, sizeof signal) == sizeof signal &&
                signal.ssi_signo != SIGCHLD) {
                stopping_ = true;
            }
            reap_workers();
        }
        if (events[0].revents != 0) {
            accept_one();
        }
    }
    // The GPUs go away: so does what was on them. Clients see a dead connection.
    for (unsigned i = 0; i < kMaxClients; ++i) {
        if (const pid_t worker = ledger_.slots()[i].worker; worker > 0) {
            kill(worker, SIGKILL);
        }
    }
}

void Server::accept_one() {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
        return;
    }
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &kClientPatience, sizeof kClientPatience);
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &kClientPatience, sizeof kClientPatience);
    if (!serve(socket)) {
        std::fprintf(stderr, "bad or late request from pid %d\n", peer_of(socket).pid);
    }
    close(socket);
}

bool Server::serve(int socket) {
    ShortRequest request;
    const ssize_t size = receive_packet(socket, &request, sizeof request);
    if (size < static_cast<ssize_t>(sizeof(WireHeader)) || request.header.magic != kWireMagic) {
        return false;
    }
    const auto length = static_cast<std::size_t>(size);
    switch (request.header.op) {
    case WireOp::info: return send_struct(socket, current_info());
    case WireOp::plan: {
        if (length != sizeof(PlanRequest)) {
            return false;
        }
        OperationPlan plan = machine_.times;
        faults_.apply(request.plan.operation, peer_of(socket).pid, plan);
        return send_struct(socket, plan);
    }
    case WireOp::admin: {
        reap_workers();
        const std::string answer =
            administer({request.bytes + sizeof(WireHeader), length - sizeof(WireHeader)});
        return send_packet(socket, {{const_cast<char*>(answer.data()), answer.size()}});
    }
    case WireOp::attach_client:
        if (length != sizeof(AttachClient)) {
            return false;
        }
        fork_worker(socket, request.attach);
        return true;
    case WireOp::processes:
        return length == sizeof(ProcessesRequest) && request.processes.gpu < kMaxGpus &&
               send_struct(socket, processes_of(request.processes.gpu));
    case WireOp::links:
        return send_struct(socket, WireReply{kWireMagic, Result::success, 0, 0}, links_);
    default: return false;
    }
}

ProcessList Server::processes_of(unsigned gpu) {
    reap_workers();
    ProcessList list{};
    list.magic = kWireMagic;
    for (unsigned i = 0; i < kMaxClients; ++i) {
        const LedgerSlot& slot = ledger_.slots()[i];
        if (slot.worker == 0 || (slot.attached.load() >> gpu & 1) == 0) {
            continue;
        }
        auto& entry = list.entries[list.count++];
        entry.pid = slot.client;
        entry.used = slot.used[gpu].load();
    }
    return list;
}

void Server::fork_worker(int socket, const AttachClient& hello) {
    reap_workers(); // a client that is restored may be back before its old worker was reaped
    LedgerSlot* slot = ledger_.find_free_slot();
    if (slot == nullptr) {
        static_cast<void>(send_struct(socket, WireReply{kWireMagic, Result::out_of_memory, 0, 0}));
        return;
    }
    const ucred peer = peer_of(socket);
    Ledger::assign(*slot, peer.pid);
    read_name(peer.pid, slot->name);
    std::memcpy(slot->device, hello.device, sizeof slot->device - 1);
    std::memcpy(slot->mapping, hello.mapping, sizeof slot->mapping - 1);
    const pid_t daemon = getpid();
    const pid_t worker = fork();
    if (worker == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != daemon) {
            _exit(1);
        }
        prctl(PR_SET_NAME, "gpustasis-gpuwrk");
        constexpr timeval kForEver{0, 0};
        setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &kForEver, sizeof kForEver);
        setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &kForEver, sizeof kForEver);
        const int own = dup2(socket, 3);
        syscall(SYS_close_range, 4U, ~0U, 0U);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, nullptr);
        run_worker(own, peer, machine_.info, ledger_, *slot, hello);
    }
    if (worker < 0) {
        static_cast<void>(
            send_struct(socket, WireReply{kWireMagic, Result::operating_system, 0, 0}));
        return;
    }
    slot->worker = worker;
}

void Server::reap_workers() {
    int status = 0;
    pid_t worker = 0;
    while ((worker = waitpid(-1, &status, WNOHANG)) > 0) {
        LedgerSlot* slot = ledger_.find_worker(worker);
        if (slot == nullptr) {
            continue;
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            std::fprintf(stderr, "worker of pid %d died: status 0x%x\n", slot->client,
                         static_cast<unsigned>(status));
        }
        ledger_.forget(*slot);
    }
}

DaemonInfo Server::current_info() const {
    DaemonInfo info = machine_.info;
    for (unsigned i = 0; i < info.gpu_count; ++i) {
        info.gpus[i].used = ledger_.used(i);
    }
    return info;
}

std::string Server::administer(std::string_view text) {
    const std::vector<std::string_view> words = split(text);
    try {
        if (words.size() == 1 && words[0] == "status") {
            return status_json();
        }
        if (words.size() == 1 && words[0] == "stop") {
            stopping_ = true;
            return R"({"ok": true})";
        }
        if (words.size() == 3 && words[0] == "set") {
            set_knob(machine_, words[1], words[2]);
            return R"({"ok": true})";
        }
        if (words.size() == 2 && words[0] == "fault" && words[1] == "clear") {
            faults_.clear();
            return R"({"ok": true})";
        }
        if (words.size() > 2 && words[0] == "fault" && words[1] == "add") {
            const unsigned number = faults_.add({words.begin() + 2, words.end()});
            return R"({"ok": true, "number": )" + std::to_string(number) + '}';
        }
        throw std::invalid_argument("not understood: " + std::string(text));
    } catch (const std::invalid_argument& error) {
        return R"({"ok": false, "error": )" + quoted(error.what()) + '}';
    }
}

std::string Server::status_json() const {
    const DaemonInfo info = current_info();
    std::string text =
        "{\"ok\": true, \"backend\": \"emulator\", \"pid\": " + std::to_string(getpid()) +
        ", \"socket\": " + quoted(machine_.socket_path) +
        ", \"api_version\": " + std::to_string(info.api_version) +
        ", \"driver_version\": " + quoted(info.driver_version) + ", \"settings\": {" +
        knobs_json(machine_) + "}, \"faults\": " + faults_.json() + ", \"gpus\": [";
    for (unsigned gpu = 0; gpu < info.gpu_count; ++gpu) {
        text += gpu > 0 ? ", " : "";
        text += "{\"name\": " + quoted(info.gpus[gpu].name) +
                ", \"uuid\": " + quoted(format_uuid(info.gpus[gpu].uuid)) +
                ", \"memory_bytes\": " + std::to_string(info.gpus[gpu].memory) +
                ", \"used_bytes\": " + std::to_string(info.gpus[gpu].used) + ", \"processes\": [";
        bool first = true;
        for (unsigned i = 0; i < kMaxClients; ++i) {
            const LedgerSlot& slot = ledger_.slots()[i];
            if (slot.worker == 0 || (slot.attached.load() >> gpu & 1) == 0) {
                continue;
            }
            text += first ? "" : ", ";
            text += "{\"pid\": " + std::to_string(slot.client) +
                    ", \"name\": " + quoted(slot.name) +
                    ", \"device_stand_in\": " + quoted(slot.device) +
                    ", \"mapping_stand_in\": " + quoted(slot.mapping) +
                    ", \"used_bytes\": " + std::to_string(slot.used[gpu].load()) + "}";
            first = false;
        }
        text += "]}";
    }
    return text + "]}";
}

} // namespace gpustasis::emulator
