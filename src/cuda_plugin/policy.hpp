// SPDX-License-Identifier: Apache-2.0
/// What a container's annotations ask of its dumps: the policy file that the OCI hook has left.
#pragma once

#include "cuda_plugin/config.hpp"

#include <string>
#include <vector>

namespace gpustasis {

inline constexpr const char* kRunBase = "/run"; ///< policies are in gpustasis/policy below

/// Reads BASE/gpustasis/policy/ID.toml, as python/gpustasis/policy.py writes it.
class PolicyDirectory {
public:
    explicit PolicyDirectory(std::string base = kRunBase) : base_(std::move(base)) {}

    /// Of the containers `ids` the one that has a policy; its keys are set in `config`, which names
    /// the file as a source of its own from then on. Returns its id; empty: none has one. Throws
    /// Error: io; bad_argument naming the file, if it is somebody else's, too long, a link, no
    /// policy, another container's, or if two have one.
    std::string apply(Config& config, const std::vector<std::string>& ids) const;

    /// Leave a mark for the hook: container `id` ends now by a checkpoint and may come back. Its
    /// policy is to stay. Throws Error: io.
    void mark_checkpointed(const std::string& id) const;

private:
    std::string path(const std::string& name) const;

    std::string base_;
};

} // namespace gpustasis
