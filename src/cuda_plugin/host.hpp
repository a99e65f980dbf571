// SPDX-License-Identifier: Apache-2.0
/// What the plugin uses of the criu process it is loaded into.
#pragma once

#include "core/unique_fd.hpp"
#include "cuda_plugin/criu_abi.hpp"

#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

namespace gpustasis::host {

/// Find what criu exports. Throws Error: unsupported; what() names the first symbol missing
/// and the oldest CRIU that has it.
void require_symbols();

/// criu's log, prefixed "cuda_plugin: "; a newline is added. Thread-safe as criu's own.
void error(const std::string& text) noexcept;
void warn(const std::string& text) noexcept;
void info(const std::string& text) noexcept;
void debug(const std::string& text) noexcept;

/// Stops criu's alarm, which is there for its own collecting of tasks, for as long as it lives: the
/// driver's lock has its own deadline.
class PausedAlarm {
public:
    PausedAlarm() noexcept : left_(::alarm(0)) {}
    PausedAlarm(const PausedAlarm&) = delete;
    PausedAlarm& operator=(const PausedAlarm&) = delete;
    ~PausedAlarm() { ::alarm(left_); }

private:
    unsigned left_;
};

/// The image directory, by a descriptor of our own: criu closes its own before it is done with us.
/// Throws Error: io.
UniqueFd open_image_dir();

/// Ask criu to stop tasks by ptrace alone: a frozen cgroup cannot answer the driver's lock.
void use_interrupt_only_mode();

/// Have criu name `name` in inventory.img as a plugin that the restore needs.
/// Throws Error: io if criu cannot.
void add_inventory_plugin(const std::string& name);

/// At restore: whether inventory.img names `name`; ticks it off if so. True for every name if
/// the image is from before CRIU recorded plugins.
bool take_inventory_plugin(const std::string& name);

/// What criu will do with the tasks when the dump has succeeded. A value that this build does
/// not know is read as `alive`: undoing too much costs time, undoing too little costs the job.
criu::FinalState final_state();

/// What was given as --plugin-option=cuda_plugin.NAME=VALUE, in that order; CRIU >= 4.3, empty
/// before. Throws Error: io.
std::vector<std::pair<std::string, std::string>> plugin_options();

} // namespace gpustasis::host
