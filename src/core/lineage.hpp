// SPDX-License-Identifier: Apache-2.0
/// The checkpoints that one is built on: their directories and the images in them, found by the
/// links of docs/format.md and believed by nothing but their digests.
#pragma once

#include "core/chain_files.hpp"
#include "core/direct_io.hpp"
#include "core/image_info.hpp"
#include "core/image_input.hpp"
#include "core/manifest.hpp"
#include "core/unique_fd.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace gpustasis {

/// In an image directory: leads to the directory of the parent.
inline constexpr const char* kParentLink = "gpustasis-parent";

/// What the text of a parent link is: `relative`, so that both directories can be moved together; `absolute` to
/// a container's store, whose place is fixed: CRI-O takes no archive in which a link leads up and out.
enum class LinkText { relative, absolute };

/// Make, or replace in a single step, the parent link of `dir_fd` to the directory `parent_fd`.
/// Throws Error: bad_argument if both are the same directory, io.
void link_parent(int dir_fd, int parent_fd, LinkText text = LinkText::relative);

/// "3f2a…": `id` in hex.
std::string id_text(const Id& id);

/// The path a directory was opened at, as the kernel knows it; for messages.
std::string directory_path(int dir_fd);

/// Opens what it is asked for and keeps it open, with a shared lock on each directory, so that
/// nobody removes it meanwhile. Not for several threads at once; the descriptors it gives are.
class Lineage {
public:
    /// Of the checkpoint in directory `dir_fd`, which is opened anew. Throws Error: io if somebody
    /// is about to remove it.
    explicit Lineage(int dir_fd);

    /// Of a checkpoint that is to be made on top of the one in `parent_fd`, which is opened anew: that
    /// is depth 1, and there is no depth 0.
    static Lineage above(int parent_fd);

    /// From now on all files of the chain are opened by `files`, and none that lies in the clear is taken for one.
    void open_by(std::shared_ptr<ChainFiles> files);
    bool is_sealed() const noexcept { return opener_ != nullptr; }

    /// The directory `depth` links away; 0: the checkpoint's own. Of a parent that is local (arena.hpp) it is the one
    /// in the arena. Where a link leads nowhere, the
    /// parent is looked for by its id (find_checkpoint()). Throws Error: io, naming the link
    /// and the parent if it is nowhere, and if somebody is about to remove it.
    int directory(std::uint32_t depth);
    /// Where that is; for messages.
    const std::string& path(std::uint32_t depth);

    /// The file of `source`, found to be the very image that is meant.
    /// Throws Error: io if it is missing, corrupt_data if it is another one; what() names the
    /// checkpoint and the path.
    std::shared_ptr<const UniqueFd> file(const Source& source);

    /// The same, to be read. Throws as file(), and as ChainFiles::open().
    std::shared_ptr<const ImageInput> input(const Source& source, IoMode io);
    /// The file `name` of the checkpoint `depth` links away, by open_by(); nullptr: it is in the clear.
    /// Throws as directory(), and as ChainFiles::open().
    std::shared_ptr<const ImageInput> opened(std::uint32_t depth, const std::string& name);
    /// Of the checkpoint `depth` links away. Throws as read_manifest() and opened().
    Manifest manifest(std::uint32_t depth);

    /// Let go of all. Nothing may be asked of it any more.
    void close() noexcept;

    /// Every descriptor it holds; they stay its own.
    std::vector<int> descriptors() const;

private:
    struct Directory {
        UniqueFd fd;
        std::string path;
    };
    Lineage() = default;
    Directory open_parent(std::uint32_t depth);
    UniqueFd open_link_or_search(std::uint32_t depth);
    UniqueFd open_stored_parent(std::uint32_t depth);
    Manifest read_manifest_in(std::uint32_t depth, int directory);

    std::shared_ptr<ChainFiles> opener_; ///< none: all is in the clear
    std::vector<Directory> directories_; ///< by depth
    using Place = std::tuple<std::uint32_t, std::uint32_t, MemoryKind>;     ///< depth, pid, kind
    std::map<Place, std::pair<Id, std::shared_ptr<const UniqueFd>>> files_; ///< digest, file
};

/// Where checkpoints that others are built on are kept (docs/format.md, "Links").
inline constexpr const char* kStoreRoot = "/var/lib/gpustasis";

/// The directory with the checkpoint `id`, by its manifest: `root`/checkpoints/<id in hex>, else
/// `root`/containers/<any>/<id in hex>; no descriptor if there is none. What cannot be read is not
/// it. That its images are the right ones, their digests tell. `read` gives the manifest in a directory.
using ReadManifest = std::function<Manifest(int directory)>;
UniqueFd find_checkpoint(const Id& id, const std::string& root = kStoreRoot,
                         const ReadManifest& read = read_manifest);

/// For a message: where that looks.
std::string searched_places(const std::string& root = kStoreRoot);

} // namespace gpustasis
