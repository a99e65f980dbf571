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

/// The number of criu's own descriptor of its image directory; negative: it has none.
int image_dir() noexcept;

/// Have criu's image directory be what `directory` is, from now on.
/// Throws Error: io if criu has none (any more).
void set_image_dir(int directory);

/// Whether criu has noticed that an image lacks its last bytes: it fails the dump for that when it has closed
/// the last one. Only where require_fail_dump() has passed.
bool images_are_cut() noexcept;

/// Have the dump that is under way fail, and criu undo it: let the tasks run on, give them their network back,
/// and say so to whoever asked for it. Only before criu looks whether all images were written, which is
/// when it has closed the last of them. False: this criu did not take it.
bool fail_dump() noexcept;

/// Undo what criu itself has done to the job for a dump, as it does when the tasks run on: the lock of the network,
/// what holds a security module back, and links to files without a name. This process ends next.
void undo_dump_of_criu() noexcept;

/// Throws Error: unsupported if this criu does not export what fail_dump() needs.
void require_fail_dump();

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

/// Whether this criu hands RESTORE_EXT_FILE a `bool*` as well, and goes by what it finds there; CRIU >= 4.3.
bool asks_whether_to_retry() noexcept;

/// What was given as --plugin-option=cuda_plugin.NAME=VALUE, in that order; CRIU >= 4.3, empty
/// before. Throws Error: io.
std::vector<std::pair<std::string, std::string>> plugin_options();

} // namespace gpustasis::host
