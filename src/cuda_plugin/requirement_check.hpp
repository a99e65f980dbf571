// SPDX-License-Identifier: Apache-2.0
/// Whether the files that a checkpoint's tasks had mapped are still what they were.
#pragma once

#include "core/requirements.hpp"

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace gpustasis {

/// Of those that lie in criu's own mount namespace, compared before anything is created: one sentence
/// for each that is missing or another. Throws Error: io.
std::vector<std::string> find_changed_files(const Requirements& expected);

/// Of the others: their mount namespaces exist, and what is in them, only when criu has made the tasks.
/// `tasks`, of which `root` is the tree's first, are complete and none of them has run. Compared is what
/// they have mapped again; how many of these could not be is a warning in criu's log. Throws Error: io.
std::vector<std::string> find_changed_mappings(const Requirements& expected, pid_t root,
                                               const std::vector<pid_t>& tasks);

/// Throws Error: unsupported with the first of the differences that `find` returns if there are any, and
/// what `find` throws; if `ignore`, warns of either in criu's log.
void require_unchanged(const std::function<std::vector<std::string>()>& find, bool ignore);

} // namespace gpustasis
