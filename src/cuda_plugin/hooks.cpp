// SPDX-License-Identifier: Apache-2.0
/// What CRIU calls. Each function here parses nothing and decides nothing: it runs one method of
/// the session behind the one border that no exception passes.
#include "cuda_plugin/criu_abi.hpp"
#include "cuda_plugin/dump_session.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/inherited_files.hpp"
#include "cuda_plugin/low_descriptors.hpp"
#include "cuda_plugin/restore_session.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

constexpr int kNotMine = -ENOTSUP;

/// criu forks children that end by exit(), one for each namespace of the tree: what the session has begun
/// is not theirs to end.
struct EndedByItsMaker {
    pid_t maker = ::getpid();
    template <class Session>
    void operator()(Session* session) const noexcept {
        if (::getpid() == maker)
            delete session;
    }
};

template <class Session>
using Owned = std::unique_ptr<Session, EndedByItsMaker>;

// Made in init(), gone after exit(): the .so is closed then.
Owned<DumpSession> dump;
Owned<RestoreSession> restore;

/// CRIU is C: nothing may be thrown past this line.
template <class Body>
int guarded(const char* what, int pid, Body&& body) noexcept {
    try {
        return std::forward<Body>(body)();
    } catch (const std::exception& e) {
        std::string text = what;
        if (pid != 0)
            text += ": pid " + std::to_string(pid);
        host::error(text + ": " + e.what());
    }
    return criu::kFailed;
}

int init(int stage) {
    try {
        host::require_symbols();
    } catch (const std::exception&) {
        return criu::kFailed; // without its log there is nobody to tell
    }
    return guarded("init", 0, [stage] {
        switch (static_cast<criu::Stage>(stage)) {
        case criu::Stage::pre_dump:
            host::info("nothing to do in a pre-dump: the driver stages GPU memory anew each time");
            break;
        case criu::Stage::dump: {
            const PluginOptions options = host::plugin_options();
            dump = Owned<DumpSession>(new DumpSession(find_config(options), options));
            host::use_interrupt_only_mode();
            break;
        }
        case criu::Stage::restore: {
            const LowDescriptors criu_has; // what the session opens stays open
            restore =
                Owned<RestoreSession>(new RestoreSession(find_config(host::plugin_options())));
            if (!restore->prepare()) {
                restore->finish(true);
                restore.reset();
            }
            break;
        }
        }
        return criu::kDone;
    });
}

void finish(int /*stage*/, int result) {
    if (dump)
        dump->finish(result == 0);
    if (restore)
        restore->finish(result == 0);
    dump.reset();
    restore.reset();
}

int pause_devices(int pid) {
    return guarded("PAUSE_DEVICES", pid,
                   [pid] { return dump && dump->pause(pid) ? criu::kDone : kNotMine; });
}

int checkpoint_devices(int pid) {
    return guarded("CHECKPOINT_DEVICES", pid,
                   [pid] { return dump && dump->checkpoint(pid) ? criu::kDone : kNotMine; });
}

int dump_ext_file(int fd, int /*id*/) {
    return guarded("DUMP_EXT_FILE", 0, [fd] {
        return dump && dump->inherited_files().is_open_in_heir(fd) ? criu::kDone : kNotMine;
    });
}

// criu 4.3 has not set what `retry` points to, and asks again where it is not false. Older ones hand over no second
// argument.
int restore_ext_file(int /*id*/, bool* retry) {
    if (host::asks_whether_to_retry())
        *retry = false;
    return guarded("RESTORE_EXT_FILE", 0, [] {
        return restore && restore->has_inherited_files() ? InheritedFiles::open_stand_in()
                                                         : kNotMine;
    });
}

// criu goes by what this leaves in `status`, its own record of the file, and in `fd`.
int handle_device_vma(int fd, const struct stat* status) {
    return guarded("HANDLE_DEVICE_VMA", 0, [fd, status] {
        auto& known = *const_cast<struct stat*>(status);
        return dump && dump->inherited_files().replace_mapped(fd, known) ? criu::kDone : kNotMine;
    });
}

int resume_devices_late(int pid) {
    return guarded("RESUME_DEVICES_LATE", pid,
                   [pid] { return restore && restore->resume(pid) ? criu::kDone : kNotMine; });
}

} // namespace
} // namespace gpustasis

// The stock plugin's name: a libdir holds one or the other. Image compatibility is decided by the
// inventory's names (dump_session.hpp), not by this one.
extern "C" {
__attribute__((visibility("default"))) gpustasis::criu::PluginDesc CR_PLUGIN_DESC = {
    .name = "cuda_plugin",
    .init = gpustasis::init,
    .exit = gpustasis::finish,
    .version = gpustasis::criu::kPluginVersion,
    .max_hooks = gpustasis::criu::kMaxHooks,
    .hooks =
        {
            nullptr,
            nullptr,
            reinterpret_cast<void*>(&gpustasis::dump_ext_file),
            reinterpret_cast<void*>(&gpustasis::restore_ext_file),
            nullptr,
            nullptr,
            nullptr,
            reinterpret_cast<void*>(&gpustasis::handle_device_vma),
            nullptr,
            reinterpret_cast<void*>(&gpustasis::resume_devices_late),
            reinterpret_cast<void*>(&gpustasis::pause_devices),
            reinterpret_cast<void*>(&gpustasis::checkpoint_devices),
        },
};
}
