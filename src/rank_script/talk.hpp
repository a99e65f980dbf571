// SPDX-License-Identifier: Apache-2.0
/// Asking the node's agent, over its socket for ranks.
#pragma once

#include <sys/types.h>

#include <string>

namespace gpustasis {

inline constexpr const char* kSocket = "/run/gpustasis/ranks.sock";

struct Answer {
    bool go = false;
    std::string reason; ///< why not
};

/// Say one line, and wait until it is answered, however long that is. Throws Error: io if there is no agent, or
/// it has gone without an answer; gone if `criu` has ended.
Answer ask(const std::string& line, pid_t criu);

/// The same, again and again until there is an answer: the tasks stand, and what is decided about them may be
/// known to the next agent only. Throws Error: gone.
Answer ask_until_answered(const std::string& line, pid_t criu);

} // namespace gpustasis
