// SPDX-License-Identifier: Apache-2.0
/// Processes of the plugin's beside criu: nobody's children, with nothing of criu's.
#pragma once

#include <functional>
#include <vector>

namespace gpustasis {

/// Run `body`, which never returns, in a process that is nobody's child here: criu waits for any
/// child when a dump ends, and takes one that it does not know for a bug. The process is a copy of
/// this one, made without exec. Call from one thread, while no other thread of this process runs.
/// `what`: its name for messages. Throws Error: io.
void fork_orphan(const char* what, const std::function<void()>& body);

/// In that process: keep nothing of criu's but the descriptors `keep` (its own hold images, pipes and
/// sockets open that others wait on), take the default action for every signal, block none, leave
/// criu's session (a signal from its terminal must not end the process), and be called `name`.
void shed_criu(std::vector<int> keep, const char* name);

/// After shed_criu(): whoever stops a service or a session asks all of it to end. Who may have the only copy of a task's
/// memory does not, and ends by itself as soon as criu is gone and nothing is left to undo.
void ignore_requests_to_end() noexcept;

} // namespace gpustasis
