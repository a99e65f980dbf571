// SPDX-License-Identifier: Apache-2.0
/// Our own declarations of CRIU's plugin interface, so that building needs no CRIU headers.
/// Source: criu-plugin.h of CRIU 4.1 (plugin interface version 0.2.0), unchanged in 4.2; 4.3 hands RESTORE_EXT_FILE a
/// second argument;
/// the integration tests load the plugin into each of them.
#pragma once

#include <cstdint>

namespace gpustasis::criu {

/// CR_PLUGIN_STAGE__*
enum class Stage : int { dump = 0, pre_dump = 1, restore = 2 };

/// CR_PLUGIN_HOOK__*: those we use
inline constexpr int kHookDumpExtFile = 2;
inline constexpr int kHookRestoreExtFile = 3;
inline constexpr int kHookHandleDeviceVma = 7;
inline constexpr int kHookResumeDevicesLate = 9;
inline constexpr int kHookPauseDevices = 10;
inline constexpr int kHookCheckpointDevices = 11;

/// How many hooks we declare. A plugin that declares more than the host knows is refused, one
/// that declares fewer is not: 12 loads in 4.1, 4.2 and 4.3.
inline constexpr unsigned kMaxHooks = 12;

/// CRIU_PLUGIN_GEN_VERSION(0, 2, 0)
inline constexpr unsigned kPluginVersion = 2U << 8;

/// What run_plugins() makes of a hook's return value; -ENOTSUP: "not mine, ask the next plugin".
inline constexpr int kDone = 0;
inline constexpr int kFailed = -1;

/// cr_plugin_desc_t, for kMaxHooks hooks
struct PluginDesc {
    const char* name;
    int (*init)(int stage);
    void (*exit)(int stage, int ret);
    unsigned version;
    unsigned max_hooks;
    void* hooks[kMaxHooks];
};

/// cr_options.final_state, the first int of `opts`: what becomes of the tasks after a dump.
/// COMPEL_TASK_ALIVE, COMPEL_TASK_DEAD, COMPEL_TASK_STOPPED of compel/task-state.h.
enum class FinalState : int { alive = 1, dead = 2, stopped = 3 };

/// LOG_* of criu-log.h
enum class LogLevel : unsigned { message = 0, error = 1, warning = 2, info = 3, debug = 4 };

} // namespace gpustasis::criu
