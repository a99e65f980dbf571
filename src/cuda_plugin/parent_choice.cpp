// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/parent_choice.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace gpustasis {
namespace {

constexpr const char* kCriuLink = "parent"; // CRIU's CR_PARENT_LINK
constexpr int kMaxHops = 64;                // pre-dumps, which have no manifest, between two dumps

UniqueFd open_directory(int dir_fd, const char* path) {
    return UniqueFd(::openat(dir_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

bool has_manifest(int dir_fd) {
    return ::faccessat(dir_fd, kManifestName, F_OK, 0) == 0;
}

UniqueFd named_parent(const Config& config, int image_dir) {
    UniqueFd dir = open_directory(image_dir, config.parent.c_str());
    if (!dir)
        throw io_error("cannot open the parent " + config.parent, errno);
    if (!has_manifest(dir.get()))
        throw Error(Errc::bad_argument,
                    "the parent " + config.parent + " is no checkpoint of this plugin");
    return dir;
}

/// None if no checkpoint of ours is behind CRIU's links.
UniqueFd linked_parent(int image_dir) {
    UniqueFd dir = open_directory(image_dir, kCriuLink);
    for (int hop = 0; dir && hop < kMaxHops; ++hop) {
        if (has_manifest(dir.get()))
            return dir;
        dir = open_directory(dir.get(), kCriuLink);
    }
    return {};
}

/// None if there is none to build on.
UniqueFd find_parent(const Config& config, int image_dir, const ContainerStore* store) {
    if (!config.parent.empty())
        return named_parent(config, image_dir);
    return store != nullptr ? store->newest() : linked_parent(image_dir);
}

} // namespace

ParentChoice choose_parent(const Config& config, Lineage& lineage, const ContainerStore* store) {
    const int image_dir = lineage.directory(0);
    if (::unlinkat(image_dir, kParentLink, 0) != 0 && errno != ENOENT)
        throw io_error(std::string("cannot remove the old ") + kParentLink, errno);
    if (!config.externalize && config.cpu_memory == CpuMemory::criu) {
        if (!config.parent.empty())
            throw Error(Errc::bad_argument,
                        "parent = \"" + config.parent + "\": needs externalize, which is off");
        return {.index = {}, .directory = {}, .reason = "externalize is off"};
    }
    const UniqueFd dir = find_parent(config, image_dir, store);
    if (!dir)
        return {.index = {},
                .directory = {},
                .reason = store != nullptr ? "no checkpoint in " + store->path() : "no parent"};

    const std::uint32_t length = read_manifest(dir.get()).chain_length;
    if (length >= config.max_chain)
        return {.index = {},
                .directory = {},
                .reason = "max_chain: " + directory_path(dir.get()) + " ends a chain of " +
                          std::to_string(length)};
    link_parent(image_dir, dir.get());
    lineage.directory(1); // and its lock: from here on nobody removes it
    const UniqueFd again = find_parent(config, image_dir, store);
    if (!again || directory_path(again.get()) != lineage.path(1))
        throw Error(Errc::io, lineage.path(1) + " was removed or replaced meanwhile");
    ParentChoice choice;
    choice.directory = lineage.path(1);
    choice.index = ParentIndex::read(lineage);
    if (config.chunk_size != 0 && config.chunk_size != choice.index->chunk_size())
        throw Error(Errc::bad_argument, "chunk_size = " + std::to_string(config.chunk_size) +
                                            ": the parent " + choice.directory + " has " +
                                            std::to_string(choice.index->chunk_size()));
    return choice;
}

} // namespace gpustasis
